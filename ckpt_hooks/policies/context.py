"""The dispatch mode which consults a policy about each operator of a region, with the facts of the operator's run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from ckpt_hooks._core.call_sites import site_of
from ckpt_hooks._core.misuse import check_signature
from ckpt_hooks._core.unseen import WatchesUnseen
from ckpt_hooks._tensors.containers import tensors_in
from ckpt_hooks._torch.tensors import inner_tensors, storage_of

from .base import PARAMETERS

_TorchContext = torch.utils.checkpoint.SelectiveCheckpointContext


class SelectiveCheckpointContext(WatchesUnseen, _TorchContext):
    """The dispatch mode of a region under a policy, and what the policy is told: facts of the operator that has just run.

    A region has one context, which runs its operators and hands itself to the policy. The facts hold while the policy decides,
    and are gone afterwards: a policy which keeps a context keeps no tensor alive.

    Args:
        is_recompute: False, since regions ask in forward only. (Torch has the attribute for older code.)
        op_output: The result of the operator.

    Attributes:
        is_recompute: As above.
        op_output: As above.
        index: The number of earlier questions in the region. A program has the same indices under ``checkpoint(policy=...)``
            and ``checkpoint_region(policy=...)``. None for a view, or an operator which writes in place, whose output is never
            kept: ``create_selective_checkpoint_contexts`` asks a function about these too, as torch does.

    Example:
        >>> import torch
        >>> from ckpt_hooks.policies import CheckpointPolicy, SelectiveCheckpointContext
        >>> def save_large(ctx, op, *args, **kwargs):
        ...     return CheckpointPolicy.MUST_SAVE if ctx.nbytes > 1024 else CheckpointPolicy.PREFER_RECOMPUTE
        >>> save_large(SelectiveCheckpointContext(op_output=torch.ones(512)), torch.ops.aten.sin.default)
        <CheckpointPolicy.MUST_SAVE: 0>
    """

    index: int | None = None
    _arguments: Any = ()
    _site: str | None = None

    def __init__(self, *, is_recompute: bool = False, op_output: Any = None) -> None:
        super().__init__()
        self.is_recompute = is_recompute
        self.op_output = op_output

    def consult(self, policy: Callable[..., Any], op: Any, args: Any, kwargs: Any, output: Any, index: int | None) -> Any:
        """Returns the answer of a policy on one run of an operator.

        Args:
            policy: Is called with this context, the operator and its arguments.
            op: The operator.
            args: The positional arguments.
            kwargs: The keyword arguments.
            output: The result.
            index: The number of earlier questions in the region; None for an operator whose output is never kept.
        """
        self.op_output, self.index, self._arguments = output, index, (args, kwargs)
        try:
            return policy(self, op, *args, **kwargs)
        except TypeError:  # its own, unless it does not take what it is given
            check_signature(policy, "policy", PARAMETERS, (self, op, *args), kwargs)
            raise
        finally:
            self.op_output = self.index = self._site = None
            self._arguments = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the operator's outputs, each storage counted once; storages of its arguments are not counted.

        A tensor without a storage, such as a sparse tensor, counts as a dense tensor of its shape.
        """
        counted = {storage_of(tensor) for tensor in _tensors_in(self._arguments)}
        total = 0
        for tensor in _tensors_in(self.op_output):
            storage = storage_of(tensor)
            if storage is None:
                total += tensor.numel() * tensor.element_size()
            elif storage not in counted:
                counted.add(storage)
                total += tensor.untyped_storage().nbytes()
        return total

    @property
    def site(self) -> str | None:
        """The line of the user's program which runs the operator, as in ``"model.py:12"``; None while no policy decides.

        The look-up happens on reading.
        """
        if self._site is None:
            frame = sys._getframe(1)
            while frame is not None and not (frame.f_code is _CONSULT and frame.f_locals["self"] is self):
                frame = frame.f_back  # type: ignore[assignment]
            self._site = site_of(frame)
        return self._site


_CONSULT = SelectiveCheckpointContext.consult.__code__


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in ``value``, and the inner tensors of wrapper subclasses in their place."""
    return [tensor for tensor in tensors_in(value) if type(tensor) is torch.Tensor or not inner_tensors(tensor)]
