"""The parts of a tape: operators, values, storages, tables and surroundings.

A tape has no list of its parts. A handle in autograd's graph owns a value, a value owns the operator that made it, and an
operator owns the values that it read. So a value on which no live handle depends dies by reference counting (Rule 17), and
there is no list to prune. While a region is open, a table also owns the values of live tensors.

A write through any view of a storage changes all its views. So a write makes a new value of every live tensor in the storage:
the old value, after the operator. A value is thus a tensor at a moment, and a read refers to the value of its moment (Rule 15).

The tables have the identities of tensors as keys. An entry is removed when its tensor dies, before another tensor can have the
identity. Tensors from outside are not owned by a table, but by the operators that read them.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from ckpt_hooks._ambient.devices import Current
from ckpt_hooks._ambient.switches import SwitchValues
from ckpt_hooks._core.holdings import Cause, Reason
from ckpt_hooks._operators.facts import OpFacts, facts_of
from ckpt_hooks._tensors.copies import PLAIN_OR_FAKE
from ckpt_hooks._tensors.held_tensors import HeldTensor
from ckpt_hooks._torch.tensors import handles_operators, share_counter, storage_of


class Surroundings:
    __slots__ = ("current", "grad", "switches")

    def __init__(self, current: Current | None, switches: SwitchValues) -> None:
        self.switches = switches
        self.grad = torch.is_grad_enabled()
        self.current = current  # None if no accelerator was in use when the outermost region began


class Store:
    """One storage, from its first appearance on the tape."""

    __slots__ = (
        "__weakref__",
        "address",
        "birth",
        "cause",
        "external",
        "handles",
        "held",
        "members",
        "uninitialized",
        "written",
    )

    address: int  # the address of the storage object
    birth: int  # the number of the first value in the storage; 0 if the storage was there before
    external: bool  # whether the contents come from outside: tensors in the storage are kept, not brought back
    uninitialized: bool  # whether no operator has filled the storage yet
    written: bool  # whether an operator on the tape wrote to the storage
    members: list[weakref.ref[torch.Tensor]]  # the tensors in the storage that the tape has seen
    handles: list[weakref.ref[Any]] | None  # the handles of tensors in the storage, or None
    held: list[weakref.ref[Value]] | None  # the values in the storage whose tensor is kept, or None
    cause: Cause  # the reason for keeping tensors in the storage; valid if ``external``

    def is_alive(self) -> bool:
        """Whether a known tensor is still in the storage, so that no other storage has the address."""
        if any(self.has(member()) for member in self.members):
            return True
        for reference in self.held or ():
            value = reference()
            if value is not None and value.saved is not None and value.saved.is_in(self.address):
                return True
        return False

    def has(self, tensor: torch.Tensor | None) -> bool:
        """Whether a tensor is in the storage, and was not given another storage (``tensor.data = other``)."""
        return tensor is not None and (storage_of(tensor) or 0) == self.address


FROM_OUTSIDE = Cause(Reason.INPUT)

#: Takes the place of a generator's state in ``Op.draw``: a replay draws new numbers.
ANEW: Any = object()


class Op:
    __slots__ = ("args", "call", "draw", "facts", "kwargs", "number", "present", "surroundings")

    number: int  # the place on the tape, and the number of the first result
    facts: OpFacts
    call: Callable[..., Any] | None  # for an operator that takes tensors by position only; None for others
    args: list[Any]  # positional arguments, with values in place of tensors
    kwargs: dict[str, Any]  # keyword arguments, likewise
    present: tuple[int, ...]  # the positions of values among the positional arguments
    draw: Any  # the state of the generator before the draw, :data:`ANEW`, or None
    surroundings: Any


class OpWithShapes(Op):
    """An operator whose results have data-dependent shapes."""

    __slots__ = ("shapes",)

    shapes: list[tuple[int, ...]] | None  # of forward; None while torch traces


class Value:
    """A tensor at a moment."""

    # There are three kinds. A result is an output of an operator (``op``). A value after a write is another value (``before``)
    # after an operator (``op``). An input has neither; it is kept.
    __slots__ = ("__weakref__", "before", "counter", "number", "op", "saved", "store", "tensor")

    number: int  # larger than the number of any earlier value
    op: Op | None  # the operator that made or wrote to it; None for an input
    before: Value | None  # the value before ``op`` wrote to it; None for a result
    store: Store
    # Stands for the version counter: the same object for all tensors that share a version. A storage may have several, as for
    # ``tensor.data`` and for parts by ``unsafe_chunk`` (tests/behaviours/test_region_writes.py: ``FACES``).
    counter: object
    saved: HeldTensor | None  # the kept tensor, if it is kept
    tensor: Callable[[], torch.Tensor | None]  # the tensor, as long as it is alive


def new_store(address: int, birth: int) -> Store:
    """Returns a storage; code that runs for each operator has this written out."""
    store = Store()
    store.address, store.birth, store.cause = address, birth, FROM_OUTSIDE
    store.external = store.uninitialized = store.written = False
    store.members = []
    store.handles = store.held = None
    return store


def new_value(number: int, store: Store, counter: object, op: Op | None = None, before: Value | None = None) -> Value:
    """Returns a value without a tensor yet; code that runs for each operator has this written out."""
    value = Value()
    value.number, value.op, value.before = number, op, before
    value.store, value.counter, value.saved = store, counter, None
    return value


def _holders(reference: weakref.ref[Any]) -> int:
    target = reference()
    return sys.getrefcount(target)


_probe = Value()
# The count of ``_holders`` for a value with a single holder.
_ONE_HOLDER = _holders(weakref.ref(_probe))


def is_held_twice(reference: weakref.ref[Value], holders: int = 1) -> bool:
    """Whether a value has more than ``holders`` holders, such as operators that read it, and handles."""
    return _holders(reference) > _ONE_HOLDER - 1 + holders


def flatten(outputs: Any) -> list[Any]:
    if isinstance(outputs, (list, tuple)):
        return list(itertools.chain.from_iterable(map(flatten, outputs)))
    return [outputs]


def values_on_tape(argument: Any) -> list[Value]:
    if type(argument) is Value:
        return [argument]
    if type(argument) is list:
        return [value for value in argument if type(value) is Value]
    return []


def read_by(op: Op) -> list[Value]:
    return [value for argument in (*op.args, *op.kwargs.values()) for value in values_on_tape(argument)]


def values_below(values: list[Value]) -> list[Value]:
    """Returns ``values`` and all values that they were made from, each once."""
    todo, reached = list(values), {}
    while todo:
        value = todo.pop()
        if id(value) in reached:
            continue
        reached[id(value)] = value
        if value.before is not None:
            todo.append(value.before)
        if (op := value.op) is not None:
            todo += read_by(op)
    return list(reached.values())


def rebuild(argument: Any, tensors: dict[int, torch.Tensor]) -> Any:
    if type(argument) is Value:
        return tensors[argument.number]
    if type(argument) is list:
        return [tensors[value.number] if type(value) is Value else value for value in argument]
    return argument


_weakref = weakref.ref


class Tables:
    """The tensors and storages of a tape."""

    __slots__ = ("inputs", "known", "number", "shared", "stores", "uninitialized")

    def __init__(self) -> None:
        self.number = 0  # the number of the latest value or operator
        self.shared: list[Store] = []  # storages with several version counters
        self.known: dict[int, Value] = {}  # values of tensors on the tape, by identity of the tensor
        self.uninitialized: dict[int, Value] = {}  # the same for uninitialised tensors
        self.inputs: dict[int, weakref.ref[Value]] = {}  # values of tensors from outside, by identity
        self.stores: dict[int, Store] = {}  # storages, by address

    def another_counter(self, store: Store) -> object:
        """Returns an object that stands for another version counter in a storage."""
        self.shared.append(store)
        return object()

    def register(self, tensor: torch.Tensor, value: Value) -> None:
        """Gives a tensor a value, until the tensor dies."""
        key, table = id(tensor), self.uninitialized if value.store.uninitialized else self.known
        # The weak reference calls ``pop`` with the key and with itself, which is the default for a missing key.
        value.tensor = _weakref(tensor, partial(table.pop, key))
        value.store.members.append(value.tensor)
        (self.known if value.store.uninitialized else self.uninitialized).pop(key, None)
        table[key] = value

    def is_taken(self, address: int) -> bool:
        store = self.stores.get(address)
        return store is not None and store.is_alive()

    def external_store(self, address: int | None) -> Store:
        """Returns a new outside storage at ``address``, which is None for a tensor without a storage."""
        store = new_store(address or 0, 0)
        store.external = True
        if address is not None:
            self.stores[address] = store
        return store

    def make_external(self, store: Store, detail: str) -> None:
        """Turns a storage that cannot be replayed into an outside storage, whose tensors are kept if needed."""
        if not store.external:
            store.external = True
            store.uninitialized = False
            self.forget_members(store)
        store.cause = Cause(Reason.NOT_REPLAYED, detail)

    def forget_members(self, store: Store) -> None:
        for tensor in self.live_members(store):
            key = id(tensor)
            self.known.pop(key, None)
            self.uninitialized.pop(key, None)
            self.inputs.pop(key, None)

    def value_now(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value of a tensor: a result, unfilled memory, or the input that keeps the tensor; None if unknown."""
        value = self.known.get(id(tensor)) or self.uninitialized.get(id(tensor))
        if value is not None:
            return value
        reference = self.inputs.get(id(tensor))
        value = None if reference is None else reference()
        return value if value is not None and value.saved is not None and value.saved.tensor is tensor else None

    def store_of(self, tensor: torch.Tensor) -> Store:
        """Returns the storage of a tensor; an outside storage if the tape does not know it."""
        value = self.value_now(tensor)
        address = storage_of(tensor)
        if value is not None and value.store.address == (address or 0):
            return value.store
        store = None if address is None else self.stores.get(address)
        if store is None or not store.is_alive():
            store = self.external_store(address)
            store.members.append(_weakref(tensor))
        return store

    def live_members(self, store: Store) -> Iterator[torch.Tensor]:
        """Returns an iterator over the live tensors in a storage, each once."""
        members = {id(tensor): tensor for member in store.members if (tensor := member()) is not None and store.has(tensor)}
        store.members = [_weakref(tensor) for tensor in members.values()]
        return iter(members.values())

    def faces(self) -> Iterator[tuple[Value, list[torch.Tensor]]]:
        """Yields kept values with the live tensors that share their memory but have another version counter."""
        for store in self.shared:
            for reference in store.held or ():
                value = reference()
                if value is None or type(value.saved) is not HeldTensor or not value.saved.is_in(store.address):
                    continue
                others = [(member, self.value_now(member)) for member in self.live_members(store) if not member.is_inference()]
                faces = [face for face, other in others if other is not None and other.counter is not value.counter]
                if faces:
                    yield value, faces

    def clear(self) -> None:
        for store in self.stores.values():
            store.members = _NOBODY
        for reference in self.inputs.values():
            if (value := reference()) is not None:
                value.tensor = _gone  # ``torch.utils.swap_tensors`` refuses tensors with weak references
        for table in (self.known, self.uninitialized, self.inputs, self.stores, self.shared):
            table.clear()


def _gone() -> None:
    """Takes the place of a weak reference."""


_NOBODY: Any = ()  # the members of each storage once the recording has ended
#: The storage of dropped values once the recording has ended: reports then only ask whether a value was kept or dropped.
_MADE = new_store(0, 0)


def slim(handles: Iterable[weakref.ref[Any]]) -> None:
    """Drops attributes of saved values that only the recording needs: two fifths of their bytes."""
    for reference in handles:
        if (handle := reference()) is not None:
            value = handle.value
            store = value.store
            if not (store.external or store.written or store.held or value.before):
                value.store = value.counter = _MADE
                value.tensor = _gone


_AS_STRIDED = torch.ops.aten.as_strided.default


def counter_in(tables: Tables, store: Store, tensor: torch.Tensor) -> object:
    """Returns the version counter of a tensor, taken from another tensor in the storage that shares it."""
    for member in tables.live_members(store):
        value = tables.value_now(member)
        if value is not None and share_counter(tensor, member):
            return value.counter
    return tables.another_counter(store)


def counter_of(tables: Tables, tensor: torch.Tensor) -> object:
    value = tables.value_now(tensor)
    return counter_in(tables, tables.store_of(tensor), tensor) if value is None else value.counter


def alias_of(tables: Tables, store: Store, tensor: torch.Tensor, surroundings: Surroundings) -> Value | None:
    """Returns a value for an unknown tensor in a storage, as a view of a known tensor there; None if there is no fit."""
    if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return None
    if type(tensor) not in PLAIN_OR_FAKE and handles_operators(tensor):  # a plain view would bypass the class
        return None
    for member in tables.live_members(store):
        value = tables.known.get(id(member))
        if value is None or member.dtype is not tensor.dtype or member.is_conj() or member.is_neg() or member.is_inference():
            continue
        op = Op()
        tables.number = op.number = tables.number + 1
        op.facts, op.present, op.draw, op.surroundings = facts_of(_AS_STRIDED), (0,), None, surroundings
        op.call = op.facts.call
        op.args, op.kwargs = [value, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()], {}
        alias = new_value(op.number, store, counter_in(tables, store, tensor), op)
        tables.register(tensor, alias)
        return alias
    return None
