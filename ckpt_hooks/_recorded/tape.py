"""The tape of an open region: the values that its operators read and return, and the kept tensors.

The recorder (:mod:`.recorder`) puts operators on the tape. While the outermost region is open, the tape sees every write, and
copies a needed tensor before a write. At the end the kept tensors are sealed: from then on a changed version is an error, as
for tensors that autograd saved.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckpt_hooks._ambient.devices import Current
from ckpt_hooks._core.descriptions import RegionPath, dtype_and_shape
from ckpt_hooks._core.events import Watch
from ckpt_hooks._core.frame import Frame, Label
from ckpt_hooks._core.holdings import Cause, Reason
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.mutation import fused_steps
from ckpt_hooks._core.packed import TapeHandle
from ckpt_hooks._operators.draws import NotedStates, draw_noting, drops_nothing
from ckpt_hooks._operators.facts import OpFacts, OpKind, facts_of
from ckpt_hooks._tensors.copies import PLAIN, PLAIN_OR_FAKE, data_of, is_dense, layout_of
from ckpt_hooks._tensors.held_tensors import HeldOnHost, HeldRefilled, HeldTensor
from ckpt_hooks._tensors.refilling import owner_of
from ckpt_hooks._tensors.transfers import Batch, transfers_for
from ckpt_hooks._torch.autograd import Hooks, graph_task_id
from ckpt_hooks._torch.modes import FAKE, num_dispatch_modes
from ckpt_hooks._torch.tensors import counted_detach, is_below_counting, is_kept_anyway, storage_address, storage_of
from ckpt_hooks.policies.decisions import ASK, OFFLOAD, RECOMPUTE, SAVE, Decisions, SelectiveCheckpointContext

from .values import (
    ANEW,
    FROM_OUTSIDE,
    Op,
    OpWithShapes,
    Store,
    Surroundings,
    Tables,
    Value,
    alias_of,
    counter_in,
    flatten,
    new_store,
    new_value,
    slim,
)

_weakref, _new = weakref.ref, object.__new__


class TensorsHeld:
    """The values of a tape whose tensors are kept."""

    __slots__ = ("_batch", "_for_frame", "_held", "_reads", "frame", "handles")

    def __init__(self, frame: Frame | None) -> None:
        self.frame = frame  # the function frame around
        self._held: list[weakref.ref[Value]] = []
        # In a function frame, hooks must get the same tensors in forward and in the rerun. So all values live until the region
        # ends; otherwise the time of garbage collection would decide which values the hooks get.
        self._for_frame: list[Value] = []
        # For each value above: how many tensors the innermost region had saved, the operator that read the value, its argument.
        self._reads: list[tuple[int, str, int]] = []
        self.handles: Sized = ()  # the handles of the innermost region
        self._batch: Batch | None = None

    def __len__(self) -> int:
        return len(self._held)

    def note(self, value: Value, reference: weakref.ref[Value], facts: OpFacts | None = None, place: int = -1) -> None:
        """Notes a value whose tensor will be sealed at the end."""
        self._held.append(reference)
        if self.frame is not None:
            self._for_frame.append(value)
            self._reads.append((len(self.handles), "" if facts is None else facts.full_name, place))

    def keep(self, value: Value, tensor: torch.Tensor, decision: int, path: RegionPath, cause: Cause) -> None:
        """Keeps the tensor of a value, or sends it to the host; drops the value's history."""
        alias = counted_detach(tensor)
        to_host = decision == OFFLOAD and self.frame is None and not _is_cast_of_leaf(value)
        transfers = transfers_for(tensor) if to_host else None
        if transfers is not None:
            self._batch = self._batch or Batch()
            self._hold(value, HeldOnHost(alias, self._batch, transfers, path, cause))
        else:
            self._hold(value, HeldTensor(alias, path, cause))
        value.op = value.before = None

    def _hold(self, value: Value, saved: HeldTensor) -> None:
        value.saved = saved
        reference = _weakref(value)
        self.note(value, reference)
        references = value.store.held
        if references is None:
            value.store.held = [reference]
        else:
            references.append(reference)

    def note_version_later(self, value: Value) -> None:
        """Notes a kept tensor's version only at the end of the region: an in-place view moves the version without a write."""
        assert value.saved is not None
        value.saved.version = None
        self.note(value, _weakref(value))

    def _labels(self) -> Iterator[Label | None]:
        """Yields a label of each value for the function frame, in the order of keeping."""
        for value, read in zip(self._for_frame, self._reads, strict=True):
            tensor = None if value.saved is None else value.saved.tensor
            if value.saved is None or tensor is None:
                yield None
            else:
                kind = *dtype_and_shape(tensor), tensor.device
                yield Label(value.saved.cause.reason, read, tensor.requires_grad, kind)

    def close(self, hooks: Hooks | None, path: RegionPath, *, respect_hooks: bool) -> None:
        """Ends the recording: seals the kept tensors, with the hooks around if there are any."""
        references, self._held = self._held, []
        if self.frame is not None and hooks is not None and are_of_frame(hooks):
            places = self.frame.note_inside(list(self._labels()), path)
            self._seal([references[place] for place in places], hooks)
            # Forward did not keep the other values of this rerun, so the function frame's hooks must not count them.
            self._seal([references[place] for place in {*range(len(references))}.difference(places)], None)
        else:
            self._seal(references, hooks, respect_hooks=respect_hooks)
        self._for_frame.clear()

    def _seal(self, references: Iterable[weakref.ref[Value]], hooks: Hooks | None, *, respect_hooks: bool = True) -> None:
        for reference in references:
            value = reference()
            if value is not None and value.saved is not None:
                saved = value.saved
                value.saved = saved.sealed(hooks if respect_hooks or not saved.by_policy else None)


def _is_cast_of_leaf(value: Value) -> bool:
    """Whether a value is a cast of a parameter, which autocast caches until its block ends."""
    if value.op is None or value.op.facts.kind is not OpKind.CAST:
        return False
    source = value.op.args[0]
    saved = source.saved if type(source) is Value else None
    return saved is not None and saved.tensor is not None and is_kept_anyway(saved.tensor)


_Parameter, _STRIDED = torch.nn.Parameter, torch.strided
_EMPTY_STRIDED = torch.ops.aten.empty_strided.default
_GATHERED = Cause(Reason.PARAMETER, "a parameter gathered for its unit")


class Tape:
    """The recording of a thread's outermost region, and of the regions directly within."""

    recorder: SelectiveCheckpointContext  # the dispatch mode that records; unset outside of the outermost region
    surroundings: Surroundings  # the present surroundings of operators
    current: Current | None  # devices and streams when the outermost region began; None if no accelerator was in use

    def __init__(self, hooks: Hooks | None, *, respect_hooks: bool, frame: Frame | None) -> None:
        self.tables = Tables()  # the tables of tensors and storages
        self.handles: list[list[weakref.ref[TapeHandle]]] = []  # a list for each region on the tape
        self.held = TensorsHeld(frame)  # the kept tensors
        self.hooks = hooks  # the saved-tensor hooks around the outermost region
        self.respect_hooks = respect_hooks  # whether outputs kept by a policy go through the hooks
        self.is_in_frame = frame is not None  # whether the outermost region is inside a function frame
        self.task = graph_task_id()  # the backward in which the outermost region runs; -1 for none
        self.path: RegionPath = ("", None)  # the path of the innermost region
        self.lock = threading.RLock()  # held by a running replay of this tape
        self.decisions: Decisions | None = None  # the decisions of the innermost region's policy; None without a policy
        self.states = NotedStates()  # states of generators before each operator that draws
        self.draws_anew = False  # whether a replay of the innermost region draws other random numbers
        self.has_refilled = False  # whether an operator read memory that its owner frees and fills again
        self.is_of_function = False  # whether the tensor being packed was saved by a custom function
        self.has_others = False  # whether an operator read a tensor of a class that may have a ``__torch_function__``
        self.start = 0  # the number of the latest value when the innermost region began
        self.unseen: list[tuple[torch.Tensor, str]] = []  # booleans: whether the named function wrote unseen
        self.users_modes: Sequence[str] = ()  # names of the user's dispatch modes around the outermost region
        self.watched: Sequence[Watch] = ()  # the watches of frames that have ended

    def put(self, op: Op, index: int, values: list[Value], tensor: torch.Tensor) -> Value | None:
        """Puts an output of a numbered operator on the tape; returns its value, None for an argument and for unknown memory."""
        facts = op.facts
        try:
            address = storage_address(tensor)
        except NotImplementedError:
            return None
        key, table = id(tensor), self.tables.known
        value = Value()
        value.number = number = op.number + index
        value.op = op
        value.before = value.saved = None
        for other in values:
            store = other.store
            if store.address == address:
                if tensor is other.tensor():  # an argument
                    return None
                value.store = store
                # A view and ``detach()`` share the version counter of the base; ``.data`` does not.
                shares_counter = facts.is_view and (not facts.is_detach or is_below_counting())
                value.counter = other.counter if shares_counter else self.tables.another_counter(store)
                if store.uninitialized:
                    table = self.tables.uninitialized
                value.tensor = reference = _weakref(tensor, partial(table.pop, key))
                store.members.append(reference)
                break
        else:
            # The tape knows this memory, although the schema says that it is new: a replay may not bring back the content.
            if not facts.is_trusted and self.tables.is_taken(address):
                self.note_external(tensor, f"returned by {facts.operator}")
                return None
            value.tensor = reference = _weakref(tensor, partial(table.pop, key))
            value.store = value.counter = store = Store()
            store.address = address
            store.birth = number
            store.external = store.uninitialized = store.written = False
            store.members = [reference]
            store.handles = store.held = None
            self.tables.stores[address] = store
        table[key] = value
        return value

    def note(self, op: Op, values: list[Value], out: Any, decision: int = RECOMPUTE) -> list[Value]:
        """Puts the outputs of an operator on the tape; returns the new values."""
        outputs = out if type(out) is tuple else flatten(out)
        op.number = self.tables.number + 1
        self.tables.number += max(1, len(outputs))
        made = []
        for index, tensor in enumerate(outputs):
            if type(tensor) in PLAIN_OR_FAKE:
                if type(tensor) is FAKE and not any(type(value.tensor()) is FAKE for value in values):
                    op.facts = facts_of(op.facts.operator).under(tensor.fake_mode)
                    op.call = None if op.call is None else op.facts.call
                value = self.put(op, index, values, tensor)
                if value is not None:
                    made.append(value)
                    # Only a result in new memory: to keep a view of an argument would keep the argument's memory.
                    if decision != RECOMPUTE and value.store.birth == value.number:
                        cause = Cause(Reason.POLICY, f"as a result of {op.facts.full_name}")
                        self.keep(value, tensor, decision, cause)
            elif isinstance(tensor, (list, tuple)):
                return self.note(op, values, flatten(out), decision)
            elif isinstance(tensor, Tensor):
                self.note_external(tensor, _of_class(tensor))
        return made

    def keep(self, value: Value, tensor: torch.Tensor, decision: int, cause: Cause) -> None:
        """Keeps the tensor of a value for the policy of the innermost region."""
        self.held.keep(value, tensor, decision, self.path, cause)

    def cut(self, op: Op, made: list[Value]) -> None:
        """Drops an operator's arguments if all results are kept, so that no replay runs it."""
        if all(value.saved is not None for value in made):
            op.args, op.kwargs, op.present, op.draw = [], {}, (), None

    def note_external(self, tensor: torch.Tensor, detail: str) -> None:
        """Turns a tensor's storage into an outside storage, since its operator cannot be replayed."""
        address = storage_of(tensor)
        if address is not None:
            store = self.tables.stores.get(address)
            if store is None or not store.is_alive():
                store = self.tables.external_store(address)
            self.tables.make_external(store, detail)
            store.members.append(_weakref(tensor))

    def note_uninitialized(self, tensor: Any) -> None:
        address = storage_of(tensor) if isinstance(tensor, Tensor) and is_dense(tensor) else None
        if address is None:
            return
        value = self._uninitialized_like(tensor, address)
        value.store.uninitialized = True
        self.tables.stores[address] = value.store
        self.tables.register(tensor, value)

    def value_of(self, tensor: torch.Tensor, facts: OpFacts | None, place: int = -1) -> Value:
        """Returns the value of a tensor that is not in the table, read by an operator at a place."""
        key, kind = id(tensor), type(tensor)
        if kind is _Parameter and (leaf := self._leaf(tensor, key)) is not None:
            return leaf
        if kind not in PLAIN_OR_FAKE:
            self.has_others = True
        self.tables.known.pop(key, None)  # a value from before the tensor was given another storage
        if self.tables.uninitialized and (uninitialized := self.tables.uninitialized.get(key)) is not None:
            if facts is not None and facts.is_view:
                return uninitialized
            self.tables.make_external(uninitialized.store, "memory that was not written to as a whole")
        address, reference = storage_of(tensor), self.tables.inputs.get(key)
        if reference is not None:
            known = reference()
            # In a function frame each read except of a leaf has its own value: a rerun may read two tensors in place of one.
            same = known is not None and known.saved is not None and known.saved.tensor is tensor
            same = same and (not self.is_in_frame or is_kept_anyway(tensor))
            if known is not None and same and known.store.address == (address or 0):
                memory = known.saved.memory  # type: ignore[union-attr]
                if memory is None or layout_of(tensor) == layout_of(memory):
                    return known
        store = None if address is None else self.tables.stores.get(address)
        if store is None or not store.is_alive():
            store = self.tables.external_store(address)
            if type(tensor) not in PLAIN_OR_FAKE:
                store.cause = Cause(Reason.NOT_REPLAYED, _of_class(tensor))
        elif not store.external:
            value = alias_of(self.tables, store, tensor, self.surroundings)
            if value is not None:
                return value
            self.tables.make_external(store, "written or seen by other ways than operators")
        return self.input_of(tensor, store, facts, place)

    def _leaf(self, parameter: torch.Tensor, key: int) -> Value | None:
        """Returns a new value for a plain parameter, as :meth:`input_of` makes it; None for other parameters."""
        # :meth:`input_of` written out, which saves 2% of a small block's step.
        tables = self.tables
        is_leaf = parameter.requires_grad and not parameter._is_view() and parameter.is_leaf
        if not is_leaf or key in tables.inputs or tables.uninitialized or num_dispatch_modes():
            return None
        if parameter.layout is not _STRIDED or parameter.is_nested or owner_of(parameter) is not None:
            return None
        try:
            address, version = storage_address(parameter), parameter._version
        except (NotImplementedError, RuntimeError):  # it has no storage or no version
            return None
        if address in tables.stores:
            return None
        tables.known.pop(key, None)
        tables.number = number = tables.number + 1
        value, store, saved = Value(), Store(), _new(HeldTensor)
        value.number = number
        value.op = value.before = None
        value.tensor = reference = _weakref(parameter)
        value.store = value.counter = tables.stores[address] = store
        value.saved = saved
        tables.inputs[key] = holder = _weakref(value)
        store.address, store.birth, store.cause = address, 0, FROM_OUTSIDE
        store.external = True
        store.uninitialized = store.written = False
        store.members, store.handles, store.held = [reference], None, [holder]
        saved.tensor, saved.memory, saved.version = parameter, parameter.data, version
        saved.path, saved.cause, saved.faces = self.path, FROM_OUTSIDE, ()
        saved.is_fickle, saved.steps = False, fused_steps.count
        return value

    def input_of(self, tensor: torch.Tensor, store: Store, facts: OpFacts | None = None, place: int = -1) -> Value:
        """Returns a new value that keeps a tensor as it is."""
        self.tables.number = number = self.tables.number + 1
        value = Value()
        value.number = number
        value.op = value.before = None
        value.store = store
        value.counter = counter_in(self.tables, store, tensor) if store.members else store
        value.tensor = reference = _weakref(tensor)
        store.members.append(reference)
        origin = owner_of(tensor)
        if origin is None:
            saved = HeldTensor(tensor, self.path, store.cause)
            if store.address and type(tensor) in PLAIN and tensor.layout is _STRIDED and not tensor.is_nested:
                saved.memory = data_of(tensor)
        else:
            saved, self.has_refilled = HeldRefilled(tensor, origin, self.path, _GATHERED), True
        value.saved = saved
        self.tables.inputs[id(tensor)] = holder = _weakref(value)
        if store.held is None:
            store.held = [holder]
        else:
            store.held.append(holder)
        if is_kept_anyway(tensor):
            saved.version = None if tensor.is_inference() else tensor._version
            saved.steps = fused_steps.count
        else:
            saved.is_fickle = store.written and not tensor.requires_grad
            self.held.note(value, holder, facts, place)
        return value

    def shape_of(self, tensor: torch.Tensor) -> Any:
        """Returns an uninitialized value with the shape, strides, dtype and device of a tensor."""
        if not is_dense(tensor):
            return self.tables.known.get(id(tensor)) or self.value_of(tensor, None)
        value = self._uninitialized_like(tensor, 0)
        value.tensor = _weakref(tensor)
        return value

    def _uninitialized_like(self, tensor: torch.Tensor, address: int) -> Value:
        op = Op()
        self.tables.number = op.number = self.tables.number + 1
        op.facts, op.surroundings = facts_of(_EMPTY_STRIDED), self.surroundings
        op.present, op.draw = (), None
        if type(tensor) is FAKE:
            op.facts = op.facts.under(tensor.fake_mode)  # type: ignore[attr-defined]
        op.call = op.facts.call
        op.args = [tuple(tensor.shape), tensor.stride()]
        op.kwargs = {"dtype": tensor.dtype, "device": tensor.device}
        store = new_store(address, op.number)
        return new_value(op.number, store, store, op)

    def parameters(self) -> list[HeldTensor]:
        values = [value for reference in self.tables.inputs.values() if (value := reference()) is not None]
        held_tensors = [value.saved for value in values if type(value.saved) is HeldTensor]
        return [saved for saved in held_tensors if type(saved.tensor) is torch.nn.Parameter]

    def close(self) -> None:
        """Ends the recording: drops the tables, and seals the kept tensors."""
        for value, faces in self.tables.faces():
            assert value.saved is not None
            value.saved.faces = [(counted_detach(face), face._version) for face in faces]
        self.tables.clear()
        if not self.has_refilled:  # else replays need to know which values share a storage
            slim(itertools.chain.from_iterable(self.handles))
        self.held.close(self.hooks, self.path, respect_hooks=self.respect_hooks)


def _of_class(tensor: torch.Tensor) -> str:
    return f"a {type(tensor).__name__}, which is kept as it is"


def run(tape: Tape, op: Op, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
    if not facts.is_random or drops_nothing(func, args, kwargs):
        return facts.call(*args, **kwargs)
    if tape.draws_anew:
        op.draw = ANEW
        return facts.call(*args, **kwargs)
    states = None if op.facts.written else tape.states
    out, op.draw = draw_noting(func, args, kwargs, states, tape.tables.number + 1, tape.start)
    return out


def decide(tape: Tape, facts: OpFacts, args: Any, kwargs: Any, out: Any) -> int:
    """Returns the decision on an operator that has run; in a backward inside the region the policy is not asked."""
    if tape.decisions is None or graph_task_id() != tape.task:
        keeps = facts.is_collective or facts.has_effect or facts.drops_from_buffer(args, kwargs)
        decision = SAVE if keeps else RECOMPUTE
    elif facts.kind is OpKind.CAST and tape.decisions.of(facts) == ASK and is_kept_anyway(args[0]):
        decision = RECOMPUTE  # autocast caches this cast, so that only some runs have it
    else:
        decision = tape.decisions.decide(tape.recorder, facts, args, kwargs, out)
    # An operator that looks at ``requires_grad`` is kept: arguments of a replay require no grad.
    return SAVE if decision == RECOMPUTE and facts.looks_at_grad else decision


def op_of(
    tape: Tape, facts: OpFacts, args: Any, kwargs: Any, overwritten: frozenset[int] = frozenset(), unread: Sequence[int] = ()
) -> tuple[Op, list[Value]]:
    """Returns an operator that is about to run, with values in place of tensors, and the values."""
    values: list[Value] = []
    record = partial(_recorded, tape, facts, overwritten, values)
    op = OpWithShapes() if facts.has_shape_from_data else Op()
    op.facts = facts
    if facts.is_like:
        unread = (0,)
    if unread:
        op.args = [tape.shape_of(arg) if at in unread and arg is not None else record(arg) for at, arg in enumerate(args)]
    else:
        op.args = list(map(record, args))
    op.kwargs = {name: record(argument) for name, argument in kwargs.items()} if kwargs else kwargs
    op.present = tuple(index for index, argument in enumerate(op.args) if type(argument) is Value)
    op.draw = None
    op.call = facts.call if facts.is_plain and (not kwargs or facts.keywords.isdisjoint(kwargs)) else None
    op.surroundings = tape.surroundings
    return op, values


def _recorded(tape: Tape, facts: OpFacts, overwritten: frozenset[int], values: list[Value], argument: Any) -> Any:
    """Returns an argument with values in place of tensors; adds the values to ``values``."""
    if isinstance(argument, Tensor):
        key = id(argument)
        value = tape.tables.uninitialized.get(key) if key in overwritten else None
        if value is None:
            value = tape.tables.known.get(key)
        if value is None or storage_of(argument) != value.store.address:
            value = tape.value_of(argument, facts, len(values))
        values.append(value)
        return value
    if isinstance(argument, (list, tuple)) and any(isinstance(element, Tensor) for element in argument):
        return [_recorded(tape, facts, overwritten, values, element) for element in argument]
    return argument
