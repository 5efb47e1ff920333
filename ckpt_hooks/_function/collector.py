"""What a rerun does with each tensor that autograd saves in it.

The hook made here takes the tensors in order, as the values of the handles of the same numbers, and ends the rerun as soon as
the last handle that is still alive has its value (Rule 5), by an exception: there the operator that saves has not even run
yet. Two things follow from that.

*User code must not swallow the stop* (Rule 8): it derives from ``BaseException``, and a function that swallows it all the
same meets it again at the next tensor it saves; however it ends, every value is there already.

*The value must be complete*. Operators save their inputs before they run, and one of them, ``rrelu_with_noise``, saves a
fresh tensor that it fills only then (https://github.com/pytorch/pytorch/issues/193671); version counters do not tell. So
where the operator that saves the last value has saved another tensor before it, one that needs no gradient, the stop waits
until that operator is through: until the next tensor saved by another one, or the end of the function. (The tensor saved last
needs no such care, unless something else was saved after it in forward: rrelu saves its noise first. Dropout saves its mask
last, and a whole tensor of memory hangs on stopping there.) Tensors that one operator saves share autograd's sequence number.
A test goes through the schemas of all operators for more of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain, repeat
from typing import Any

import torch

from ckpt_hooks._core.frame import Frame, Mark
from ckpt_hooks._core.modes import is_without_values, only_quiet_modes, past_modes, unseen
from ckpt_hooks._core.passes import MISSING
from ckpt_hooks._core.paths import format_path
from ckpt_hooks._core.words import describe
from ckpt_hooks._tensors.copies import stand_in_for
from ckpt_hooks._tensors.determinism import Check, version_of
from ckpt_hooks._tensors.determinism import first_difference as first_other_fingerprint
from ckpt_hooks._tensors.fingerprints import may_be_unfilled
from ckpt_hooks._torch import detach_past_modes, sequence_number, storage_of
from ckpt_hooks.errors import DeterminismError, MutationError

from .boundaries import NO_MARKS, first_difference
from .explain import mutation_error, name_of, node_of
from .state.leftovers import Leftovers

__all__ = ["TIP", "Filling", "StopRecompute"]

#: Ends errors of reruns that did something else than forward.
TIP = (
    "The function did not do the same again. Usual causes: a global, a module attribute or train()/eval() that changed between "
    "forward and backward; a cache that forward filled; randomness from outside of torch. Pass `debug=True` to see the "
    "operators of both runs."
)


#: Stands for the last value wanted, among booleans that say of each tensor that forward saved whether it is.
_STOP: Any = object()

_copy = unseen(stand_in_for)


class StopRecompute(BaseException):
    """Ends a rerun that has all it came for. Not an ``Exception``, so that no handler for those sees it (Rule 8)."""


class Filling:
    """The values of one rerun.

    Attributes:
        last: The number of the last tensor that is wanted.
        leftovers: What follows tensors that forward left in objects, if it did.
        marks: Those that regions inside left in this rerun.
        values: One entry a tensor that the rerun saved so far: the tensor, or :data:`MISSING` where it was not wanted.
        stopped: Whether the rerun was told to stop, which it is when every value is there.
    """

    __slots__ = (
        "_detach",
        "_doubt",
        "_early_stop",
        "_frame",
        "_function",
        "_versions",
        "_wanted",
        "_without_grad",
        "last",
        "leftovers",
        "marks",
        "stopped",
        "values",
    )

    def __init__(self, frame: Frame, function: Any, *, early_stop: bool, selective: bool = False) -> None:
        """Prepares to fill handles.

        Args:
            frame: Whose handles.
            function: What is called again, for an error to name tensors in it.
            early_stop: Whether to end the rerun when everything wanted is there.
            selective: Whether a selective policy's mode will be active in the rerun.
        """
        self._detach = detach_past_modes if selective and only_quiet_modes() else torch.Tensor.detach
        self._frame = frame
        self._function = function
        self._early_stop = early_stop
        self.values: list[torch.Tensor] = []
        self.marks: list[Mark] = []
        self.leftovers: Leftovers | None = None
        self._wanted: Collection[int] | None = None
        self._without_grad: list[int] = []
        self.last = -1
        self.stopped = False
        self._doubt: tuple[int, Callable[[], MutationError]] | None = None  # how many wanted values are not to be trusted
        self._versions: list[int] | None = None

    def distrust(self, error: Callable[[], MutationError]) -> None:
        """Tells that the rerun is about to read what has changed since forward, which ends it: no value to come is right.

        Args:
            error: Returns the error for whoever asks for one of those values.
        """
        trusted = len(self.values)
        if trusted <= self.last:
            self._doubt = self.last + 1 - trusted, error
            self.last = trusted - 1
            if self._early_stop:
                self._stop()

    def hook(
        self,
        wanted: Collection[int] | None,
        exchanged: frozenset[int | None] = frozenset(),
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the pack hook of the rerun.

        What it hands to autograd for the graph of the rerun is what it keeps as the value, so that user code may run backward
        on that graph: the tensor without its history. Parameters are taken by an alias of their own also where they need no
        gradient, since a framework that frees one by giving it another storage would leave the value empty. (To take the
        history off all values at once when the rerun has ended was tried: no faster, for the holders that it takes.)

        Args:
            wanted: Which handles to fill; None for all that are alive.
            exchanged: Storages whose content is that of forward during the rerun only: values are copied out of them.
        """
        values = self.values
        asked: list[Any] = self._frame.alive()
        final = len(asked) - 1 if wanted is None else -1
        if wanted is not None:
            asked = [alive and index in wanted for index, alive in enumerate(asked)]
        while asked and not asked[-1]:
            asked.pop()
        self.last, self._wanted = len(asked) - 1, wanted
        if asked and self._early_stop:
            asked[-1] = _STOP
        next_asked = chain(asked, repeat(None)).__next__
        append, append_without_grad = values.append, self._without_grad.append
        plain, detach = torch.Tensor, self._detach
        unfinished = -1  # sequence number of the operator that saved what it may yet write to

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal unfinished
            step = next_asked()
            if step:
                if tensor.requires_grad:
                    tensor = detach(tensor)
                else:
                    index = len(values)
                    append_without_grad(index)
                    if index != final:
                        unfinished = sequence_number()
                    if exchanged and storage_of(tensor) in exchanged:
                        tensor = _copy(tensor)
                    elif type(tensor) is not plain:
                        tensor = detach(tensor)
                append(tensor)
                if step is _STOP and unfinished != sequence_number():
                    self._stop()
                return tensor
            if step is None:
                return self._past_last(tensor, unfinished)
            append(MISSING)
            if tensor.requires_grad:
                return tensor if tensor.is_leaf else detach(tensor)
            index = len(values) - 1
            append_without_grad(index)
            if index != final:
                unfinished = sequence_number()
            return tensor

        return fill

    def noting_versions(self, hook: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a pack hook that notes at which version each value was saved, to be compared with where forward's is higher.

        For a rerun under a dispatch mode whose forward ran without one: under any, torch does some things out of place that it
        does in place otherwise (``torch.nn.functional.linear`` adds its bias so).
        """
        versions = self._versions = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            versions.append(-1 if tensor.is_inference() else tensor._version)
            return hook(tensor)

        return note

    def _stop(self) -> None:
        """Ends the rerun, unless it has to be seen what the function does to objects that it has read."""
        self.stopped = True
        if self.leftovers is None or self.leftovers.first is None:
            raise StopRecompute

    def _past_last(self, tensor: torch.Tensor, unfinished: int) -> torch.Tensor:
        self.values.append(MISSING)
        if self._early_stop:
            if unfinished != sequence_number():
                self._stop()
        elif self._frame.complete and len(self.values) > len(self._frame.numbers):
            raise StopRecompute
        return tensor.detach()

    def result(self, check: Check, marks: Sequence[Mark] = NO_MARKS) -> list[torch.Tensor]:
        """Returns the values when the rerun has ended: one entry a handle up to the last wanted, ``MISSING`` for the others.

        A value that the function modified in place after it was saved, as in ``y = x.sin(); x.mul_(2)``, is left out as well,
        unless it is the only one wanted: by itself, it is brought back before that.

        Args:
            check: What values must have in common with what forward saved.
            marks: Those that regions inside left in forward.

        Raises:
            DeterminismError: If the rerun saved other tensors than forward.
            MutationError: If the only value wanted was modified in place since forward saved it.
        """
        values, frame = self.values, self._frame
        if not self._early_stop and frame.complete and len(values) != len(frame.numbers):
            self._raise_miscounted()
        num_doubtful, mutated = self._doubt or (0, None)
        if mutated is not None and self._wanted is not None and len(self._wanted) == 1:
            raise mutated()
        end = self.last + 1
        if len(values) != end:
            if len(values) < end:
                self._raise_miscounted()
            del values[end:]
            if num_doubtful:
                self._without_grad = [index for index in self._without_grad if index < end]
        if marks or self.marks:
            self._compare_marks(marks)
        found = list(map(check.facts, values))
        expected = frame.facts if self._versions is None else list(map(_at_lower_version, frame.facts, self._versions))
        if found != (expected if len(expected) == len(found) else expected[: len(found)]):
            self._look_into(found, expected)
        if self._without_grad != frame.without_grad:
            self._compare_grad()
        if check.fingerprint is not None and not is_without_values():
            self._compare_values(check.fingerprint)
        return values + [MISSING] * num_doubtful  # each of which is asked for by itself

    def _compare_marks(self, marks: Sequence[Mark]) -> None:
        found = first_difference(marks, self.marks, self.last)
        if found is not None:
            _, expected, now = found
            raise self._error(
                "A region inside of this one was given another number of tensors during recomputation than during the original "
                "forward pass, or at another place.\n"
                f"region inside during forward: {expected}\n"
                f"region inside during recomputation: {now}\n",
                *found,
            )

    def let_go(self) -> None:
        """Ends the filling, well or not: autograd keeps the hook as long as the graph of the rerun, which may last (Rule 9)."""
        self.values.clear()
        if self.leftovers is not None:
            self.leftovers.let_go()
        del self._frame, self._function, self._doubt

    def _look_into(self, found: list[Any], expected_facts: list[Any]) -> None:
        differences = self._differences()
        if differences:
            raise self._error(
                "Recomputed values for the following tensors have different metadata than during the forward pass.\n"
                f"{_in_words(differences)}",
                *differences[0],
            )
        for index, (value, expected, now) in enumerate(zip(self.values, expected_facts, found, strict=False)):
            if value is not MISSING and expected != now:
                if self._wanted is not None and len(self._wanted) == 1:
                    raise mutation_error(
                        self._name(index), value, version_of(expected), format_path(self._frame.path), is_same=False
                    )
                self.values[index] = MISSING

    def _name(self, index: int) -> str:
        default = f"tensor {index} of those that it saved"
        return name_of(self.values[index], self._function, default)

    def _compare_values(self, fingerprint: Callable[[torch.Tensor], Any]) -> None:
        frame = self._frame
        expected = list(frame.fingerprints[: len(self.values)])
        with torch.no_grad():
            index, found = past_modes(self._first_difference, fingerprint, expected)
        if index is not None:
            value = self.values[index]
            what = describe(value.shape, value.dtype, value.device)
            raise self._error(
                "Recomputed values differ from those of the forward pass, first in the following tensor.\n"
                f"tensor at position {index}: {what}\n",
                index,
                f"{what} with fingerprint {_short(expected[index])}",
                f"{what} with fingerprint {_short(found[index])}",
            )

    def _first_difference(
        self, fingerprint: Callable[[torch.Tensor], Any], expected: list[Any]
    ) -> tuple[int | None, list[Any]]:
        found = [
            None if one is None or value is MISSING else fingerprint(value)
            for one, value in zip(expected, self.values, strict=True)
        ]
        while (index := first_other_fingerprint(expected, found)) is not None and self._is_unfilled(index):
            found[index] = None
        return index, found

    def _is_unfilled(self, index: int) -> bool:
        """Whether a tensor is memory that an operator saves and never fills, and which no result of that operator told of."""
        return index in self._without_grad and may_be_unfilled(node_of(self._frame, index), self.values[index])

    def _compare_grad(self) -> None:
        expected = [index for index in self._frame.without_grad if index < len(self.values)]
        found = self._without_grad
        if expected != found:
            index = min(set(expected) ^ set(found))
            before, now = (f"a tensor with requires_grad={index not in indices}" for indices in (expected, found))
            raise self._error(
                "Tensors saved during recomputation require grad where those of the forward pass did not, or the other way "
                f"round.\ntensor at position {index}: {before} in forward, {now} in recomputation.\n",
                index,
                before,
                now,
            )

    def _raise_miscounted(self) -> None:
        expected, found = len(self._frame.numbers), len(self.values)
        differences = _in_words(self._differences())
        if found > expected:
            raise self._error(
                "The function is trying to save more tensors during recomputation than during the original forward pass.\n"
                f"Number of tensors saved during forward: {expected}\n{differences}",
                expected,
                f"{expected} tensors",
                f"{found} tensors or more",
            )
        raise self._error(
            "A different number of tensors was saved during the original forward and recomputation.\n"
            f"Number of tensors saved during forward: {expected}\n"
            f"Number of tensors saved during recomputation: {found}\n{differences}",
            found,
            f"{expected} tensors",
            f"{found} tensors",
        )

    def _differences(self) -> list[tuple[int, str, str]]:
        """Returns position, saved and recomputed metadata of each value that differs; what was not wanted does not."""
        differences = []
        for index, (value, expected) in enumerate(zip(self.values, self._frame.facts, strict=False)):
            if value is not MISSING and isinstance(expected, tuple):
                shape, dtype, device = expected[:3]
                if (value.shape, value.dtype, value.device) != (shape, dtype, device):
                    found = describe(value.shape, value.dtype, value.device)
                    differences.append((index, describe(shape, dtype, device), found))
        return differences

    def _error(self, message: str, index: int, expected: str, found: str) -> DeterminismError:
        region = format_path(self._frame.path)
        return DeterminismError(
            f"region {'/'.join(region)!r}: {message}{TIP}", region=region, index=index, expected=expected, found=found
        )


def _at_lower_version(facts: Any, version: int) -> Any:
    """Returns what was noted of a tensor in forward, with a version that it was saved at in the rerun if that is a lower one.

    It is a higher one where somebody wrote to a tensor from outside of the rerun since forward.
    """
    if not isinstance(facts, tuple):
        return facts if facts is None else min(facts, version)
    return facts if facts[-1] is None or facts[-1] <= version else (*facts[:-1], version)


def _short(fingerprint: Any) -> str:
    words = repr(fingerprint.tolist() if isinstance(fingerprint, torch.Tensor) else fingerprint)
    return words if len(words) <= 80 else f"{words[:80]}..."


def _in_words(differences: list[tuple[int, str, str]]) -> str:
    return "".join(
        f"tensor at position {index}:\nsaved metadata: {expected}\nrecomputed metadata: {found}\n"
        for index, expected, found in differences
    )
