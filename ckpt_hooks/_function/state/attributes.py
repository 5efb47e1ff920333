"""Attributes of modules: noted when a forward begins, put back for each rerun, and restored after the rerun.

One rule: in a rerun a module has the attributes found by forward; afterwards it has the attributes from before the rerun. So
``self.step += 1``, a hidden state bound anew, a growing list, and ``model.eval()`` before backward are right.

The rule covers ``training``, buffers, and every other entry of ``vars(module)`` which is a number, a string, None, a tensor, or
a plain container of these (:mod:`.noted_values`). It does not cover parameters, hooks and objects of other classes.

Submodules and parameters added by forward are taken out for the rerun. So the function makes them again, out of the same random
numbers, and in the end the submodules and parameters of forward are there.

Modules of torch's own frameworks are left alone: DDP and its like note the progress of a step in attributes, which a rerun must
not undo. The attributes of one rerun are in :mod:`.lent_attributes`.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch.nn import Module

from .noted_values import (
    ABSENT,
    Complain,
    ContainerNote,
    GoneError,
    PutBack,
    TensorNote,
    containers_in,
    has_note,
    is_atom,
    note_of,
)

__all__ = ["MACHINERY", "PARTS", "AttributeNotes", "ModuleNote", "containers_of", "note_module"]

#: What a module consists of; ``training`` is an attribute like others.
MACHINERY = frozenset(vars(Module())) - {"training"}

#: Attributes of every module that are dicts of what it consists of.
PARTS = ("_buffers", "_modules", "_parameters")

#: Where torch's own wrappers of modules are defined.
_FRAMEWORKS = ("torch.distributed.", "torch._dynamo.", "torch.nn.parallel.", "torch._inductor.")
#: Where classes are that FSDP makes out of a user's.
_MADE_FROM_USERS = "torch.distributed.fsdp._fully_shard"


class ModuleNote:
    """The noted attributes of one module.

    Attributes:
        get: Returns the values of numbers and the like, out of ``vars(module)``.
        has_history: Whether a tensor with a history is among the attributes.
        flat: Weak references to tensors and buffers; empty if not flat.
        get_tensors: Returns tensors other than buffers, as ``get`` does; None if there are none.
        is_flat: Whether all attributes and buffers are numbers and the like, or tensors that require no grad.
        is_simple: Whether all attributes are numbers and the like.
        module: Refers to the module weakly.
        others: Names of objects without a note, and of containers with such objects.
        size: The number of entries of ``vars(module)``.
        tensors: Notes of tensors among the attributes, and in containers there.
        values: The result of ``get``.
    """

    __slots__ = (
        "_get_others",
        "_kinds",
        "_names",
        "_noted",
        "_objects",
        "_parts",
        "flat",
        "get",
        "get_tensors",
        "has_history",
        "is_flat",
        "is_simple",
        "module",
        "others",
        "size",
        "tensors",
        "values",
    )

    def __init__(self, module: Module) -> None:
        own = vars(module)
        self.module = weakref.ref(module)
        self.size = len(own)
        simple: list[str] = []
        objects: list[str] = []
        self._noted: dict[str, TensorNote | ContainerNote] = {}
        for name, value in list(own.items()):
            if name not in MACHINERY:
                noted = note_of(value)
                if noted is ABSENT:
                    objects.append(name)
                elif noted is value:
                    simple.append(name)
                else:
                    self._noted[name] = noted
        if own["_buffers"]:
            self._noted["_buffers"] = ContainerNote(own["_buffers"], 2)
        self._names = tuple(simple)
        self.get = _getter(simple)
        self.values = self.get(own)
        self._objects = objects
        self._get_others = _getter(objects)
        self._kinds = tuple(map(type, self._get_others(own)))
        self.others = [*objects, *(name for name, noted in self._noted.items() if _has_others(noted))]
        self.has_history = any(noted.has_history for noted in self._noted.values())
        self.is_simple = not self._noted and not objects
        buffers = self._noted.get("_buffers")
        others = [name for name in self._noted if name != "_buffers"]
        self.get_tensors = _getter(others) if others else None
        #: Twice the first of the tensors that are no buffers, as what gets them does.
        flat: list[Any] = [
            *(self._noted[name] for name in (*others, *others[:1])),
            *(buffers.entries if type(buffers) is ContainerNote else ()),
        ]
        self.is_flat = not (objects or self.others) and all(map(_is_flat, flat))
        self.flat = [one.reference for one in flat] if self.is_flat else []
        self.tensors = tuple(_tensors_in(self._noted.values()))
        self._parts = [frozenset(own[name]) for name in PARTS]

    def holds(self, own: dict[str, Any]) -> bool:
        """Whether a module still has the noted attributes.

        Args:
            own: ``vars`` of the module.
        """
        try:
            return (
                len(own) == self.size
                and all(map(is_, self.get(own), self.values))
                and (self.is_simple or self._rest_holds(own))
            )
        except KeyError:
            return False

    def _rest_holds(self, own: dict[str, Any]) -> bool:
        for name, noted in self._noted.items():
            if not noted.holds(own[name]):
                return False
        return tuple(map(type, self._get_others(own))) == self._kinds

    def has_tensors(self, expected: tuple[Any, ...]) -> bool:
        """Whether the module has these tensors, in the order of ``flat``; raises ``AttributeError`` if the module is gone."""
        own = self.module().__dict__
        found = tuple(own["_buffers"].values())
        if self.get_tensors is not None:
            found = (*self.get_tensors(own), *found)
        return len(found) == len(expected) and all(map(is_, found, expected))

    def has_parts_of(self, own: dict[str, Any]) -> bool:
        """Whether a module still has the submodules, parameters and buffers, by name."""
        return all(own[name].keys() == names for name, names in zip(PARTS, self._parts, strict=True))

    def with_values(self, own: dict[str, Any]) -> ModuleNote | None:
        """Returns a note which differs in numbers and the like alone; None if more has changed."""
        try:
            values = self.get(own)
            if len(own) != self.size or not self._rest_holds(own) or not all(map(is_atom, values)):
                return None
        except KeyError:
            return None
        other = ModuleNote.__new__(ModuleNote)
        for name in ModuleNote.__slots__:
            setattr(other, name, getattr(self, name))
        other.values = values
        return other

    def differs_in_flags(self, other: ModuleNote) -> bool:
        """Whether this differs from an earlier note in a part, a flag, a string or the like; of numbers, in which are zero."""
        return (self._names, self._parts, self._flags()) != (other._names, other._parts, other._flags())

    def _flags(self) -> list[Any]:
        return list(_flags_in((*self.values, *self._noted.values())))

    def objects_in(self, own: dict[str, Any]) -> Any:
        """Returns the objects to hold for :meth:`restore`, of which the note has weak references or nothing."""
        if self.is_simple:
            return None
        return self._get_others(own), [own[name] for name in self._noted], [note.reference() for note in self.tensors]

    def restore(self, own: dict[str, Any], objects: Any, complain: Complain, *, with_buffers: bool) -> None:
        """Undoes the changes of a rerun to a module which had the noted attributes before.

        Args:
            own: ``vars`` of the module.
            objects: The result of :meth:`objects_in` before the rerun.
            complain: As for :meth:`put_back`.
            with_buffers: Whether buffers are among the attributes.
        """
        others = () if objects is None else objects[0]
        if self.holds(own) and all(map(is_, self._get_others(own), others)):
            return
        self.put_back(own, complain, with_buffers=with_buffers)
        own.update(zip(self._objects, others, strict=False))
        known = {*MACHINERY, *self._noted, *self._names, *self._objects}
        for name in [name for name in own if name not in known]:
            del own[name]

    def put_back(self, own: dict[str, Any], complain: Complain, *, with_buffers: bool) -> bool:
        """Binds the noted attributes of a module, and fills its containers with the noted entries.

        Args:
            own: ``vars`` of the module.
            complain: Returns an error for a tensor with a history, written to since.
            with_buffers: Whether buffers are among the attributes.

        Returns:
            Whether a flag changed, a name was None or missing, or a part was taken out: the function may initialise something.
        """
        guards = False
        for name, value in zip(self._names, self.values, strict=False):
            now = own.get(name, ABSENT)
            if now is not value:
                guards = guards or (name != "training" and (value is None or type(value) is bool))
                own[name] = value
        back = PutBack(complain, {id(one): one for one in (own["_buffers"], *containers_of(own))})
        for name, noted in self._noted.items():
            if name in own["_parameters"] or (name == "_buffers" and not with_buffers):
                continue  # the former where a framework gathers parameters: a tensor is one or the other
            with contextlib.suppress(GoneError):
                own[name] = noted.present(back)
        for name_of_parts, names in zip(PARTS[1:], self._parts[1:], strict=True):
            parts = own[name_of_parts]
            for name in [name for name in parts if name not in names and name not in self._noted]:
                guards = True
                del parts[name]
        known = {*MACHINERY, *self._noted, *self._names, *self.others, *self._parts[1], *self._parts[2]}
        for name in [name for name, value in own.items() if name not in known and has_note(value)]:
            guards = True
            del own[name]
        return guards


def _flags_in(notes: Iterable[Any]) -> Iterator[Any]:
    """Yields the flags and the like among values and notes; of a number, which may count steps, whether it is zero."""
    for noted in notes:
        if type(noted) is ContainerNote:
            yield from _flags_in(noted.entries)
        elif type(noted) in (int, float):
            yield (noted == 0,)
        elif is_atom(noted):
            yield noted


def _tensors_in(notes: Iterable[Any]) -> Iterator[TensorNote]:
    for noted in notes:
        if type(noted) is TensorNote:
            yield noted
        elif type(noted) is ContainerNote:
            yield from _tensors_in(noted.entries)


_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")


def _is_flat(noted: Any) -> bool:
    """Whether a note is of a tensor that requires no grad."""
    return type(noted) is TensorNote and not noted.requires_grad


def _no_values(own: dict[str, Any]) -> tuple[Any, ...]:
    return ()


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Returns a function which gets the values of names, the first twice: ``itemgetter`` returns no tuple for a single name."""
    return itemgetter(*names, names[0]) if names else _no_values


def containers_of(own: dict[str, Any]) -> Iterator[Any]:
    """Yields the containers among the attributes of a module, and the containers inside."""
    for name, value in list(own.items()):
        if name not in MACHINERY:
            yield from containers_in(value)


def _has_others(noted: Any) -> bool:
    return type(noted) is ContainerNote and (bool(noted.others) or not noted.is_whole or any(map(_has_others, noted.entries)))


def note_module(module: Module) -> ModuleNote | None:
    """Returns a note of a module; None for a module of torch's frameworks, which is left alone."""
    frameworks = [base for base in type(module).__mro__ if f"{base.__module__}.".startswith(_FRAMEWORKS)]
    is_left_alone = any(not base.__module__.startswith(_MADE_FROM_USERS) for base in frameworks)
    return None if is_left_alone else ModuleNote(module)


class AttributeNotes:
    """The notes of several modules.

    Attributes:
        notes: The notes.
        tensors: The notes of tensors of each module that has some.
    """

    __slots__ = ("_are_flat", "_flat", "_rows", "_size", "_values", "notes", "tensors")

    def __init__(self, notes: Sequence[ModuleNote]) -> None:
        """Takes notes of modules."""
        self.notes = notes
        self.tensors = [note.tensors for note in notes if note.tensors]
        self._size = sum(note.size for note in notes)
        self._rows = [(note.module, note.get) for note in notes]
        self._values = [value for note in notes for value in note.values]
        self._are_flat = all(note.is_flat for note in notes)
        self._flat = [note for note in notes if note.flat] if self._are_flat else []

    def simply_hold(self) -> bool:
        """Whether attributes can be compared by identity, and are as noted: a third of a microsecond for each module."""
        if not self._are_flat:
            return False
        found: list[Any] = []
        size, extend = 0, found.extend
        try:
            for module, get in self._rows:
                own = module().__dict__
                size += len(own)
                extend(get(own))
            if size != self._size or not all(map(is_, found, self._values)):
                return False
            expected = [tuple([reference() for reference in note.flat]) for note in self._flat]
            return all(map(ModuleNote.has_tensors, self._flat, expected)) and not any(
                map(_requires_grad, itertools.chain.from_iterable(expected))
            )
        except (AttributeError, KeyError):  # of a module that is gone, an attribute that is
            return False

    def hold(self) -> bool:
        """Whether all modules have the noted attributes."""
        if self._are_flat:
            return self.simply_hold()
        return all((module := note.module()) is not None and note.holds(module.__dict__) for note in self.notes)
