"""Private parts of devices: current device and stream, autocast, generators, backends.

Each private name says which versions have it, and when it may go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

# 0.06 us for a question that takes one public call a device type. 2.11 to 2.15. Goes when the public way is as quick.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
address_of_generator: Callable[[Any], int] = lambda generator: generator._cdata  # noqa: E731


# The current device of CUDA, and number, device and kind of a device's current stream, without a look whether CUDA is
# initialised and without an object: 0.1 us each. None in builds without CUDA. 2.11 to 2.15. Goes when the public way is as
# quick.
cuda_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
cuda_stream_data: Callable[[int], tuple[int, int, int]] | None = getattr(torch._C, "_cuda_getCurrentStream", None)

# The name under which a backend outside of torch has registered, ``"privateuseone"`` if none has. 2.11 to 2.15. Goes with a
# public way.
private_backend_name: Callable[[], str] = torch._C._get_privateuse1_backend_name
