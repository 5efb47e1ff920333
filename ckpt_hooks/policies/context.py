"""The context of a policy's question: facts of one run of an operator."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils.checkpoint

from ckpt_hooks._core.parts import inner_tensors
from ckpt_hooks._core.whereabouts import site_of
from ckpt_hooks._tensors.walk import tensors_in
from ckpt_hooks._torch import storage_of

__all__ = ["SelectiveCheckpointContext"]


class SelectiveCheckpointContext(torch.utils.checkpoint.SelectiveCheckpointContext):
    """Facts of one run of an operator, for a policy. A policy which keeps a context keeps the run's tensors alive.

    Attributes:
        is_recompute: False, since regions ask in forward only. (Torch has the attribute for older code.)
        op_output: The result of the operator.
        index: The number of earlier questions in the region. A program has the same indices under ``checkpoint(policy=...)``
            and ``checkpoint_region(policy=...)``. None for a view, or an operator which writes in place, whose output is never
            kept: ``create_selective_checkpoint_contexts`` asks a function about these too, as torch does.
    """

    is_recompute = False
    index: int | None = None
    _arguments: Any = ()
    _site: str | None = None

    def __init__(self, *, is_recompute: bool = False, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output

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
        """The line of the user's program which runs the operator, as in ``"model.py:12"``.

        The look-up happens on reading, which has to be while the policy decides. None afterwards, if not read before.
        """
        if self._site is None:
            frame, asks = sys._getframe(1), f"{__package__}.decisions"
            while frame is not None and not (frame.f_globals.get("__name__") == asks and frame.f_locals.get("context") is self):
                frame = frame.f_back  # type: ignore[assignment]
            self._site = site_of(frame)
        return self._site


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in ``value``, and the inner tensors of wrapper subclasses in their place."""
    return [tensor for tensor in tensors_in(value) if type(tensor) is torch.Tensor or not inner_tensors(tensor)]
