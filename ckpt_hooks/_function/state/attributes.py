"""Attributes of modules: noted when a forward begins, put back for each rerun, and restored after the rerun.

One rule: in a rerun a module has the attributes found by forward; afterwards it has the attributes from before the rerun. So
``self.step += 1``, a hidden state bound anew, a growing list, a cache, and ``model.eval()`` before backward are right.

The rule covers ``training``, buffers, and every other entry of ``vars(module)``, with the content of containers and objects
(:mod:`.notes`). It does not cover parameters and hooks.

Submodules, parameters and buffers added by forward are taken out for the rerun. So the function makes them again, out of the
same random numbers, and in the end those of forward are there. A parameter that was None is None again.

Modules of torch's own frameworks are left alone: DDP and its like note the progress of a step in attributes, which a rerun must
not undo.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.nn import Module

from .container_contents import ATOMS, is_atom, same
from .notes import ABSENT, ContentNote, Lent, holds, noted_in, present
from .reached_values import Walk
from .tensor_note import GoneError, TensorNote

#: What a module consists of; ``training`` is an attribute like others.
MACHINERY = frozenset(vars(Module())) - {"training"}

#: Attributes of every module that are dicts of what it consists of.
_PARTS = ("_buffers", "_modules", "_parameters")

#: Where torch's own wrappers of modules are defined.
_FRAMEWORKS = ("torch.distributed.", "torch._dynamo.", "torch.nn.parallel.", "torch._inductor.")
#: Where classes are that FSDP makes out of a user's.
_MADE_FROM_USERS = "torch.distributed.fsdp._fully_shard"


class ModuleNote:
    """The noted attributes of one module.

    Attributes:
        flat: Weak references to tensors and buffers; empty if not flat.
        functions: Functions among the attributes, and in containers and objects there.
        generators: Random generators there.
        get: Returns the values of numbers and the like, out of ``vars(module)``.
        get_tensors: Returns tensors other than buffers, as ``get`` does; None if there are none.
        is_flat: Whether all attributes and buffers are numbers and the like, or tensors that require no grad.
        is_simple: Whether all attributes are numbers and the like.
        module: Refers to the module weakly.
        modules: The ``id`` of each module among the attributes, and in containers and objects there.
        size: The number of entries of ``vars(module)``.
        tensors: Notes of tensors among the attributes, and in containers and objects there.
        values: The result of ``get``.
    """

    __slots__ = (
        "_names",
        "_noted",
        "_parts",
        "flat",
        "functions",
        "generators",
        "get",
        "get_tensors",
        "is_flat",
        "is_simple",
        "module",
        "modules",
        "size",
        "tensors",
        "values",
    )

    def __init__(self, module: Module) -> None:
        own = vars(module)
        self.module = weakref.ref(module)
        self.size = len(own)
        walk = Walk(of_module=True)
        notes = {name: walk.note_attribute(value) for name, value in list(own.items()) if name not in MACHINERY}
        simple = [name for name, noted in notes.items() if noted is own[name]]
        self._noted = {name: noted for name, noted in notes.items() if noted is not own[name]}
        others = list(self._noted)
        if own["_buffers"]:
            self._noted["_buffers"] = walk.note(own["_buffers"])
        self._names = tuple(simple)
        self.get = _getter(simple)
        self.values = self.get(own)
        self.is_simple = not self._noted
        self.get_tensors = _getter(others) if others else None
        #: Twice the first of the tensors that are no buffers, as what gets them does.
        flat = [self._noted[name] for name in (*others, *others[:1])]
        if "_buffers" in self._noted:
            flat += self._noted["_buffers"].parts[0][2].values()
        self.is_flat = all(type(one) is TensorNote and not one.requires_grad for one in flat)
        self.flat = [one.reference for one in flat] if self.is_flat else []
        self.tensors = tuple(one for one in noted_in(list(self._noted.values())) if type(one) is TensorNote)
        self.functions = list(map(weakref.ref, walk.functions))
        self.generators = list(map(_reference_to, walk.generators))
        self.modules = list(map(id, walk.modules))
        self._parts = _parts_in(own)

    def holds(self, own: dict[str, Any], lent: Lent | None = None) -> bool:
        """Whether a module still has the noted attributes.

        Args:
            own: ``vars`` of the module.
            lent: Notes the contents that were read, if given.
        """
        try:
            return (
                len(own) == self.size
                and all(map(is_, self.get(own), self.values))
                and (self.is_simple or all(holds(noted, own[name], lent) for name, noted in self._noted.items()))
            )
        except KeyError:
            return False

    def has_tensors(self, expected: tuple[Any, ...]) -> bool:
        """Whether the module has these tensors, in the order of ``flat``; raises ``AttributeError`` if the module is gone."""
        own = self.module().__dict__
        found = tuple(own["_buffers"].values())
        if self.get_tensors is not None:
            found = (*self.get_tensors(own), *found)
        return len(found) == len(expected) and all(map(is_, found, expected))

    def has_parts_of(self, own: dict[str, Any]) -> bool:
        """Whether a module still has the submodules, parameters and buffers, by name."""
        return _parts_in(own) == self._parts

    def with_values(self, own: dict[str, Any]) -> ModuleNote | None:
        """Returns a note which differs in numbers and the like alone; None if more has changed."""
        try:
            values = self.get(own)
            if len(own) != self.size or not all(map(is_atom, values)):
                return None
            if not (self.is_simple or all(holds(noted, own[name]) for name, noted in self._noted.items())):
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

    def take_parts_out(self, own: dict[str, Any], *, with_buffers: bool) -> bool:
        """Takes out submodules, parameters and buffers added since; returns whether there were any."""
        found = False
        for name_of_parts, noted in list(self._parts.items())[not with_buffers :]:
            parts = own[name_of_parts]
            if not parts.keys() <= noted.keys():
                for name in [name for name in parts if name not in noted and name not in self._noted]:
                    found = True
                    del parts[name]
            if True in noted.values() and name_of_parts != "_buffers":
                for name, is_none in noted.items():
                    if is_none and parts.get(name) is not None:
                        found, parts[name] = True, None
        return found

    def put_back(self, own: dict[str, Any], lent: Lent, *, with_buffers: bool) -> bool:
        """Binds the noted attributes of a module, and gives containers and objects the noted content.

        Args:
            own: ``vars`` of the module.
            lent: Notes the contents from before.
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
        lent.meet([own["_buffers"], *own.values()])
        for name, noted in self._noted.items():
            if name in own["_parameters"] or (name == "_buffers" and not with_buffers):
                continue  # the former where a framework gathers parameters: a tensor is one or the other
            with contextlib.suppress(GoneError):
                own[name] = present(noted, lent)
        guards = self.take_parts_out(own, with_buffers=with_buffers) or guards
        known = {*MACHINERY, *self._noted, *self._names, *itertools.chain(*self._parts.values())}
        for name in [name for name in own if name not in known]:
            guards = True
            del own[name]
        return guards


def _parts_in(own: dict[str, Any]) -> dict[str, dict[str, bool]]:
    """Returns the names of buffers, submodules and parameters, and which of them are None."""
    return {name: {key: one is None for key, one in own[name].items()} for name in _PARTS}


def _flags_in(notes: Iterable[Any]) -> Iterator[Any]:
    """Yields the flags and the like among values and notes; of a number, which may count steps, whether it is zero."""
    for noted in notes:
        kind = type(noted)
        if kind is ContentNote:
            if noted.kind.__module__ in ("builtins", "collections"):  # not an object of a user's, such as a cache
                for _, _, content, _ in noted.parts:
                    yield from _flags_in(content.values() if type(content) is dict else content)
        elif kind in (int, float):
            yield (noted == 0,)
        elif kind in ATOMS:
            yield noted


def _reference_to(generator: torch.Generator) -> Callable[[], torch.Generator | None]:
    """Returns a weak reference to a generator; before torch 2.12 generators take none, and the module holds it anyway."""
    try:
        return weakref.ref(generator)
    except TypeError:
        return lambda: generator


_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")


def _no_values(own: dict[str, Any]) -> tuple[Any, ...]:
    return ()


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Returns a function which gets the values of names, the first twice: ``itemgetter`` returns no tuple for a single name."""
    return itemgetter(*names, names[0]) if names else _no_values


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
        self.notes = notes
        self.tensors = [note.tensors for note in notes if note.tensors]
        self._size = sum(note.size for note in notes)
        self._rows = [(note.module, note.get) for note in notes]
        self._values = [value for note in notes for value in note.values]
        self._are_flat = all(note.is_flat for note in notes)
        self._flat = [note for note in notes if note.flat] if self._are_flat else []

    def simply_hold(self) -> Any:
        """Returns the tensors if all attributes can be compared by identity and are as noted; else None."""
        # A third of a microsecond for each module. The general comparison takes several times as long.
        if not self._are_flat:
            return None
        found: list[Any] = []
        size, extend = 0, found.extend
        try:
            for module, get in self._rows:
                own = module().__dict__
                size += len(own)
                extend(get(own))
            if size != self._size or not all(map(is_, found, self._values)):
                return None
            expected = [tuple([reference() for reference in note.flat]) for note in self._flat]
            if all(map(ModuleNote.has_tensors, self._flat, expected)) and not any(
                map(_requires_grad, itertools.chain.from_iterable(expected))
            ):
                return expected
        except (AttributeError, KeyError):  # of a module that is gone, an attribute that is
            pass
        return None

    def hold(self) -> bool:
        """Whether all modules have the noted attributes."""
        if self._are_flat:
            return self.simply_hold() is not None
        return all((module := note.module()) is not None and note.holds(module.__dict__) for note in self.notes)


class AttributesUndo:
    """Attributes of modules lent to one rerun.

    Attributes:
        lent: The contents of containers and objects that are lent.
        may_initialise: Whether the function may initialise something once more, since a flag or the like was put back.
    """

    __slots__ = ("_before", "_notes", "_same", "_tensors", "_with_buffers", "lent", "may_initialise")

    def __init__(self, lent: Lent, *, with_buffers: bool) -> None:
        self.lent, self._with_buffers = lent, with_buffers
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._same: list[tuple[ModuleNote, dict[str, Any]]] = []
        self._notes: AttributeNotes | None = None
        self._tensors: Any = None  # held, for a rerun may drop the last other reference
        self.may_initialise = False

    def put_back(self, notes: AttributeNotes, *, has_new_parts: bool) -> None:
        """Binds the noted attributes of modules.

        Args:
            notes: The notes of the modules.
            has_new_parts: Whether submodules or parameters may have been added since.
        """
        if not has_new_parts and (tensors := notes.simply_hold()) is not None:
            self._notes, self._tensors = notes, tensors
            return
        for note in notes.notes:
            module = note.module()
            if module is None:
                continue
            own = module.__dict__
            self._before.append((own, own.copy()))
            if note.holds(own, self.lent) and not (has_new_parts and not note.has_parts_of(own)):
                self._same.append((note, own))
                continue
            self._before += [(own[name], own[name].copy()) for name in _PARTS[not self._with_buffers :]]
            if note.put_back(own, self.lent, with_buffers=self._with_buffers):
                self.may_initialise = True

    def restore(self) -> None:
        """Restores the attributes from before the rerun."""
        if self._notes is not None:
            if self._notes.simply_hold() is None:
                for note in self._notes.notes:
                    if (module := note.module()) is not None:
                        note.put_back(module.__dict__, self.lent, with_buffers=self._with_buffers)
            return
        for note, own in self._same:
            note.take_parts_out(own, with_buffers=self._with_buffers)
        for own, before in reversed(self._before):
            if same(own, before):
                continue
            for name in [name for name in own if name not in before and name not in MACHINERY]:
                del own[name]
            for name, value in before.items():
                if own.get(name, ABSENT) is not value and name not in MACHINERY:
                    own[name] = value
