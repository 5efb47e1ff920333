"""The dispatch mode that records the operators of a region, below autograd.

Most operators take tensors and return a tensor. Their code is written out in :meth:`Recorder.__torch_dispatch__`, since each
operator of a program pays for it. Other operators go through the methods below, and writing operators through :mod:`.writes`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import Self

from ckpt_hooks._ambient import switches
from ckpt_hooks._ambient.devices import capture as capture_current
from ckpt_hooks._core.holdings import BY_POLICY
from ckpt_hooks._core.modes import count_writes, is_compiled_code_running, only_quiet_modes
from ckpt_hooks._core.unseen import WatchesUnseen, run_watched
from ckpt_hooks._operators.draws import drops_nothing
from ckpt_hooks._operators.facts import KNOWN, OpFacts, OpKind, facts_of
from ckpt_hooks._tensors.copies import PLAIN_OR_FAKE
from ckpt_hooks._tensors.held_tensors import HeldTensor
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.functions import bound
from ckpt_hooks._torch.modes import be_seen_by_modes, is_seen_by_modes, num_function_modes
from ckpt_hooks._torch.tensors import counted_detach, is_below_counting, is_kept_anyway, storage_address
from ckpt_hooks.policies.decisions import ASK, RECOMPUTE, SAVE, SelectiveCheckpointContext

from . import writes
from .explaining import shapes_of
from .functions import FunctionCall
from .tape import Tape, decide, op_of, run
from .values import Op, OpWithShapes, Store, Surroundings, Value, flatten

_weakref = weakref.ref
_NO_KWARGS: dict[str, Any] = {}
_CAST = OpKind.CAST

_INDUCTOR = "torch._inductor"
#: The active recorders of all threads, and whether modes saw compiled code as operators before the first recorder.
_recorders: set[weakref.ref[Recorder]] = set()
_was_seen = False


class Recorder(SelectiveCheckpointContext):
    """Records for the outermost region of a thread, and for regions directly within it (Rule 14)."""

    # The fast paths save instructions of a small block's step: a fifth by bypassing :meth:`_record`, 3 to 5% by writing out
    # :meth:`Tape.put` in the handler, and 5%, under a policy, by writing it out in :meth:`_save`.

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._call: FunctionCall | None = None
        self._tape, self._tables = tape, tape.tables
        self._forget = tape.tables.known.pop
        self._seen: list[Surroundings] = []
        tape.current = capture_current()
        self._look()

    def __enter__(self) -> Self:
        global _was_seen
        if _INDUCTOR in sys.modules:  # else there is no compiled code; the check saves 1% of a chain's step
            if not _recorders:
                _was_seen = is_seen_by_modes()
            _recorders.add(weakref.ref(self, _recorders.discard))
            be_seen_by_modes(True)
        super().__enter__()
        return self

    def leaves(self) -> None:
        super().leaves()
        vars(self._tape).pop("recorder", None)
        if _recorders:
            _recorders.discard(weakref.ref(self))
            if not _recorders:
                be_seen_by_modes(_was_seen or not only_quiet_modes())

    def _look(self) -> None:
        """Notes the present surroundings of operators."""
        current = None if self._tape.current is None else capture_current()
        for surroundings in self._seen:
            if surroundings.switches.guard.check() and surroundings.current == current:
                break
        else:
            surroundings = Surroundings(current, switches.capture_guarded())
        self._be_in(surroundings)

    def _be_in(self, surroundings: Surroundings) -> None:
        if surroundings not in self._seen:
            # Keeping the latest four for :meth:`_look` saves 13% of a small step that turns gradients off and on.
            self._seen = [surroundings, *self._seen[:3]]
        self._tape.surroundings = surroundings
        self._check = surroundings.switches.guard.check
        if surroundings.current is not None:
            self._check = surroundings.current.checking(self._check)
        self._without_grad = not surroundings.grad

    def _look_closely(self, *, at_all: bool) -> None:
        """Notes the surroundings again if switches outside of the guard have changed; only some operators depend on these."""
        surroundings = self._tape.surroundings
        try:
            if at_all:
                same = switches.read_fast() == surroundings.switches.unguarded
            else:
                same = switches.read_common() == surroundings.switches.common
        except RuntimeError:
            same = False
        if not same:
            self._seen = []
            self._be_in(Surroundings(surroundings.current, switches.capture()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = KNOWN.get(id(func)) or facts_of(func)
        if self.paused:
            # One pause is :meth:`run_function`'s: an operator of the custom function. Under a second pause it is of others.
            if self._call is not None and self.paused == 1:
                return self._call.run_operator(func, facts, args, kwargs or _NO_KWARGS, self._record)
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
        tape = self._tape
        if tape.is_in_frame and (facts.kind is _CAST or graph_task_id() != tape.task):
            return self._record(func, facts, args, kwargs or _NO_KWARGS)
        if (decisions := tape.decisions) is not None:
            decision = decisions.known.get(facts)
            if decision is None:
                decision = decisions.of(facts)
            if decision != RECOMPUTE:
                if facts.is_fresh and graph_task_id() == tape.task:
                    # A policy that only counts runs answers here, unless masks from a buffer must be kept whatever the count.
                    if decision == ASK and (is_kept := decisions.is_kept) is not None and not facts.has_buffered_masks:
                        decision = SAVE if is_kept(func) else RECOMPUTE
                    if decision == SAVE:
                        return self._save(func, facts, args, kwargs or _NO_KWARGS)
                if decision != RECOMPUTE:
                    return self._record(func, facts, args, kwargs or _NO_KWARGS)
        if facts.looks_at_switches:
            self._look_closely(at_all=facts.looks_at_all_switches)
        tables = self._tables
        get = tables.known.get
        recorded = list(args)
        count = len(recorded)
        call, present = facts.calls[count], facts.tensors[count]
        values = []
        for position in present:
            tensor = recorded[position]
            value = get(id(tensor))
            if value is None or storage_address(tensor) != value.store.address:  # after ``tensor.data = other``
                if not isinstance(tensor, Tensor):
                    present = tuple(other for other in present if other != position)
                    if tensor is not None:
                        call = facts.call
                    continue
                value = tape.value_of(tensor, facts, position)
            recorded[position] = value
            values.append(value)
        if kwargs or tape.has_others or num_function_modes():
            call = facts.call
        elif call is None:
            call = facts.find_call(count)
        out = call(*args, **kwargs) if kwargs else call(*args)
        op = Op()  # setting attributes here and below takes half the time of an ``__init__``
        op.facts = facts
        op.call = call
        op.args = recorded
        op.kwargs = kwargs or _NO_KWARGS
        op.present = present
        op.draw = None
        op.surroundings = tape.surroundings
        if not facts.single or type(out) is not Tensor:
            tape.note(op, values, out)
            return out
        # :meth:`Tape.put` written out, for speed.
        try:
            address = storage_address(out)
        except NotImplementedError:  # it has no storage
            return out
        tables.number = op.number = number = tables.number + 1
        value = Value()
        value.number = number
        value.op = op
        value.before = value.saved = None
        key = id(out)
        for other in values:
            store = other.store
            if store.address == address:
                if store.uninitialized or out is other.tensor():
                    tape.put(op, 0, values, out)
                    return out
                shares_counter = facts.is_view and (not facts.is_detach or is_below_counting())
                value.counter = other.counter if shares_counter else tables.another_counter(store)
                value.tensor = reference = _weakref(out, partial(self._forget, key))
                store.members.append(reference)
                break
        else:
            value.tensor = reference = _weakref(out, partial(self._forget, key))
            value.counter = store = Store()
            store.address = address
            store.birth = number
            store.external = store.uninitialized = store.written = False
            store.members = [reference]
            store.handles = store.held = None
            tables.stores[address] = store
        value.store = store
        tables.known[key] = value
        return out

    @skipped
    def run_function(self, around: list[WatchesUnseen], function: Any, *args: Any, **kwargs: Any) -> Any:
        tape = self._tape
        if tape.is_in_frame and graph_task_id() != tape.task:  # a backward within forward: see :meth:`_record`
            return run_watched(around, function, args, kwargs)
        if not self._check():
            self._look()
        self._look_closely(at_all=True)
        args, kwargs = bound(function, args, kwargs)
        call = self._call = FunctionCall(tape, function, args, kwargs)
        self.paused = 1
        try:
            return call.run(partial(run_watched, around, function, args, kwargs))
        finally:
            self._call, self.paused = None, 0

    def run_unseen(self, writer: str, args: Any, call: Callable[[], Any]) -> Any:
        return writes.run_unseen(self._tape, writer, args, call)

    def _save(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs an operator other than a view, and keeps the results but not the arguments."""
        out = facts.call(*args, **kwargs)
        tape, tables = self._tape, self._tables
        for tensor in (out,) if facts.single else out if type(out) is tuple else flatten(out):
            if type(tensor) not in PLAIN_OR_FAKE:
                continue
            try:
                address = storage_address(tensor)
            except NotImplementedError:
                continue
            tables.number = number = tables.number + 1
            key = id(tensor)
            value = Value()
            value.tensor = reference = _weakref(tensor, partial(self._forget, key))
            value.number = number
            value.op = value.before = None
            value.store = value.counter = store = tables.stores[address] = Store()
            store.address = address
            store.birth = number
            store.external = store.uninitialized = store.written = False
            store.members = [reference]
            store.handles = None
            tables.known[key] = value
            value.saved = HeldTensor(counted_detach(tensor), tape.path, BY_POLICY)
            holder = _weakref(value)
            store.held = [holder]
            tape.held.note(value, holder)
        return out

    def _record(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        tape, arguments = self._tape, args
        if facts.is_compiled and self._call is None:
            if graph_task_id() != tape.task:  # a compiled backward may overwrite its saved tensors, so no replay could run it
                return facts.call(*args, **kwargs)
            arguments = facts.arguments_of(args)
        elif self._without_grad and is_compiled_code_running():
            return facts.call(*args, **kwargs)
        if tape.is_in_frame and not facts.written and graph_task_id() != tape.task:
            # A backward within forward adds to gradients, which may exist in the function frame's rerun and not in forward. So
            # the tensors that this backward reads must not go to the function frame.
            return facts.call(*args, **kwargs)
        if tape.is_in_frame and facts.kind is _CAST and is_kept_anyway(args[0]):
            # Autocast caches this cast, so the rerun of the function frame may not run it.
            return facts.call(*args, **kwargs)
        if facts.looks_at_switches:
            self._look_closely(at_all=facts.looks_at_all_switches)
        if facts.is_opaque and (arguments is args or not writes.may_run_again(args, kwargs)):
            return writes.run_opaque(tape, func, facts, args, kwargs)
        if facts.is_silent:
            return writes.run_marking(tape, facts, args, kwargs) if facts.is_mark else facts.call(*args, **kwargs)
        if facts.is_uninitialized:
            out = facts.call(*args, **kwargs)
            tape.note_uninitialized(out)
            return out
        if facts.written and not facts.is_inplace_view:
            return writes.run_writing(tape, func, facts, args, kwargs)
        op, values = op_of(tape, facts, arguments, kwargs)
        if facts.is_inplace_view:
            return writes.run_inplace_view(tape, op, facts, args, kwargs)
        out = run(tape, op, func, facts, args, kwargs)
        if isinstance(op, OpWithShapes):
            op.shapes = shapes_of(out)
        decision = RECOMPUTE if facts.is_view and tape.decisions is None else decide(tape, facts, arguments, kwargs, out)
        made = tape.note(op, values, out, decision)
        if decision != RECOMPUTE:
            if facts.has_effect or facts.is_compiled:
                for value in made:
                    if value.saved is None:  # a view of an argument, which only a second run of the operator would bring back
                        tape.tables.make_external(value.store, f"returned by {func}, which is not to run again")
                        tape.tables.known.pop(id(value.tensor()), None)
            tape.cut(op, made)
        return out
