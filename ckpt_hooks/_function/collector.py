"""The collector of a rerun: takes the tensors saved in the rerun, and ends the rerun after the last value wanted.

The collector's pack hook takes the tensors in order, as the values of the handles with the same numbers. With the value of the
last living handle (Rule 5) it ends the rerun by an exception, before the saving operator has run.

But operators save their inputs before they run, and ``rrelu_with_noise`` saves a fresh tensor and fills it only then
(https://github.com/pytorch/pytorch/issues/193671), of which no version tells. So if the operator of the last value has saved
another tensor without gradient before, the stop waits for that operator's end: for a tensor saved by another operator, which
has another sequence number, or the end of the function. Not for the tensor that forward saved last, as dropout its mask: that
would cost a whole tensor of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ckpt_hooks._ambient.random import Position, Where, are_other_threads_alive, devices_between, position_of_generators
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import RegionMark
from ckpt_hooks._core.hooks import StopRecompute
from ckpt_hooks._core.modes import only_quiet_modes, unrecorded
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._state.journal import JournalLoan
from ckpt_hooks._tensors.copies import stand_in_for
from ckpt_hooks._torch.autograd import node_number, sequence_number
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.functions import is_jit_tracing
from ckpt_hooks._torch.modes import FAKE, num_function_modes
from ckpt_hooks._torch.tensors import detach_past_modes, storage_of, version_of
from ckpt_hooks.errors import CheckpointError, MutationError

from .words import draws_error, name_of_tensor

PackHook = Callable[[torch.Tensor], "int | torch.Tensor"]

_copy = unrecorded(stand_in_for)

# A stop costs as much as eight operators on tensors of a few numbers: 6% of a step of a chain of ten. Where a region ends on
# tensors of at most so many numbers, operators which make at most so many nodes are run instead.
_SMALL = 512
_MOST_LEFT = 2
_PLAIN = (torch.Tensor, FAKE)  # the second for predictions of what runs


def ends_small(result: Any, facts: Sequence[Any]) -> bool:
    """Whether the last operators of a forward ran on small tensors, as its result and its last saved tensors tell."""
    # Neither tells alone: an embedding saves nothing but numbers of rows, a linear layer of a row a view of its large weight.
    if type(result) not in _PLAIN or num_function_modes() or is_jit_tracing():  # for which a question for a size is a call
        return False
    try:
        return result.numel() <= _SMALL and all(type(row) is tuple and row[0].numel() <= _SMALL for row in facts[-2:])
    except AttributeError:  # no shape of a leaf was noted, and a ragged tensor has no numbers
        return False


class Collector:
    def __init__(self, frame: Any, wanted: Collection[int] | None) -> None:
        is_moded = frame.contexts is not None or frame.sampled is not None
        self._detach = detach_past_modes if is_moded and only_quiet_modes() else torch.Tensor.detach
        self.frame, self.wanted = frame, wanted  # None for all living handles
        # A rerun in the middle of forward must not do what forward has not done yet.
        self.early_stop = frame.options.early_stop or not frame.complete
        self.values: list[torch.Tensor] = []
        self.marks: list[RegionMark] = []
        self.registered: list[RemovableHandle] = []  # hooks of the rerun, of which forward has registered its own
        self._lent: set[int] = set()  # numbers of tensors with other memory during the rerun
        self._exchanged: frozenset[int | None] = frozenset()  # storages with another content
        # The devices whose generators have moved otherwise than in forward, maybe by another thread's draws.
        self.moved_otherwise: set[torch.device] = set()
        self.without_grad: list[int] = []
        self.last = -1  # the number of the last tensor wanted
        self.done = False  # whether the rerun was told to end, or may go on though nothing of it is wanted any more
        self._end = -1  # the number of the next node at the end of the function; -1 where the rerun is stopped anyway
        self.doubt: tuple[int, Callable[[], CheckpointError]] | None = None  # how many wanted values are not to be trusted
        self.versions: list[int] | None = None

    @skipped
    def hook(self, loan: JournalLoan | None, *, may_return: bool, watches_draws: bool) -> PackHook:
        """Returns the pack hook of the rerun, which keeps each wanted tensor without its history as a value."""
        # Autograd gets the value's number, by which user code may run backward on the graph of the rerun (see HandBack).
        frame, values, marks, plain, detach = self.frame, self.values, self.marks, torch.Tensor, self._detach
        append, append_without_grad = values.append, self.without_grad.append
        if loan is not None:
            self._lent, self._exchanged = loan.lent, loan.storages
        is_special = bool(self._lent or self._exchanged)
        # Whether each tensor is wanted, up to the last wanted tensor.
        asked = frame.alive()
        final = -1  # the tensor that forward saved last
        if self.wanted is None:
            final = len(asked) - 1
            if may_return and frame.num_nodes >= 0:
                self._end = sequence_number() + frame.num_nodes
        else:
            asked = [lives and index in self.wanted for index, lives in enumerate(asked)]
        while asked and not asked[-1]:
            asked.pop()
        self.last = len(asked) - 1
        stop = len(asked) if self.early_stop else -1
        next_is_wanted = chain(asked, repeat(None)).__next__
        unfinished = -1  # sequence number of an operator which may yet write to its saved tensor
        positions = frame.positions if watches_draws else None
        where = position_of_generators(watched=positions is not None, begin=positions and positions[-1][0])
        position = where[0]

        def fill(tensor: torch.Tensor) -> int | torch.Tensor:
            nonlocal position, unfinished
            if position != where[0]:
                position = where[0]
                self._compare_draws((position, where[1]), where)
            is_wanted = next_is_wanted()
            if is_wanted is None:  # past the last wanted tensor
                append(MISSING)
                if self.early_stop:
                    if unfinished != sequence_number():
                        self._finish(tensor)
                elif self.frame.complete and len(values) > len(self.frame.numbers):
                    raise StopRecompute
                return tensor.detach()
            requires_grad = tensor.requires_grad
            if not requires_grad:
                index = len(values)
                append_without_grad(index)
                if index != final:
                    unfinished = sequence_number()
            if not is_wanted:
                append(MISSING)
                return detach(tensor) if requires_grad and not tensor.is_leaf else tensor
            if is_special or marks or type(tensor) is not plain:
                append(self._value_of(tensor))
            else:
                # To take the history off all values at once at the end of the rerun was no faster: each needs a holder.
                append(detach(tensor) if requires_grad else tensor)
            number = len(values)
            if number == stop and unfinished != sequence_number():
                self._finish(tensor)
            return number

        return fill

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        is_argument = bool(self.marks) and len(self.values) < sum(self.marks[-1][:2])  # of a region inside
        if not is_argument and id(tensor) in self._lent:
            return self._detach(tensor) if tensor.requires_grad else tensor  # autograd would find it with the present memory
        if tensor.requires_grad:
            return self._detach(tensor)
        if self._exchanged and storage_of(tensor) in self._exchanged:  # with the content of forward during the rerun only
            return _copy(tensor)
        # An alias: FSDP frees a parameter by another storage, and functions do, and the value would be empty.
        return self._detach(tensor) if type(tensor) is not torch.Tensor or is_argument else tensor

    @skipped
    def watching(self, hook: PackHook, lost: Sequence[tuple[torch.Tensor, int]]) -> PackHook:
        """Returns a pack hook for a rerun that may write and read otherwise than forward."""
        # The version of each value is noted, for forward's is higher where a dispatch mode is around the rerun alone: under a
        # mode ``torch.nn.functional.linear`` adds its bias out of place, without a mode in place. Values in memory of lost
        # tensors, of which no version tells, are not trusted.
        versions: list[int] = []
        self.versions = versions
        errors = {storage_of(tensor): functools.partial(self.mutated, tensor, version) for tensor, version in lost}

        def watch(tensor: torch.Tensor) -> int | torch.Tensor:
            versions.append(version_of(tensor))
            if errors and (error := errors.get(storage_of(tensor))) is not None:
                self.distrust(error)
            return hook(tensor)

        return watch

    def _compare_draws(self, position: Position, where: Where) -> None:
        """Distrusts the present value, and later ones, if the rerun has drawn other random numbers than forward had by then."""
        positions, index = self.frame.positions or {}, len(self.values)
        if index > self.last or positions.get(index) == position:
            return
        expected = positions[max(moved_at for moved_at in positions if moved_at <= index)]
        if expected != position:
            if are_other_threads_alive():  # which may have drawn: that is looked into when the rerun has ended
                self.moved_otherwise |= devices_between(expected, position, where)
            else:
                self.distrust(functools.partial(draws_error, format_path(self.frame.path)))

    def distrust(self, error: Callable[[], CheckpointError]) -> None:
        """Marks the present value and later ones as wrong, with the error for each."""
        trusted = len(self.values)
        if trusted <= self.last:
            self.doubt = self.last + 1 - trusted, error
            self.last = trusted - 1
            if self.early_stop:
                self._end = -1
                self._finish(None)

    def mutated(self, tensor: torch.Tensor, version: int) -> MutationError:
        """Returns the error for a tensor that was written to since forward; later forwards copy it, where they can."""
        frame = self.frame
        why = Why.COPIED_NEXT if frame.state is not None and frame.state.note_written(tensor) else Why.REACHED
        name = frame.arguments.path_of(tensor) or name_of_tensor(tensor, frame.function)
        return mutated(why, format_path(frame.path), tensor, version, name=name)

    def _finish(self, tensor: torch.Tensor | None) -> None:
        """Stops a rerun that has all its values, the last saved with a tensor, unless next to nothing is left to run."""
        self.done = True
        # Left over are at most as many operators as nodes, and the operator which saves the tensor, if that is not its result.
        left = self._end - sequence_number()
        if self.frame.ends_small:
            returns = 0 <= left <= _MOST_LEFT
        else:
            node = None if left or tensor is None else tensor.grad_fn
            returns = node is not None and node_number(node) == self._end - 1
        # The other ranks would wait for a rank whose last operator is a collective that they do not run again.
        group = torch.distributed
        if not returns or (group.is_available() and group.is_initialized()):
            self._end = -1  # for a function that swallows the stop to be met with it again
            raise StopRecompute

    def let_go(self) -> None:
        """Drops values and frame: autograd keeps the hook as long as the graph of the rerun, which may last (Rule 9)."""
        self.values.clear()
        self._lent = set()
        del self.frame, self.doubt
