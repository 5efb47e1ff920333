"""Tables of the tensors and storages known to a tape while a region is open.

The tables go by the identity of tensors. An entry goes when the tensor dies, so a found identity is never a dead tensor's. An
entry owns the value, and thus the history of a live tensor. Tensors from outside are not owned by a table, but by the operators
which read them, as long as these may be needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial

import torch

from ckpt_hooks._core.holdings import Cause, Reason
from ckpt_hooks._tensors.held_tensors import HeldTensor
from ckpt_hooks._torch.tensors import storage_of

from .values import Store, Value, new_store

_weakref = weakref.ref


class Tables:
    """The tensors and storages of one tape."""

    __slots__ = ("inputs", "known", "number", "shared", "stores", "uninitialized")

    def __init__(self) -> None:
        self.number = 0  # the number of the latest value or operator
        self.shared: list[Store] = []  # storages with tensors that count writes apart
        self.known: dict[int, Value] = {}  # values of tensors on the tape, by identity of the tensor
        self.uninitialized: dict[int, Value] = {}  # the same for uninitialised tensors
        self.inputs: dict[int, weakref.ref[Value]] = {}  # values of tensors from outside, by identity
        self.stores: dict[int, Store] = {}  # storages, by address

    def another_counter(self, store: Store) -> object:
        """Returns what stands for one more version counter of a storage."""
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
        """Whether there is a known live storage at an address."""
        store = self.stores.get(address)
        return store is not None and store.is_alive()

    def external_store(self, address: int | None) -> Store:
        """Returns a new outside storage at ``address``, which is None for a tensor without a storage so far."""
        store = new_store(address or 0, 0)
        store.external = True
        if address is not None:
            self.stores[address] = store
        return store

    def make_external(self, store: Store, detail: str) -> None:
        """Makes a storage, which cannot be replayed, an outside storage: from now on its tensors are kept where needed."""
        if not store.external:
            store.external = True
            store.uninitialized = False
            self.forget_members(store)
        store.cause = Cause(Reason.NOT_REPLAYED, detail)

    def forget_members(self, store: Store) -> None:
        """Forgets the tensors in a storage."""
        for tensor in self.live_members(store):
            key = id(tensor)
            self.known.pop(key, None)
            self.uninitialized.pop(key, None)
            self.inputs.pop(key, None)

    def value_now(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value of a tensor, if known."""
        return self.known.get(id(tensor)) or self.uninitialized.get(id(tensor)) or self.input(tensor)

    def input(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value which keeps a tensor as it is now, if there is one."""
        reference = self.inputs.get(id(tensor))
        value = None if reference is None else reference()
        return value if value is not None and value.saved is not None and value.saved.tensor is tensor else None

    def store_of(self, tensor: torch.Tensor) -> Store:
        """Returns the storage of a tensor; an outside storage, if unknown to the tape."""
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
        """Yields values kept as they are of whose memory living tensors count writes apart, with these tensors."""
        for store in self.shared:
            for reference in store.held or ():
                value = reference()
                if value is None or type(value.saved) is not HeldTensor or not value.saved.is_in(store.address):
                    continue
                others = [(one, self.value_now(one)) for one in self.live_members(store) if not one.is_inference()]
                faces = [one for one, other in others if other is not None and other.counter is not value.counter]
                if faces:
                    yield value, faces

    def clear(self) -> None:
        """Forgets everything, at the end of a region."""
        for store in self.stores.values():
            store.members = []
        for reference in self.inputs.values():
            if (value := reference()) is not None:
                value.tensor = _gone  # ``torch.utils.swap_tensors`` refuses tensors with weak references
        for table in (self.known, self.uninitialized, self.inputs, self.stores, self.shared):
            table.clear()


def _gone() -> None:
    """Takes the place of a weak reference."""
