"""The dispatch mode that records what runs in a region, below autograd.

Most operators take tensors and return a tensor: for those everything is in :meth:`Recorder.__torch_dispatch__`, written out,
since each operator of each step of a program pays for it. The others go through the methods below, and those that write to
their arguments through :mod:`ckpt_hooks._tape.writes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ckpt_hooks._ambient.current import capture as capture_current
from ckpt_hooks._ambient.draws import drops_nothing
from ckpt_hooks._ambient.flags import read_common, read_fast
from ckpt_hooks._ambient.noted_draws import draw_noting
from ckpt_hooks._dispatch import PausableDispatchMode, count_writes, is_compiled_code_running
from ckpt_hooks._operators import Kind, drops_from_buffer
from ckpt_hooks._runtime.threads import RegionThread, is_concurrent
from ckpt_hooks._torch import (
    FAKE,
    counted_detach,
    graph_task_id,
    is_below_counting,
    is_kept_anyway,
    num_function_modes,
    storage_address,
    storage_of,
)

from . import writes
from .around import Around, look_around
from .deciding import ASK, RECOMPUTE, SAVE, Deciding
from .facts import KNOWN, OpFacts, facts_of
from .kept import Hooks, Kept
from .tables import Tables
from .values import ANEW, Op, Store, Value, cut, flatten, new_store, new_value

__all__ = ["Recorder"]

_Tensor = torch.Tensor
_weakref = weakref.ref
_NO_KWARGS: dict[str, Any] = {}
_CAST = Kind.CAST
_BY_POLICY = "kept by the policy"


class Recorder(Tables, PausableDispatchMode):  # type: ignore[no-untyped-call]
    """Records for the outermost region of a thread, and for those directly within it (Rule 14).

    Attributes:
        current: Devices and streams that were current as the outermost region began; None where no accelerator was in use.
        deciding: What the innermost region's policy says; None where it has none.
        draws_anew: Whether a replay of that region draws other random numbers.
        users_modes: Names of the dispatch modes of the user's that are active around the outermost region.
    """

    def __init__(self, thread: RegionThread, hooks: Hooks | None, *, respect_hooks: bool, is_in_frame: bool) -> None:
        """Starts a tape; see :class:`Tables`."""
        Tables.__init__(self, hooks, respect_hooks=respect_hooks, is_in_frame=is_in_frame)
        PausableDispatchMode.__init__(self)
        self._thread = thread
        self.deciding: Deciding | None = None
        self.draws_anew = False
        self.users_modes: Sequence[str] = ()
        self._task = graph_task_id()
        self._forget = self.known.pop
        self._seen: list[Around] = []
        self.current = capture_current()
        self._look()

    def _look(self) -> None:
        """Finds out what operators run under now."""
        current = None if self.current is None else capture_current()
        for around in self._seen:
            if around.switches.guard.check() and around.current == current:
                break
        else:
            around = look_around(current)
            self._seen = [around, *self._seen[:3]]
        self.around = around
        self._check = around.switches.guard.check
        if current is not None:
            self._check = current.checking(self._check)
        self._without_grad = not around.grad

    def _look_closely(self, facts: OpFacts) -> None:
        """The same for operators that depend on switches which change without notice."""
        switches = self.around.switches
        try:
            same = read_fast() == switches.unguarded if facts.looks_at_all_switches else read_common() == switches.common
        except RuntimeError:
            same = False
        if not same:
            self._seen = []
            self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = KNOWN.get(id(func))
        if facts is None or facts.operator is not func:
            facts = facts_of(func)
        if self.paused:
            out = facts.call(*args, **(kwargs or _NO_KWARGS))
            count_writes(func, args)
            return out
        if not self._check():
            self._look()
        if (
            not (facts.is_fast or (facts.may_drop_out and drops_nothing(func, args, kwargs or _NO_KWARGS)))
            or self._without_grad
            or (kwargs and not facts.keywords.isdisjoint(kwargs))
        ):
            return self._record(func, facts, args, kwargs or _NO_KWARGS)
        if self.is_in_frame and (facts.kind is _CAST or graph_task_id() != self._task):
            return self._record(func, facts, args, kwargs or _NO_KWARGS)
        if (deciding := self.deciding) is not None:
            decision = deciding.known.get(facts)
            if decision is None:
                decision = deciding.of(facts)
            if decision != RECOMPUTE:
                if decision == SAVE and facts.is_fresh and graph_task_id() == self._task:
                    return self._save(func, facts, args, kwargs or _NO_KWARGS)
                return self._record(func, facts, args, kwargs or _NO_KWARGS)
        if facts.looks_at_switches:
            self._look_closely(facts)
        if kwargs:
            out = facts.call(*args, **kwargs)
        elif facts.short_cut is not None and type(args[0]) is _Tensor and not num_function_modes():
            out = facts.short_cut(*args)
        else:
            out = facts.call(*args)
        get = self.known.get
        recorded = list(args)
        present = facts.tensors[len(recorded)]
        values = []
        for position in present:
            tensor = recorded[position]
            value = get(id(tensor))
            if value is None or storage_address(tensor) != value.store.address:  # given another one (``tensor.data = other``)
                if not isinstance(tensor, _Tensor):
                    present = tuple(other for other in present if other != position)
                    continue
                value = self.value_of(tensor, facts)
            recorded[position] = value
            values.append(value)
        op = Op()  # attributes one by one, here and below: half the cost of an ``__init__``
        op.facts = facts
        op.args = recorded
        op.kwargs = kwargs or _NO_KWARGS
        op.present = present
        op.draw = None
        op.around = self.around
        op.is_plain = True
        if not facts.single or type(out) is not _Tensor:
            self.note(op, values, out)
            return out
        # As ``put`` does it.
        try:
            address = storage_address(out)
        except NotImplementedError:  # it has none
            return out
        self.number = op.number = number = self.number + 1
        value = Value()
        value.number = number
        value.op = op
        value.index = 0
        value.before = value.saved = None
        key = id(out)
        for other in values:
            store = other.store
            if store.address == address:
                if store.blank or out is other.tensor():
                    self.put(op, 0, values, out)
                    return out
                shares_counter = facts.is_view and (not facts.is_detach or is_below_counting())
                value.counter = other.counter if shares_counter else object()
                value.tensor = reference = _weakref(out, partial(self._forget, key))
                store.members.append(reference)
                break
        else:
            value.tensor = reference = _weakref(out, partial(self._forget, key))
            value.counter = store = Store()
            store.address = address
            store.birth = number
            store.outside = store.blank = store.written = False
            store.members = [reference]
            store.pins = store.held = None
            self.stores[address] = store
        value.store = store
        self.known[key] = value
        return out

    def _save(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs an operator that is not a view, and keeps what it returns: nobody needs to know what it read."""
        out = facts.call(*args, **kwargs)
        for tensor in (out,) if facts.single else out if type(out) is tuple else flatten(out):
            if type(tensor) is not _Tensor:
                if type(tensor) is FAKE:
                    self._save_fake(tensor)
                continue
            try:
                address = storage_address(tensor)
            except NotImplementedError:
                continue
            if self.is_taken(address):  # which its schema denies
                self.make_outside(self.stores[address], f"returned by {func}")
                continue
            self.number = number = self.number + 1
            key = id(tensor)
            value = Value()
            value.tensor = reference = _weakref(tensor, partial(self._forget, key))
            value.number = number
            value.index = 0
            value.op = value.before = None
            value.store = value.counter = store = self.stores[address] = Store()
            store.address = address
            store.birth = number
            store.outside = store.blank = store.written = False
            store.members = [reference]
            store.pins = None
            self.known[key] = value
            kept = Kept()
            kept.tensor = counted_detach(tensor)
            kept.version = None
            kept.reason = _BY_POLICY
            kept.path = self.path
            kept.is_fickle = False
            kept.by_policy = True
            value.saved = kept
            holder = _weakref(value)
            store.held = [holder]
            self._held.append(holder)
            if self.is_in_frame:
                self._held_for_frame.append(value)
        return out

    def _save_fake(self, tensor: torch.Tensor) -> None:
        self.number += 1
        address = storage_address(tensor)
        store = self.stores[address] = new_store(address, self.number)
        value = new_value(self.number, store, store)
        self.register(tensor, value)
        self.keep(value, tensor, SAVE, _BY_POLICY)

    def _record(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs and records an operator of any kind."""
        if self._without_grad and is_compiled_code_running():
            return facts.call(*args, **kwargs)
        if self.is_in_frame and not facts.written and graph_task_id() != self._task:
            # A backward in the middle of forward. It adds to gradients that it finds there, in the rerun of the frame around
            # maybe and in forward not, so what it reads must not be handed to that frame.
            return facts.call(*args, **kwargs)
        if self.is_in_frame and facts.kind is _CAST and is_kept_anyway(args[0]):
            # Autocast makes this one once and keeps it for a while, so a rerun may find it there already.
            return facts.call(*args, **kwargs)
        if facts.looks_at_switches:
            self._look_closely(facts)
        if facts.is_opaque:
            return writes.run_opaque(self, func, facts, args, kwargs)
        if facts.is_mark:
            return writes.run_marking(self, facts, args, kwargs)
        if facts.is_blank:
            out = facts.call(*args, **kwargs)
            self.note_blank(out)
            return out
        if facts.written and not facts.is_inplace_view:
            return writes.run_writing(self, func, facts, args, kwargs)
        op, values = self.op_of(facts, args, kwargs)
        if facts.is_inplace_view:
            return writes.run_inplace_view(self, op, facts, args, kwargs)
        out = self.run(op, func, facts, args, kwargs)
        decision = RECOMPUTE if facts.is_view else self.decide(facts, args, kwargs, out)
        made = self.note(op, values, out, decision)
        if decision != RECOMPUTE:
            if facts.has_effect:
                for value in made:
                    if value.saved is None:  # another face of an argument: to have that again, the operator would run again
                        self.make_outside(value.store, f"returned by {func}, which has an ordered effect")
            cut(op, made)
        return out

    def run(self, op: Op, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs an operator, and notes in ``op`` what it draws."""
        if not facts.is_random:
            return facts.call(*args, **kwargs)
        if self.draws_anew:
            op.draw = None if drops_nothing(func, args, kwargs) else ANEW
            return facts.call(*args, **kwargs)
        out, op.draw = draw_noting(func, args, kwargs, shared=is_concurrent(self._thread))
        return out

    def decide(self, facts: OpFacts, args: Any, kwargs: Any, out: Any) -> int:
        """Returns what the policy says of an operator that has run; of one of a backward in the region it is not asked."""
        deciding = self.deciding
        if facts.looks_at_grad or (facts.has_buffered_masks and drops_from_buffer(facts.operator, args, kwargs)):
            return SAVE
        if deciding is None or graph_task_id() != self._task:
            return SAVE if facts.is_collective or facts.has_effect else RECOMPUTE
        decision = deciding.of(facts)
        return deciding.ask(facts, args, kwargs, out) if decision == ASK else decision

    def op_of(
        self, facts: OpFacts, args: Any, kwargs: Any, overwritten: frozenset[int] = frozenset()
    ) -> tuple[Op, list[Value]]:
        """Returns an operator that is about to run, with values in place of tensors, and those values.

        Args:
            facts: What is known of it.
            args: Its arguments.
            kwargs: Its keyword arguments.
            overwritten: Identities of tensors of which it does not matter what they are.
        """
        values: list[Value] = []
        record = partial(self._recorded, facts, overwritten, values)
        op = Op()
        op.facts = facts
        if facts.is_like:
            op.args = [self.shape_of(args[0]), *map(record, args[1:])]
        else:
            op.args = list(map(record, args))
        op.kwargs = {name: record(argument) for name, argument in kwargs.items()} if kwargs else kwargs
        op.present = tuple(index for index, argument in enumerate(op.args) if type(argument) is Value)
        op.draw = None
        op.is_plain = False
        op.around = self.around
        return op, values

    def _recorded(self, facts: OpFacts, overwritten: frozenset[int], values: list[Value], argument: Any) -> Any:
        """Returns an argument with values in place of tensors, which it adds to ``values``."""
        if isinstance(argument, _Tensor):
            key = id(argument)
            value = self.blank.get(key) if key in overwritten else None
            if value is None:
                value = self.known.get(key)
            if value is None or storage_of(argument) != value.store.address:
                value = self.value_of(argument, facts)
            values.append(value)
            return value
        if isinstance(argument, (list, tuple)) and any(isinstance(one, _Tensor) for one in argument):
            return [self._recorded(facts, overwritten, values, one) for one in argument]
        return argument
