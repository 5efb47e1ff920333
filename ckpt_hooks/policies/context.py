"""What a policy is told about one run of an operator, besides the operator and its arguments."""

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
    """What a policy is told besides the operator and its arguments. A policy that keeps a context keeps its tensors alive.

    Attributes:
        is_recompute: False: a policy is asked in forward only. (Torch has the same, for code written before that.)
        op_output: What the operator returned.
        index: How many operators of the region the policy was asked about before this one. The same program has the same
            indices under ``checkpoint(policy=...)`` and ``checkpoint_region(policy=...)``. None for a view, or an operator
            that writes in place, of which nothing is kept: ``create_selective_checkpoint_contexts`` asks a function about
            these too, as torch does.
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

        A tensor without a storage, such as a sparse one, counts as a dense one of its shape.
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
        """The line of the user's program that runs the operator, as in ``"model.py:12"``.

        It is looked up when it is read, which has to be while the policy decides; None where it was not.
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
