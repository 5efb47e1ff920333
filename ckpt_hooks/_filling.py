"""What a rerun does with each tensor that autograd saves in it.

The hook made here takes the tensors in order, as the values of the handles of the same numbers, and ends the rerun as soon as
the last handle that is still alive has its value (Rule 5), by an exception: there the operator that saves has not even run
yet. Two things follow from that.

*User code must not swallow the stop* (Rule 8): it derives from ``BaseException``, and a function that swallows it all the
same meets it again at the next tensor it saves; however it ends, every value is there already.

*The value must be complete*. Operators save their inputs before they run, and one of them, ``rrelu_with_noise``, saves a
fresh tensor that it fills only then (https://github.com/pytorch/pytorch/issues/193671); nothing in its schema or in version
counters tells. So where the operator that saves the last value has also saved a floating-point tensor that needs no gradient
and is no parameter, the stop waits until that operator is through: until the next tensor saved by another one, or the end of
the function. Tensors that one operator saves share autograd's sequence number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from ._runtime.frame import Frame, Handle, format_path
from ._torch import sequence_number
from .determinism import describe
from .errors import DeterminismError

__all__ = ["Filling", "StopRecompute"]

_TIP = (
    "The function did not do the same again. Usual causes: a global, a module attribute or train()/eval() that changed between "
    "forward and backward; a cache that forward filled; randomness from outside of torch. Pass `debug=True` to see the "
    "operators of both runs."
)


class StopRecompute(BaseException):
    """Ends a rerun that has all it came for. Not an ``Exception``, so that no handler for those sees it (Rule 8)."""


class Filling:
    """The values of one rerun.

    Attributes:
        stopped: Whether the rerun was told to stop, which it is when every value is there.
    """

    __slots__ = ("_check_metadata", "_differing", "_early_stop", "_frame", "_last", "_surplus", "_values", "_wanted", "stopped")

    def __init__(self, frame: Frame, wanted: Collection[int] | None, *, early_stop: bool, check_metadata: bool) -> None:
        """Prepares to fill handles.

        Args:
            frame: Whose handles.
            wanted: Which ones; None for all that are alive.
            early_stop: Whether to end the rerun with the last of them.
            check_metadata: Whether values must have the shape, dtype and device noted in their handles.
        """
        handles = frame.handles
        if wanted is None:
            last = len(handles) - 1
            while last >= 0 and handles[last]() is None:
                last -= 1
        else:
            last = max(wanted)
        self._frame = frame
        self._wanted = wanted
        self._last = last
        self._early_stop = early_stop
        self._check_metadata = check_metadata
        self._values: list[torch.Tensor | None] = []
        self._differing: list[tuple[int, str, str]] = []
        self._surplus = 0
        self.stopped = False

    def hook(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the pack hook of the rerun.

        What it hands to autograd for the graph of the rerun is what it keeps as the value, so that user code may run backward
        on that graph: the tensor without its history. Also where it needs no gradient, since a framework that frees a
        parameter's storage by giving it another one would leave the value empty.
        """
        handles, wanted, values, last = self._frame.handles, self._wanted, self._values, self._last
        check_metadata = self._check_metadata
        stop_at = last if self._early_stop else -1
        append = values.append
        unfinished = -1  # sequence number of the operator that saved what it may yet write to

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal unfinished
            index = len(values)
            if index > last:
                return self._past_last(tensor, unfinished)
            if not tensor.requires_grad and _may_be_unfinished(tensor):
                unfinished = sequence_number()
            tensor = tensor.detach()
            handle = handles[index]()
            if handle is None or (wanted is not None and index not in wanted):
                append(None)
            else:
                if check_metadata and (
                    tensor.shape != handle.shape or tensor.dtype is not handle.dtype or tensor.device != handle.device
                ):
                    self._note_difference(index, handle, tensor)
                append(tensor)
            if index == stop_at and unfinished != sequence_number():
                self.stopped = True
                raise StopRecompute
            return tensor

        return fill

    def _past_last(self, tensor: torch.Tensor, unfinished: int) -> torch.Tensor:
        self._surplus += 1
        if self._early_stop:
            if unfinished != sequence_number():
                self.stopped = True
                raise StopRecompute
        elif self._frame.complete and len(self._values) + self._surplus > len(self._frame.handles):
            raise StopRecompute
        return tensor.detach()

    def _note_difference(self, index: int, handle: Handle, found: torch.Tensor) -> None:
        expected = describe(handle.shape, handle.dtype, handle.device)
        self._differing.append((index, expected, describe(found.shape, found.dtype, found.device)))

    def result(self) -> list[torch.Tensor | None]:
        """Returns the values when the rerun has ended.

        Raises:
            DeterminismError: If the rerun saved other tensors than forward.
        """
        num_expected, num_found = len(self._frame.handles), len(self._values) + self._surplus
        must_match = self._frame.complete and not self._early_stop
        if must_match and num_found > num_expected:
            raise self._error(
                "The function is trying to save more tensors during recomputation than during the original forward pass.\n"
                f"Number of tensors saved during forward: {num_expected}\n{self._differences()}",
                num_expected,
                f"{num_expected} tensors",
                f"{num_found} tensors or more",
            )
        if len(self._values) <= self._last or (must_match and num_found < num_expected):
            raise self._error(
                "A different number of tensors was saved during the original forward and recomputation.\n"
                f"Number of tensors saved during forward: {num_expected}\n"
                f"Number of tensors saved during recomputation: {num_found}\n{self._differences()}",
                num_found,
                f"{num_expected} tensors",
                f"{num_found} tensors",
            )
        if self._differing:
            raise self._error(
                "Recomputed values for the following tensors have different metadata than during the forward pass.\n"
                f"{self._differences()}",
                *self._differing[0],
            )
        return self._values

    def _differences(self) -> str:
        return "".join(
            f"tensor at position {index}:\nsaved metadata: {expected}\nrecomputed metadata: {found}\n"
            for index, expected, found in self._differing
        )

    def _error(self, message: str, index: int, expected: str, found: str) -> DeterminismError:
        region = format_path(self._frame.path)
        return DeterminismError(
            f"region {'/'.join(region)!r}: {message}{_TIP}", region=region, index=index, expected=expected, found=found
        )


def _may_be_unfinished(tensor: torch.Tensor) -> bool:
    """Whether the operator that saves a tensor, which needs no gradient, may be going to fill it."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    base = tensor._base
    # A frozen weight and views of it were there before the region ran.
    return not isinstance(tensor if base is None else base, torch.nn.Parameter)
