"""Comparison of saved and replayed values, for a recorded region inside a dispatch mode of the user's.

Such a mode sees operators after the recorder, so its changes to results are not on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._core.descriptions import describe, describe_tensor, format_path
from ckpt_hooks._core.modes import is_without_values, modes_in_words, past_modes, users_modes
from ckpt_hooks._tensors.determinism import Fingerprints, first_difference, hash_of, may_be_unfilled
from ckpt_hooks._torch.autograd import current_node
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks.errors import DeterminismError

from .replayed import Handle


def _fingerprint(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:  # may have no shape
        return hash_of(tensor)
    return tuple(tensor.shape), tensor.dtype, tensor.device, hash_of(tensor)


def _in_words(fingerprint: Any) -> str:
    if not isinstance(fingerprint, tuple):
        return str(fingerprint)
    shape, dtype, device, values = fingerprint
    return f"{describe(shape, dtype, device)} with fingerprint {values.item() if isinstance(values, torch.Tensor) else values}"


class ComparedValues:
    """Fingerprints of the values of one frame."""

    __slots__ = ("_fingerprints", "_numbers", "_taken", "_without_grad", "modes")

    def __init__(self, modes: Sequence[str]) -> None:
        self.modes = modes  # names of the modes around the outermost region
        self._fingerprints = Fingerprints(_fingerprint, ())
        self._taken = self._fingerprints.taken
        self._numbers: list[int] = []  # numbers of values
        self._without_grad: set[int] = set()

    @skipped
    def packing(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Returns a pack hook which takes the fingerprints of tensors with handles."""
        fingerprints, numbers, without_grad = self._fingerprints, self._numbers, self._without_grad

        def pack_compared(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if isinstance(packed, Handle):
                if not tensor.requires_grad:
                    without_grad.add(len(numbers))
                numbers.append(packed.value.number)
                fingerprints.note(tensor)
            return packed

        return pack_compared

    def close(self) -> None:
        """Ends forward; the pack hook drops the fingerprints."""
        self._fingerprints.close()

    def compare(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Compares a replayed tensor with the saved tensor."""
        index, value = handle.index, handle.value
        # Not compared are kept tensors, and those written to without a count of the version: plain autograd takes these as
        # they are.
        if value.saved is not None or value.number != self._numbers[index] or is_without_values():
            return
        expected = self._taken[index]
        if expected is None:
            return
        with torch.no_grad():
            found = past_modes(_fingerprint, tensor)
            if past_modes(first_difference, [expected], [found]) is None:
                return
        node = current_node()
        if index in self._without_grad and may_be_unfilled(node, tensor):
            return
        grad_fn = None if node is None else node.name()
        region = format_path(handle.frame.path)
        saved_by = "" if node is None else f" It was saved by {grad_fn}."
        raise DeterminismError(
            f"region {'/'.join(region)!r}: the replay of the region came to other values than forward.\n"
            f"tensor at position {index}: {describe_tensor(tensor)}\nAn operator does not do the same each time, or a mode "
            "around the region changes results: have its output kept by a policy, or enter the mode inside the region."
            f"{saved_by}{modes_in_words(self.modes, users_modes())}",
            region=region,
            index=index,
            expected=_in_words(expected),
            found=_in_words(found),
            grad_fn=grad_fn,
        )
