"""Private parts of operators: their classes, effects, and torch's selective modes.

Each private name says which versions have it, and when it may go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

# What operators are: overloads, and operators of operators; several overloads of one name are a packet. 2.11 to 2.15. Goes when
# these classes are public.
OVERLOAD: Any = torch._ops.OpOverload
OPERATORS: Any = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
OPERATOR_PACKET: Any = torch._ops.OpOverloadPacket

# The two dispatch modes of torch's own selective checkpointing. The first has the policy as ``policy_fn``, and both have one
# ``storage``. A pair is recognised, for the package's own modes to carry it out. 2.11 to 2.15. Goes when torch's modes are
# exact.
SELECTIVE_FORWARD: Any = torch.utils.checkpoint._CachingTorchDispatchMode
SELECTIVE_RECOMPUTE: Any = torch.utils.checkpoint._CachedTorchDispatchMode

# Whether an operator has an effect that must not be repeated: one registered by ``torch.library``, or that of an object of
# TorchBind among its arguments. The module is there as soon as torch is; its policies ask it since 2.15. 2.11 to 2.15. Goes
# with a public way.
has_effects: Callable[[Any], bool] = torch._higher_order_ops.effects.has_effects

# Returns a tensor that a collective fills, when it is complete; to wait for it again does no harm. 2.11 to 2.15. Goes when the
# operator is public.
wait_for_collective: Any = lambda tensor: torch.ops._c10d_functional.wait_tensor.default(tensor)  # noqa: E731
