"""The parts of a tape: operators, the values they made, and the storages of these values.

A tape has no list of its parts. A handle in autograd's graph owns a value, a value the operator of its making, and an operator
the values read. So values on which no live handle depends are gone, by reference counting alone (Rule 17), and there is no list
to prune. While a region is open, a value is also owned by its tensor, through a table.

Writes meet in a storage: a write through one view changes all views. So a write makes a new value of every live tensor in the
storage: the old value, after the operator. A value is thus a tensor at a moment, and a read refers to the value of its moment
(Rule 15).
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.holdings import Cause, Reason
from ckpt_hooks._operators.facts import OpFacts
from ckpt_hooks._tensors.held_tensors import HeldTensor
from ckpt_hooks._torch.tensors import storage_of


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
    birth: int  # the number of the operator which made the storage; 0 for a storage from outside
    external: bool  # whether the contents come from outside: tensors in the storage are kept, not brought back
    uninitialized: bool  # whether the storage is uninitialised
    written: bool  # whether an operator on the tape wrote to the storage
    members: list[weakref.ref[torch.Tensor]]  # the tensors in the storage seen by the tape, weakly
    handles: list[weakref.ref[Any]] | None  # the handles of tensors in the storage, or None
    held: list[weakref.ref[Value]] | None  # the values in the storage whose tensor is kept, or None
    cause: Cause  # the reason for holding tensors in the storage; unset for a storage made by an operator on the tape

    def is_alive(self) -> bool:
        """Whether a known tensor is still in the storage: then no other storage has the address."""
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


_FROM_OUTSIDE = Cause(Reason.INPUT)

#: Stands for the state that an operator drew from, where a replay is to draw what comes next.
ANEW: Any = object()


class Op:
    """An operator on the tape."""

    __slots__ = ("args", "draw", "facts", "is_plain", "kwargs", "number", "present", "routed", "surroundings")

    number: int  # the place on the tape, and the number of the first result
    facts: OpFacts  # the facts of the operator
    args: list[Any]  # positional arguments, with values in place of tensors
    kwargs: dict[str, Any]  # keyword arguments, likewise
    present: tuple[int, ...]  # the positions of values among the positional arguments
    routed: Any  # a note on the results of a routing operator (:mod:`.other_shapes`); unset for others
    draw: Any  # the state of the generator before the draw, :data:`ANEW`, or None
    surroundings: Any  # the surroundings of the operator
    is_plain: bool  # whether a plain call will do: all tensors are in ``present``


class Value:
    """A tensor at a moment.

    There are three kinds. A result is an output of an operator (``op``). A value after a write is what another one
    (``before``) has become by an operator (``op``). An input has neither; it is kept.
    """

    __slots__ = ("__weakref__", "before", "counter", "number", "op", "saved", "store", "tensor")

    number: int  # larger than that of any value that existed when this one came to be
    op: Op | None  # what made it; None for an input
    before: Value | None  # what it was before ``op`` wrote to it; None for one that ``op`` returned
    store: Store  # the storage that it is in
    # Stands for its version counter: the same object for all tensors that have a version in common. One storage may have
    # several: of ``tensor.data``, of parts by ``unsafe_chunk`` (tests/behaviours/test_region_writes.py: ``FACES``).
    counter: object
    saved: HeldTensor | None  # the tensor, where it is kept
    tensor: Callable[[], torch.Tensor | None]  # the tensor that it belongs to, as long as that is alive


def new_store(address: int, birth: int) -> Store:
    """Returns a storage. Code which runs for each operator has this written out instead."""
    store = Store()
    store.address, store.birth, store.cause = address, birth, _FROM_OUTSIDE
    store.external = store.uninitialized = store.written = False
    store.members = []
    store.handles = store.held = None
    return store


def new_value(number: int, store: Store, counter: object, op: Op | None = None, before: Value | None = None) -> Value:
    """Returns a value without a tensor yet. Code which runs for each operator has this written out instead."""
    value = Value()
    value.number, value.op, value.before = number, op, before
    value.store, value.counter, value.saved = store, counter, None
    return value


def _holders(reference: weakref.ref[Any]) -> int:
    held = reference()
    return sys.getrefcount(held)


_probe = Value()
# How many holders ``_holders`` counts of a value that has one.
_ONE_HOLDER = _holders(weakref.ref(_probe))


def is_held_twice(reference: weakref.ref[Value], holders: int = 1) -> bool:
    """Whether a value has other holders (operators that read it, handles) than some, of which the caller is none."""
    return _holders(reference) > _ONE_HOLDER - 1 + holders


def cut(op: Op, made: list[Value]) -> None:
    """Drops an operator's arguments if all results are kept, since no replay will run the operator."""
    if all(value.saved is not None for value in made):
        op.args, op.kwargs, op.present, op.draw = [], {}, (), None


def flatten(outputs: Any) -> list[Any]:
    """Returns the outputs of an operator in one list, in order: tensors and others."""
    if isinstance(outputs, (list, tuple)):
        return list(itertools.chain.from_iterable(map(flatten, outputs)))
    return [outputs]


def values_on_tape(argument: Any) -> list[Value]:
    """Returns the values in an argument of an :class:`Op`."""
    if type(argument) is Value:
        return [argument]
    if type(argument) is list:
        return [value for value in argument if type(value) is Value]
    return []


def values_below(values: list[Value]) -> list[Value]:
    """Returns the given values and all values below, each once."""
    todo, found = list(values), {}
    while todo:
        value = todo.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if value.before is not None:
            todo.append(value.before)
        if (op := value.op) is not None:
            for argument in (*op.args, *op.kwargs.values()):
                if type(argument) is Value:
                    todo.append(argument)
                elif type(argument) is list:
                    todo += values_on_tape(argument)
    return list(found.values())


def rebuild(argument: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """Returns an argument of an :class:`Op` with tensors in place of values."""
    if type(argument) is Value:
        return tensors[argument.number]
    if type(argument) is list:
        return [tensors[value.number] if type(value) is Value else value for value in argument]
    return argument
