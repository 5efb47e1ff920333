"""What a recorder knows of tensors while a region is open.

The tables go by the identity of tensors. An entry goes when its tensor does, so an identity that is found is that tensor's and
not a dead one's; and the entry owns the value, so what a tensor was made of is known as long as it is there. Tensors from
outside are not owned: what keeps them are the operators that read them, as long as somebody may need those.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ckpt_hooks._fused_steps import num_fused_steps
from ckpt_hooks._offloaded import Batch
from ckpt_hooks._operators import Kind
from ckpt_hooks._refit import PLAIN_OR_FAKE, is_dense
from ckpt_hooks._runtime.paths import RegionPath
from ckpt_hooks._torch import FAKE, counted_detach, is_below_counting, is_kept_anyway, storage_address, storage_of
from ckpt_hooks._transfers import transfers_for

from .aliases import alias_of, counter_in
from .around import Around
from .deciding import OFFLOAD, RECOMPUTE
from .facts import OpFacts, facts_of
from .kept import Hooks, Kept, Moved, lost_to_exchange
from .values import Op, Store, Value, flatten, new_store, new_value

__all__ = ["Tables"]

_Tensor = torch.Tensor
_weakref = weakref.ref
_EMPTY_STRIDED = torch.ops.aten.empty_strided.default


class Tables:
    """The tensors and storages of one tape.

    Attributes:
        number: That of the latest value or operator.
        known: Values of tensors that are on the tape, by identity of the tensor.
        blank: The same for tensors whose memory nobody has written to.
        inputs: Values of tensors from outside, by identity.
        stores: Storages, by address.
        path: The innermost region.
        lock: Held by whoever replays this tape.
        around: What operators run under now.
        hooks: The saved-tensor hooks around the outermost region.
        respect_hooks: Whether what a policy keeps goes through those.
        is_in_frame: Whether a function frame is around that region.
    """

    around: Around

    def __init__(self, hooks: Hooks | None, *, respect_hooks: bool, is_in_frame: bool) -> None:
        """Starts a tape.

        Args:
            hooks: The saved-tensor hooks that are active around the outermost region, if any.
            respect_hooks: Whether what a policy keeps goes through those.
            is_in_frame: Whether a function frame is around.
        """
        self.hooks = hooks
        self.respect_hooks = respect_hooks
        self.is_in_frame = is_in_frame
        self.number = 0
        self.known: dict[int, Value] = {}
        self.blank: dict[int, Value] = {}
        self.inputs: dict[int, weakref.ref[Value]] = {}
        self.stores: dict[int, Store] = {}
        self.path: RegionPath = ("", None)
        self.lock = threading.RLock()
        self._held: list[weakref.ref[Value]] = []
        # What is handed to hooks has to be the same in forward and in the rerun of a frame around. Which values are alive is
        # not, where the garbage collector has a say, so all of them are held up to the end of the region.
        self._held_for_frame: list[Value] = []
        self._batch: Batch | None = None

    def put(self, op: Op, index: int, values: list[Value], tensor: torch.Tensor) -> Value | None:
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
                shares_counter = facts.is_view and (not facts.is_detach or is_below_counting())
                value.counter = other.counter if shares_counter else object()
                if store.blank:
                    table = self.blank
                value.tensor = reference = _weakref(tensor, partial(table.pop, key))
                store.members.append(reference)
                break
        else:
            if not facts.is_trusted and self.is_taken(address):
                self.note_outside(tensor, f"returned by {facts.operator}")
                return None
            value.tensor = reference = _weakref(tensor, partial(table.pop, key))
            value.store = value.counter = store = Store()
            store.address = address
            store.birth = number
            store.outside = store.blank = store.written = False
            store.members = [reference]
            store.pins = store.held = None
            self.stores[address] = store
        table[key] = value
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
            if type(tensor) in PLAIN_OR_FAKE:
                if type(tensor) is FAKE and not any(type(value.tensor()) is FAKE for value in values):
                    op.facts = facts_of(op.facts.operator).under(tensor.fake_mode)
                value = self.put(op, index, values, tensor)
                if value is not None:
                    made.append(value)
                    if decision != RECOMPUTE and value.store.birth == value.number:
                        self.keep(value, tensor, decision, f"kept by the policy, as a result of {op.facts.operator}")
            elif isinstance(tensor, (list, tuple)):
                return self.note(op, values, flatten(out), decision)
            elif isinstance(tensor, _Tensor):
                self.note_outside(tensor, _reason_for(tensor))
        return made

    def register(self, tensor: torch.Tensor, value: Value) -> None:
        """Makes a value that of a tensor, from now on, until the tensor dies.

        Then the weak reference calls ``pop`` with the key and with itself, which is the default for a key that is gone.
        """
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
        to_host = decision == OFFLOAD and not self.is_in_frame and not _is_cast_of_leaf(value)
        transfers = transfers_for(tensor) if to_host else None
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

    def note_version_later(self, value: Value) -> None:
        """Has the version of what is kept noted when the region ends, since it moves without a write."""
        assert value.saved is not None
        value.saved.version = None
        self._held.append(_weakref(value))

    def is_taken(self, address: int) -> bool:
        """Whether a storage at an address is known and not gone."""
        store = self.stores.get(address)
        return store is not None and store.is_alive()

    def note_outside(self, tensor: torch.Tensor, reason: str) -> None:
        """Makes a storage one that comes from outside, since what made it cannot be replayed."""
        address = storage_of(tensor)
        if address is not None:
            store = self.stores.get(address)
            if store is None or not store.is_alive():
                store = self.store_outside(address)
            self.make_outside(store, reason)
            store.members.append(_weakref(tensor))

    def note_blank(self, tensor: Any) -> None:
        """Puts memory on the tape that nobody has written to."""
        address = storage_of(tensor) if isinstance(tensor, _Tensor) else None
        if address is None or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return
        value = self._blank_like(tensor, address)
        value.store.blank = True
        self.stores[address] = value.store
        self.register(tensor, value)

    def store_outside(self, address: int | None) -> Store:
        """Returns a storage from outside that is not known yet; None for the address of one that has none, or not yet."""
        store = new_store(address or 0, 0)
        store.outside = True
        if address is not None:
            self.stores[address] = store
        return store

    def make_outside(self, store: Store, reason: str) -> None:
        """Makes a storage one that comes from outside: from now on its tensors are kept, where they are needed."""
        if not store.outside:
            store.outside = True
            store.blank = False
            self.forget_members(store)
        store.reason = reason

    def forget_members(self, store: Store) -> None:
        """Forgets what is known of the tensors in a storage."""
        for tensor in self.live_members(store):
            key = id(tensor)
            self.known.pop(key, None)
            self.blank.pop(key, None)
            self.inputs.pop(key, None)

    def value_now(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value of a tensor, if it is known."""
        return self.known.get(id(tensor)) or self.blank.get(id(tensor)) or self._input(tensor)

    def store_of(self, tensor: torch.Tensor) -> Store:
        """Returns the storage that a tensor is in; one from outside, where the tape does not know it."""
        value = self.value_now(tensor)
        address = storage_of(tensor)
        if value is not None and value.store.address == (address or 0):
            return value.store
        store = None if address is None else self.stores.get(address)
        if store is None or not store.is_alive():
            store = self.store_outside(address)
            store.members.append(_weakref(tensor))
        return store

    def value_of(self, tensor: torch.Tensor, facts: OpFacts | None) -> Value:
        """Returns the value of a tensor that is not in the table.

        Args:
            tensor: The tensor: one that nobody has written to, one from outside, or another face of one on the tape that came
                to be unseen.
            facts: The operator that reads it, if any.
        """
        key = id(tensor)
        self.known.pop(key, None)  # one that was given another storage
        if self.blank and (blank := self.blank.get(key)) is not None:
            if facts is not None and facts.is_view:
                return blank
            self.make_outside(blank.store, "memory that was not written to as a whole")
        address, reference = storage_of(tensor), self.inputs.get(key)
        if reference is not None:
            found = reference()
            # Where the forward of a frame around meets one tensor twice, its rerun may meet two.
            same = found is not None and found.saved is not None and found.saved.tensor is tensor
            if found is not None and same and (not self.is_in_frame or is_kept_anyway(tensor)):
                if found.store.address == (address or 0) or not is_kept_anyway(tensor):
                    return found
                found.saved = lost_to_exchange(self.path)
        store = None if address is None else self.stores.get(address)
        if store is None or not store.is_alive():
            store = self.store_outside(address)
            if type(tensor) not in PLAIN_OR_FAKE:
                store.reason = _reason_for(tensor)
        elif not store.outside:
            value = alias_of(self, store, tensor)
            if value is not None:
                return value
            self.make_outside(store, "written or seen by other ways than operators")
        return self.input_of(tensor, store)

    def _input(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value that keeps a tensor as it is now, if there is one."""
        reference = self.inputs.get(id(tensor))
        value = None if reference is None else reference()
        return value if value is not None and value.saved is not None and value.saved.tensor is tensor else None

    def input_of(self, tensor: torch.Tensor, store: Store) -> Value:
        """Returns a value that keeps a tensor as it is."""
        self.number = number = self.number + 1
        value = Value()
        value.number = number
        value.index = 0
        value.op = value.before = None
        value.store = store
        value.counter = counter_in(self, store, tensor) if store.members else store
        value.tensor = reference = _weakref(tensor)
        store.members.append(reference)
        kept = Kept()
        kept.tensor = tensor
        kept.reason = store.reason
        kept.path = self.path
        kept.by_policy = False
        value.saved = kept
        self.inputs[id(tensor)] = holder = _weakref(value)
        if store.held is None:
            store.held = [holder]
        else:
            store.held.append(holder)
        if is_kept_anyway(tensor):
            kept.version = None if tensor.is_inference() else tensor._version
            kept.steps = num_fused_steps()
            kept.is_fickle = False
        else:
            kept.version = None
            kept.is_fickle = store.written and not tensor.requires_grad
            self._held.append(holder)
            if self.is_in_frame:
                self._held_for_frame.append(value)
        return value

    def live_members(self, store: Store) -> Iterator[torch.Tensor]:
        """Goes through the tensors that are in a storage, each once."""
        members = {id(tensor): tensor for member in store.members if (tensor := member()) is not None and store.has(tensor)}
        store.members = [_weakref(tensor) for tensor in members.values()]
        return iter(members.values())

    def shape_of(self, tensor: torch.Tensor) -> Any:
        """Returns a value that has the shape, strides and so on of a tensor, and nothing in it."""
        if not is_dense(tensor):
            return self.known.get(id(tensor)) or self.value_of(tensor, None)
        value = self._blank_like(tensor, 0)
        value.tensor = _weakref(tensor)
        return value

    def _blank_like(self, tensor: torch.Tensor, address: int) -> Value:
        """Returns a value for memory like that of a tensor, at an address."""
        op = Op()
        self.number = op.number = self.number + 1
        op.facts, op.present, op.draw, op.around, op.is_plain = facts_of(_EMPTY_STRIDED), (), None, self.around, True
        if type(tensor) is FAKE:
            op.facts = op.facts.under(tensor.fake_mode)  # type: ignore[attr-defined]
        op.args = [tuple(tensor.shape), tensor.stride()]
        op.kwargs = {"dtype": tensor.dtype, "device": tensor.device}
        store = new_store(address, op.number)
        return new_value(op.number, store, store, op)

    def num_held(self) -> int:
        """Returns how many tensors are kept that come from outside, or by the policy."""
        return len(self._held)

    def close(self) -> None:
        """Ends the recording: what is not needed goes, what is kept is handed to the hooks around, if any."""
        self.known.clear()
        self.blank.clear()
        self.inputs.clear()
        self.stores.clear()
        held, self._held = self._held, []
        for reference in held:
            value = reference()
            if value is not None and value.saved is not None:
                saved = value.saved
                value.saved = saved.sealed(None if saved.by_policy and not self.respect_hooks else self.hooks)
        self._held_for_frame.clear()


def _is_cast_of_leaf(value: Value) -> bool:
    """Whether a value is what autocast makes of a parameter, and keeps until its block ends."""
    if value.op is None or value.op.facts.kind is not Kind.CAST:
        return False
    source = value.op.args[0]
    saved = source.saved if type(source) is Value else None
    return saved is not None and saved.tensor is not None and is_kept_anyway(saved.tensor)


def _reason_for(tensor: torch.Tensor) -> str:
    return f"a {type(tensor).__name__}, which is kept as it is"
