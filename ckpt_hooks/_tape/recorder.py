"""The dispatch mode that records what runs in a region, below autograd.

Most operators take tensors and return a tensor: for those everything is in :meth:`Recorder.__torch_dispatch__`, written out,
since each operator of each step of a program pays for it. The others go through the methods below, and those that write to
their arguments through :mod:`ckpt_hooks._tape.writes`.

The recorder knows tensors by identity. An entry of its table goes when its tensor does, so an identity that is found is that
tensor's and not a dead one's; and the entry owns the value, so what a tensor was made of is known as long as it is there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ckpt_hooks._ambient.draws import draw_noting, drops_nothing
from ckpt_hooks._ambient.flags import read_fast
from ckpt_hooks._dispatch import PausableDispatchMode, count_writes
from ckpt_hooks._operators import Kind
from ckpt_hooks._runtime.frame import RegionPath
from ckpt_hooks._runtime.stack import Presence
from ckpt_hooks._torch import (
    counted_detach,
    graph_task_id,
    is_compiled_code_running,
    num_function_modes,
    storage_address,
)
from ckpt_hooks.offload import Batch, transfers_for

from . import writes
from .around import Around, look_around
from .deciding import ASK, OFFLOAD, RECOMPUTE, SAVE, Deciding
from .facts import KNOWN, OpFacts, facts_of
from .kept import Hooks, Kept, Moved
from .values import Op, Store, Value, cut, flatten

__all__ = ["Recorder"]

_Tensor = torch.Tensor
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_weakref = weakref.ref
_NO_KWARGS: dict[str, Any] = {}
_FRESH = frozenset({Kind.SAVEABLE, Kind.RANDOM})
_CAST = Kind.CAST
_STRIDED = torch.strided
_EMPTY_STRIDED = torch.ops.aten.empty_strided.default
_FROM_OUTSIDE = "from outside of the region"


class Recorder(PausableDispatchMode):  # type: ignore[no-untyped-call]
    """Records for the outermost region of a thread, and for those directly within it (Rule 14).

    Attributes:
        number: That of the latest value or operator.
        known: Values of tensors that are on the tape, by identity of the tensor.
        blank: The same for tensors whose memory nobody has written to.
        inputs: Values of tensors from outside, by identity.
        stores: Storages, by address.
        path: The innermost region.
        deciding: What that region's policy says; None where it has none.
        around: What operators run under now.
        hooks: The saved-tensor hooks around the outermost region.
        respect_hooks: Whether what a policy keeps goes through those.
        is_in_frame: Whether a function frame is around that region.
        lock: Held by whoever replays this tape.
    """

    def __init__(self, hooks: Hooks | None, *, respect_hooks: bool, is_in_frame: bool) -> None:
        """Starts a tape.

        Args:
            hooks: The saved-tensor hooks that are active around the outermost region, if any.
            respect_hooks: Whether what a policy keeps goes through those.
            is_in_frame: Whether a function frame is around.
        """
        super().__init__()
        self.hooks = hooks
        self.respect_hooks = respect_hooks
        self.is_in_frame = is_in_frame
        # What is handed to hooks has to be the same in forward and in the rerun of a frame around. Which values are alive is not,
        # where the garbage collector has a say, so all of them are held up to the end of the region.
        self._held_for_frame: list[Value] = []
        self.number = 0
        self.known: dict[int, Value] = {}
        self.blank: dict[int, Value] = {}
        self.inputs: dict[int, weakref.ref[Value]] = {}
        self.stores: dict[int, Store] = {}
        self.path: RegionPath = ("", None)
        self.deciding: Deciding | None = None
        self._task = graph_task_id()
        self._forget = self.known.pop
        self.lock = threading.RLock()
        self._held: list[weakref.ref[Value]] = []
        self._batch: Batch | None = None
        self._seen: list[Around] = []
        self._look()

    def _look(self) -> None:
        """Finds out what operators run under now."""
        for around in self._seen:
            if around.switches.guard.check():
                break
        else:
            around = look_around()
            self._seen = [around, *self._seen[:3]]
        self.around = around
        self._check = around.switches.guard.check
        self._without_grad = not around.grad

    def _look_closely(self) -> None:
        """The same for operators that depend on switches which change without notice."""
        try:
            same = read_fast() == self.around.switches.unguarded
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
        deciding = self.deciding
        if (deciding is not None or self.is_in_frame) and (facts.kind is _CAST or graph_task_id() != self._task):
            return self._record(func, facts, args, kwargs or _NO_KWARGS)
        if deciding is not None:
            known = deciding.known.get(id(func))
            decision = known[1] if known is not None and known[0] is func else deciding.of(func)
            if decision != RECOMPUTE:
                if decision == SAVE and facts.kind in _FRESH:
                    return self._save(func, facts, args, kwargs or _NO_KWARGS)
                return self._record(func, facts, args, kwargs or _NO_KWARGS)
        if facts.looks_at_switches:
            self._look_closely()
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
            if value is None:
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
        if not facts.single or type(out) is not _Tensor or out.layout is not _STRIDED:
            self.note(op, values, out)
            return out
        # As ``_put`` does it.
        address = storage_address(out)
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
                    self._put(op, 0, values, out)
                    return out
                value.group = other.group if facts.is_view else object()
                value.tensor = reference = _weakref(out, partial(self._forget, key))
                store.members.append(reference)
                break
        else:
            value.tensor = reference = _weakref(out, partial(self._forget, key))
            value.group = store = Store()
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
        for tensor in (out,) if facts.single else flatten(out):
            if type(tensor) is not _Tensor or tensor.layout is not _STRIDED:
                continue
            address = storage_address(tensor)
            if self._is_taken(address):  # which its schema denies
                writes.make_outside(self, self.stores[address])
                self.stores[address].reason = f"returned by {func}"
                continue
            self.number = number = self.number + 1
            value = Value()
            value.number, value.index = number, 0
            value.op = value.before = None
            value.store = value.group = store = self.stores[address] = _new_store(address, number)
            key = id(tensor)
            value.tensor = reference = _weakref(tensor, partial(self._forget, key))
            store.members.append(reference)
            self.known[key] = value
            self.keep(value, tensor, SAVE, "kept by the policy")
        return out

    def _put(self, op: Op, index: int, values: list[Value], tensor: torch.Tensor) -> Value | None:
        """Puts an output of an operator that has a number on the tape; returns its value, if there is one.

        Args:
            op: The operator.
            index: Which of the outputs.
            values: What the operator read.
            tensor: The output.
        """
        facts = op.facts
        try:
            address = storage_address(tensor)
        except NotImplementedError:
            return None
        key, table = id(tensor), self.known
        value = Value()
        value.number = number = op.number + index
        value.op = op
        value.index = index
        value.before = value.saved = None
        for other in values:
            store = other.store
            if store.address == address:
                if tensor is other.tensor():  # an argument
                    return None
                value.store = store
                value.group = other.group if facts.is_view else object()
                if store.blank:
                    table = self.blank
                value.tensor = reference = _weakref(tensor, partial(table.pop, key))
                store.members.append(reference)
                break
        else:
            if not facts.is_trusted and self._is_taken(address):
                self.note_outside(tensor, f"returned by {facts.operator}")
                return None
            value.tensor = reference = _weakref(tensor, partial(table.pop, key))
            value.store = value.group = store = Store()
            store.address = address
            store.birth = number
            store.outside = store.blank = store.written = False
            store.members = [reference]
            store.pins = store.held = None
            self.stores[address] = store
        table[key] = value
        return value

    def _record(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs and records an operator of any kind."""
        if self._without_grad and is_compiled_code_running():
            return facts.call(*args, **kwargs)
        if self.is_in_frame and not facts.written and graph_task_id() != self._task:
            # A backward in the middle of forward. It adds to gradients that it finds there, in the rerun of the frame around
            # maybe and in forward not, so what it reads must not be handed to that frame.
            return facts.call(*args, **kwargs)
        if self.is_in_frame and facts.kind is _CAST and args[0].is_leaf and args[0].requires_grad:
            # Autocast makes this one once and keeps it for a while, so a rerun may find it there already.
            return facts.call(*args, **kwargs)
        if facts.looks_at_switches:
            self._look_closely()
        if facts.is_opaque:
            return writes.run_opaque(self, func, facts, args, kwargs)
        if facts.is_blank:
            out = facts.call(*args, **kwargs)
            self._note_blank(facts, out)
            return out
        if facts.written and not facts.is_inplace_view:
            return writes.run_writing(self, func, facts, args, kwargs)
        op, values = self.op_of(facts, args, kwargs)
        if facts.is_inplace_view:
            return writes.run_inplace_view(self, op, facts, args, kwargs)
        out = self.run(op, func, facts, args, kwargs)
        decision = RECOMPUTE if facts.is_view else self.decide(func, args, kwargs, out)
        made = self.note(op, values, out, decision)
        if decision != RECOMPUTE:
            cut(op, made)
        return out

    def run(self, op: Op, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs an operator, and notes in ``op`` what it draws."""
        if not facts.is_random:
            return facts.call(*args, **kwargs)
        out, op.draw = draw_noting(func, args, kwargs, shared=Presence.count > 0)
        return out

    def decide(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        """Returns what the policy says of an operator that has run."""
        deciding = self.deciding
        if deciding is None or graph_task_id() != self._task:
            return SAVE if facts_of(func).is_collective else RECOMPUTE
        decision = deciding.of(func)
        return deciding.ask(func, args, kwargs, out) if decision == ASK else decision

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

        def recorded(argument: Any) -> Any:
            if isinstance(argument, _Tensor):
                value = self.blank.get(id(argument)) if id(argument) in overwritten else None
                if value is None:
                    value = self.known.get(id(argument)) or self.value_of(argument, facts)
                values.append(value)
                return value
            if isinstance(argument, (list, tuple)) and any(isinstance(one, _Tensor) for one in argument):
                return [recorded(one) for one in argument]
            return argument

        op = Op()
        op.facts = facts
        if facts.is_like:
            op.args = [self._shape_of(args[0]), *map(recorded, args[1:])]
        else:
            op.args = [recorded(argument) for argument in args]
        op.kwargs = {name: recorded(argument) for name, argument in kwargs.items()} if kwargs else kwargs
        op.present = tuple(index for index, argument in enumerate(op.args) if type(argument) is Value)
        op.draw = None
        op.is_plain = False
        op.around = self.around
        return op, values

    def _shape_of(self, tensor: torch.Tensor) -> Any:
        """Returns a value that has the shape, strides and so on of a tensor, and nothing in it."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return self.known.get(id(tensor)) or self.value_of(tensor, None)
        self.number = number = self.number + 1
        value = Value()
        value.op = _blank_like(tensor, number, self.around)
        value.number, value.index, value.before, value.saved = number, 0, None, None
        value.store = value.group = _new_store(0, number)
        value.tensor = _weakref(tensor)
        return value

    def note(self, op: Op, values: list[Value], out: Any, decision: int = RECOMPUTE) -> list[Value]:
        """Puts what an operator returned on the tape; returns what it put there.

        Args:
            op: The operator, without a number yet.
            values: What it read.
            out: What it returned.
            decision: What becomes of it.
        """
        outputs = out if type(out) is tuple else flatten(out)
        op.number = self.number + 1
        self.number += max(1, len(outputs))
        made = []
        for index, tensor in enumerate(outputs):
            if type(tensor) in _PLAIN:
                value = self._put(op, index, values, tensor)
                if value is not None:
                    made.append(value)
                    if decision != RECOMPUTE and value.store.birth == value.number:
                        self.keep(value, tensor, decision, f"kept by the policy, as a result of {op.facts.operator}")
            elif isinstance(tensor, (list, tuple)):
                return self.note(op, values, flatten(out), decision)
        return made

    def register(self, tensor: torch.Tensor, value: Value) -> None:
        """Makes a value that of a tensor, from now on."""
        key, table = id(tensor), self.blank if value.store.blank else self.known
        value.tensor = _weakref(tensor, partial(table.pop, key))
        value.store.members.append(value.tensor)
        (self.known if value.store.blank else self.blank).pop(key, None)
        table[key] = value

    def keep(self, value: Value, tensor: torch.Tensor, decision: int, reason: str) -> None:
        """Keeps the tensor of a value, or sends it to the host; what it was made of is not needed any more then."""
        kept = Kept()
        kept.tensor, kept.version, kept.reason, kept.path = counted_detach(tensor), None, reason, self.path
        kept.is_fickle, kept.by_policy = False, True
        transfers = transfers_for(tensor) if decision == OFFLOAD and not self.is_in_frame else None
        if transfers is not None:
            self._batch = self._batch or Batch()
            kept = Moved(kept, self._batch, transfers)
        self._hold(value, kept)
        value.op = value.before = None

    def _hold(self, value: Value, kept: Kept) -> None:
        value.saved = kept
        reference = _weakref(value)
        self._held.append(reference)
        if self.is_in_frame:
            self._held_for_frame.append(value)
        held = value.store.held
        if held is None:
            value.store.held = [reference]
        else:
            held.append(reference)

    def _is_taken(self, address: int) -> bool:
        store = self.stores.get(address)
        return store is not None and store.is_alive()

    def note_outside(self, tensor: torch.Tensor, reason: str) -> None:
        """Makes a storage one that comes from outside, since what made it cannot be replayed."""
        address = _address_of(tensor)
        if address is not None:
            store = self.stores.get(address)
            if store is None or not store.is_alive():
                store = self._store_outside(address)
            writes.make_outside(self, store)
            store.reason = reason
            store.members.append(_weakref(tensor))

    def _note_blank(self, facts: OpFacts, tensor: Any) -> None:
        address = _address_of(tensor) if isinstance(tensor, _Tensor) else None
        if address is None or tensor.layout is not torch.strided:
            return
        self.number = number = self.number + 1
        value = Value()
        value.op = _blank_like(tensor, number, self.around)
        value.number, value.index, value.before, value.saved = number, 0, None, None
        value.store = value.group = store = self.stores[address] = _new_store(address, number)
        store.blank = True
        self.register(tensor, value)

    def store_of(self, tensor: torch.Tensor) -> Store:
        """Returns the storage that a tensor is in; one from outside, where the tape does not know it."""
        value = self.known.get(id(tensor)) or self.blank.get(id(tensor))
        if value is not None:
            return value.store
        found = self._input(tensor)
        if found is not None:
            return found.store
        address = _address_of(tensor)
        store = None if address is None else self.stores.get(address)
        return self._store_outside(address) if store is None or not store.is_alive() else store

    def value_of(self, tensor: torch.Tensor, facts: OpFacts | None) -> Value:
        """Returns the value of a tensor that is not in the table.

        Args:
            tensor: The tensor: one that nobody has written to, one from outside, or another face of one on the tape that came
                to be unseen.
            facts: The operator that reads it, if any.
        """
        key = id(tensor)
        if self.blank and (blank := self.blank.get(key)) is not None:
            if facts is not None and facts.is_view:
                return blank
            writes.make_outside(self, blank.store)
            blank.store.reason = "memory that was not written to as a whole"
        reference = self.inputs.get(key)
        if reference is not None:
            found = reference()
            if found is not None and found.saved is not None and found.saved.tensor is tensor:
                # Where the forward of a frame around meets one tensor twice, its rerun may meet two.
                if not self.is_in_frame or (tensor.is_leaf and tensor.requires_grad):
                    return found
        address = storage_address(tensor) if type(tensor) in _PLAIN and tensor.layout is _STRIDED else None
        store = None if address is None else self.stores.get(address)
        if store is None or not store.is_alive():
            store = Store()
            store.address = address or 0
            store.birth = 0
            store.reason = _FROM_OUTSIDE
            store.outside = True
            store.blank = store.written = False
            store.members = []
            store.pins = store.held = None
            if address is not None:
                self.stores[address] = store
        elif not store.outside:
            value = writes.alias_of(self, store, tensor)
            if value is not None:
                return value
            writes.make_outside(self, store)
            store.reason = "written or seen by other ways than operators"
        return self.input_of(tensor, store)

    def _input(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value that keeps a tensor as it is now, if there is one."""
        reference = self.inputs.get(id(tensor))
        value = None if reference is None else reference()
        return value if value is not None and value.saved is not None and value.saved.tensor is tensor else None

    def _store_outside(self, address: int | None) -> Store:
        store = _new_store(address or 0, 0)
        store.outside = True
        if address is not None:
            self.stores[address] = store
        return store

    def input_of(self, tensor: torch.Tensor, store: Store) -> Value:
        """Returns a value that keeps a tensor as it is."""
        self.number = number = self.number + 1
        value = Value()
        value.number = number
        value.index = 0
        value.op = value.before = None
        value.store = value.group = store
        value.tensor = reference = _weakref(tensor)
        store.members.append(reference)
        kept = Kept()
        kept.tensor = tensor
        kept.reason = store.reason
        kept.path = self.path
        kept.by_policy = False
        value.saved = kept
        self.inputs[id(tensor)] = reference = _weakref(value)
        if store.held is None:
            store.held = [reference]
        else:
            store.held.append(reference)
        if tensor.requires_grad and tensor.is_leaf:
            kept.version = tensor._version
            kept.is_fickle = False
        else:
            kept.version = None
            kept.is_fickle = store.written and not tensor.requires_grad
            self._held.append(reference)
            if self.is_in_frame:
                self._held_for_frame.append(value)
        return value

    def live_members(self, store: Store) -> Iterator[torch.Tensor]:
        """Goes through the tensors that are in a storage, each once."""
        members = {id(tensor): tensor for member in store.members if (tensor := member()) is not None}
        store.members = [_weakref(tensor) for tensor in members.values()]
        return iter(members.values())

    def close(self) -> None:
        """Ends the recording: what is not needed goes, what is kept is handed to the hooks around, if any."""
        self.known.clear()
        self.blank.clear()
        self.inputs.clear()
        self.stores.clear()
        self.deciding = None
        held, self._held = self._held, []
        for reference in held:
            value = reference()
            if value is not None and value.saved is not None:
                saved = value.saved
                value.saved = saved.sealed(None if saved.by_policy and not self.respect_hooks else self.hooks)
        self._held_for_frame.clear()


def _new_store(address: int, birth: int) -> Store:
    store = Store()
    store.address, store.birth, store.reason = address, birth, _FROM_OUTSIDE
    store.outside = store.blank = store.written = False
    store.members = []
    store.pins = store.held = None
    return store


def _address_of(tensor: torch.Tensor) -> int | None:
    """Returns where the storage of a tensor is; None for subclasses, whose storage is none, and others without one."""
    if type(tensor) not in _PLAIN:
        return None
    try:
        return storage_address(tensor)
    except NotImplementedError:
        return None


def _blank_like(tensor: torch.Tensor, number: int, around: Around) -> Op:
    """Returns an operator that makes memory like that of a tensor."""
    op = Op()
    op.number, op.facts, op.present, op.draw, op.around = number, facts_of(_EMPTY_STRIDED), (), None, around
    op.is_plain = True
    op.args = [tuple(tensor.shape), tensor.stride()]
    op.kwargs = {"dtype": tensor.dtype, "device": tensor.device}
    return op
