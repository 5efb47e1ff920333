"""A recompute which runs every operator, because an earlier recompute has run other operators than forward.

To hand out outputs by place would give an operator the output of another. So nothing is handed out, and the values are those of
a region without a policy. The kept outputs serve as evidence: an operator with the counts of a kept output of the same operator
must return that output, bit for bit, or is no counterpart. When the recompute has ended, its operators are laid beside the
operators of forward (:mod:`.alignment`).

Two kinds of operators would not bear another run: operators with an effect, and collectives, which other processes may not run.
Their outputs are handed out where forward has exactly one of the same operator at the same counts.

A cached tensor may require grad, as with ``torch.nn.utils.parametrize.cached``. The recompute finds the tensor with its graph,
whose nodes were made by forward. These nodes are left out of forward's counts, as if forward had found the tensor too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._core.hooks import StopRecompute
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes, is_without_values, past_modes
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._operators.facts import Kind, facts_of
from ckpt_hooks._tensors.containers import tensors_in
from ckpt_hooks._tensors.copies import same_bits
from ckpt_hooks._torch.autograd import graph_task_id, node_number, sequence_number
from ckpt_hooks._torch.tensors import is_kept_anyway

from .selection import Selection
from .sequence import Counts, OperatorSequence

_OTHERS = (Kind.VIEW, Kind.IGNORED, Kind.RANGE)
_NO_READERS = (Kind.IGNORED, Kind.RANGE)
_HANDED_OUT = (Kind.EFFECT, Kind.COLLECTIVE)


class Aligning(QuietDispatchMode):
    """Notes the operators of a recompute, and compares their results with the kept outputs."""

    error = None  # none: a difference is known at the end only

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self._selection = selection
        self._sequence = OperatorSequence()
        self._unequal: set[tuple[int, int]] = set()
        self._found: list[int] = []
        selection.rerun = self._sequence, self._unequal, self._found
        self._places = _places_of(selection.sequence, self._found)
        self._saved = selection.values
        self._task = graph_task_id()
        self._last, self._has_stopped = selection.last, selection.has_stopped

    def __enter__(self) -> Any:
        self._sequence.begin()
        return super().__enter__()

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._sequence.end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = facts_of(func)
        kind, call = facts.kind, facts.call
        kwargs = kwargs or {}
        of_region = not self.paused and graph_task_id() == self._task
        if of_region and kind not in _NO_READERS:
            self._look_for_nodes((args, kwargs))
        own = of_region and kind not in _OTHERS
        if own and kind is Kind.CAST and is_kept_anyway(args[0]):
            self._sequence.note_cast()
            own = False
        if own:
            if kind is Kind.EFFECT and self._has_stopped():
                raise StopRecompute
            output = self._run(func, kind, call, args, kwargs)
        else:
            output = call(*args, **kwargs)
        if kind is Kind.WRITES:
            count_writes(func, args)
        elif kind is Kind.RANGE:
            self.note_range(func, args)
        return output

    def _run(self, func: Any, kind: Kind, call: Any, args: Any, kwargs: Any) -> Any:
        sequence, selection = self._sequence, self._selection
        found = len(sequence.operators)
        sequence.operators.append(func)
        sequence.marks.append(len(self._saved))
        sequence.nodes.append(sequence_number())
        operators = selection.sequence.operators
        places = self._places.get((sequence.marks[found], sequence.nodes_at(found)), ())
        places = [place for place in places if operators[place] is func]
        if kind in _HANDED_OUT:
            if len(places) == 1 and places[0] in selection.outputs.entries:
                output = selection.outputs.take(places[0], func, args, kwargs, last=self._last)
                if output is not MISSING:
                    return output
            if kind is Kind.EFFECT and any(operators[place] is func for place in selection.outputs.entries):
                raise selection.sequence.error(found, "one that has its effect once", f"{func} that forward may not have run")
            return call(*args, **kwargs)
        output = call(*args, **kwargs)
        for place in places:
            kept = selection.outputs.peek(place)
            if kept is not MISSING and not past_modes(_agree, output, kept):
                self._unequal.add((place, found))
        return output

    def _look_for_nodes(self, arguments: Any) -> None:
        """Notes the nodes made by forward in the graphs of tensors found by the recompute."""
        forward = self._selection.sequence
        nodes = [tensor.grad_fn for tensor in tensors_in(arguments) if tensor.requires_grad and tensor.grad_fn is not None]
        new: set[int] = set()
        while nodes:
            node = nodes.pop()
            number = node_number(node)
            if forward.made(number) and number not in new and number not in self._found:
                new.add(number)
                nodes += [follower for follower, _ in node.next_functions if follower is not None]
        if new and forward.is_apart_from(self._sequence):
            self._found[:] = sorted({*self._found, *new})
            self._places = _places_of(forward, self._found)


def _places_of(forward: OperatorSequence, found: Sequence[int]) -> dict[Counts, list[int]]:
    """Returns the places of forward's operators, by their counts."""
    places: dict[Counts, list[int]] = {}
    for place, counts in enumerate(forward.counts(found)):
        places.setdefault(counts, []).append(place)
    return places


def _agree(output: Any, kept: Any) -> bool:
    """Whether two outputs may be equal, by their first tensor alone: later tensors may be unfilled memory."""
    one, other = (value[0] if isinstance(value, (list, tuple)) and value else value for value in (output, kept))
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other) and (isinstance(one, torch.Tensor) or one == other or one != one)
    return is_without_values() or same_bits(one, other)
