"""The collector of a rerun: takes the tensors saved in the rerun, and ends the rerun after the last wanted value.

The collector's pack hook takes the tensors in order, as the values of the handles with the same numbers. At the value of the
last living handle (Rule 5) it raises an exception, which ends the rerun before the saving operator has run.

But ``rrelu_with_noise`` saves a new tensor first and fills it later, without a change of the version
(https://github.com/pytorch/pytorch/issues/193671). So if the operator of the last value has saved another tensor without
gradient, the stop waits for the end of that operator: until another operator, with another sequence number, saves a tensor, or
the function returns. It does not wait for the tensor that forward saved last, such as a dropout mask, since the result of its
operator would take memory.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from itertools import chain, repeat
from operator import itemgetter
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

# To stop a rerun by an exception costs as much as eight operators on tiny tensors: 6% of a step of a chain of ten operators. So
# a rerun runs to its end if the region ends on tensors of up to ``_SMALL`` numbers and at most ``_MOST_LEFT`` nodes are left.
_SMALL = 512
_MOST_LEFT = 2
_PLAIN = (torch.Tensor, FAKE)  # with fake tensors, so that a prediction on them stops where a real run stops


def ends_small(result: Any, facts: Sequence[Any]) -> bool:
    """Whether the last operators of a forward ran on small tensors, judged by its result and its last saved tensors."""
    # Neither tells without the other: an embedding saves only small indices, and a linear layer with a small result saves its
    # large weight.
    if type(result) not in _PLAIN or num_function_modes() or is_jit_tracing():  # modes and traces would record ``numel``
        return False
    try:
        return result.numel() <= _SMALL and all(type(row) is tuple and row[0].numel() <= _SMALL for row in facts[-2:])
    except AttributeError:  # a leaf has no noted shape, and a ragged tensor no size
        return False


class Collector:
    def __init__(self, frame: Any, wanted: Collection[int] | None) -> None:
        is_moded = frame.contexts is not None or frame.sampled is not None
        self._detach = detach_past_modes if is_moded and only_quiet_modes() else torch.Tensor.detach
        self.frame, self.wanted = frame, wanted  # ``wanted`` is None for all living handles
        # A rerun that begins before forward has ended always stops early: it must not run code that forward has not reached.
        self.early_stop = frame.options.early_stop or not frame.complete
        self.values: list[torch.Tensor] = []
        self.marks: list[RegionMark] = []
        self.registered: list[RemovableHandle] = []  # hooks that the rerun registers a second time, removed at its end
        self._lent: set[int] = set()  # the ``id`` of each tensor that the rerun gives forward's memory
        self._exchanged: frozenset[int | None] = frozenset()  # storages with another content during the rerun
        # Devices whose generators are at other positions than in forward, perhaps because another thread drew.
        self.moved_otherwise: set[torch.device] = set()
        self.without_grad: list[int] = []
        self.last = -1  # the number of the last wanted tensor
        self.done = False  # whether all wanted values are there
        self._end = -1  # autograd's sequence number when the function returns; -1 to stop the rerun in any case
        # How many wanted values, the last ones, are not to be trusted; and a function that makes the error.
        self.doubt: tuple[int, Callable[[], CheckpointError]] | None = None
        self.versions: list[int] | None = None

    @skipped
    def hook(self, loan: JournalLoan | None, *, may_return: bool, watches_draws: bool) -> PackHook:
        """Returns the pack hook of the rerun, which keeps each wanted tensor without its history as a value."""
        # The hook packs the value's number. If user code runs backward on the rerun's graph, ``HandBack`` unpacks the number.
        frame, values, marks, plain, detach = self.frame, self.values, self.marks, torch.Tensor, self._detach
        append, append_without_grad = values.append, self.without_grad.append
        if loan is not None:
            self._lent, self._exchanged = loan.lent, loan.storages
        is_special = bool(self._lent or self._exchanged)
        # For each tensor whether it is wanted, up to the last wanted tensor.
        asked = frame.alive()
        final = -1  # index of the tensor that forward saved last
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
        unfinished = -1  # sequence number of an operator that may still write to its saved tensor
        positions = frame.positions if watches_draws else None
        where = position_of_generators(watched=positions is not None, begin=positions and positions[0][1][0])
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
                # Detaching all values together at the end of the rerun was no faster.
                append(detach(tensor) if requires_grad else tensor)
            number = len(values)
            if number == stop and unfinished != sequence_number():
                self._finish(tensor)
            return number

        return fill

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        is_argument = bool(self.marks) and len(self.values) < sum(self.marks[-1][:2])  # of an inner region
        if not is_argument and id(tensor) in self._lent:
            # Not a copy, though the tensor gets its present memory back after the rerun: plain autograd, too, saves the tensor
            # itself, and backward reads the memory that the tensor then has (as after ``x.data = ...``).
            return self._detach(tensor) if tensor.requires_grad else tensor
        if tensor.requires_grad:
            return self._detach(tensor)
        if self._exchanged and storage_of(tensor) in self._exchanged:  # its content changes when the rerun ends
            return _copy(tensor)
        # A parameter or an inner region's argument becomes an alias: FSDP and some functions free a parameter by giving the
        # tensor another storage.
        return self._detach(tensor) if type(tensor) is not torch.Tensor or is_argument else tensor

    @skipped
    def watching(self, hook: PackHook, lost: Sequence[tuple[torch.Tensor, int]]) -> PackHook:
        """Returns a pack hook that also notes versions, and distrusts values in the memory of lost tensors."""
        # The versions are noted since they may be lower than forward's without an error, if only the rerun is under a dispatch
        # mode: without a mode ``torch.nn.functional.linear`` adds its bias in place. Lost tensors have unknown contents.
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
        """Distrusts the next and all later values if the rerun has drawn other random numbers than forward up to here."""
        positions, index = self.frame.positions, len(self.values)
        if index > self.last:
            return
        _, expected = positions[bisect_right(positions, index, key=itemgetter(0)) - 1]
        if expected != position:
            if are_other_threads_alive():  # another thread may have drawn: checked after the rerun
                self.moved_otherwise |= devices_between(expected, position, where)
            else:
                self.distrust(functools.partial(draws_error, format_path(self.frame.path)))

    def distrust(self, error: Callable[[], CheckpointError]) -> None:
        """Marks the next value and all later values as wrong; ``error`` makes the error for each."""
        trusted = len(self.values)
        if trusted <= self.last:
            self.doubt = self.last + 1 - trusted, error
            self.last = trusted - 1
            if self.early_stop:
                self._end = -1
                self._finish(None)

    def mutated(self, tensor: torch.Tensor, version: int) -> MutationError:
        """Returns the error for a tensor written to since forward, and has later forwards copy the tensor if possible."""
        frame = self.frame
        why = Why.COPIED_NEXT if frame.state is not None and frame.state.note_written(tensor) else Why.REACHED
        name = frame.arguments.path_of(tensor) or name_of_tensor(tensor, frame.function)
        return mutated(why, format_path(frame.path), tensor, version, name=name)

    def _finish(self, tensor: torch.Tensor | None) -> None:
        """Stops a rerun that has all its values, unless next to nothing is left to run; ``tensor`` was saved last."""
        self.done = True
        # ``left`` nodes of the graph are yet to be made, each by an operator that is yet to run. The operator that now saves
        # ``tensor`` is yet to run too, unless ``tensor`` is its result.
        left = self._end - sequence_number()
        if self.frame.ends_small:
            returns = 0 <= left <= _MOST_LEFT
        else:
            node = None if left or tensor is None else tensor.grad_fn
            returns = node is not None and node_number(node) == self._end - 1
        # In a process group the rerun always stops: the last operator may be a collective, which other ranks may not run again.
        group = torch.distributed
        if not returns or (group.is_available() and group.is_initialized()):
            self._end = -1  # a function that catches the exception gets it again
            raise StopRecompute

    def let_go(self) -> None:
        """Drops values and frame: the graph of the rerun may live on, and holds the pack hook (Rule 9)."""
        self.values.clear()
        self._lent = set()
        del self.frame, self.doubt
