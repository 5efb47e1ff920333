"""Notes: what was bound to a name when forward began, for a rerun to find the same there.

Numbers, strings and the like are their own notes. A tensor, a container and an object of a user's class have a note each.
Other objects are known by identity: their content is their own business.

A note must not keep a graph alive, since the graph may own the frame with the note (Rule 9). Therefore a tensor is noted by a
weak reference and a detached alias, which shares memory and version counter. A list or dict is noted by its identity and its
entries: to hold the container itself would hold all its later entries. An object is referred to weakly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .container_contents import ATOMS, Content, Part, contents_kind_of, differs_in_notes_alone, new, same
from .tensor_note import GoneError, StandIns, TensorNote, Weak

#: Stands for the value of an unbound name.
ABSENT: Any = object()


class ContentNote:
    """A noted container or object: the identity, and notes of the content.

    Attributes:
        has_history: Whether a tensor with a history is inside.
        kind: The type.
        parts: For each part: the part; the number of entries that are not looked at; notes of the others; those of these notes
            that are not the values themselves, with their positions.
    """

    __slots__ = ("_identity", "_maxlen", "_reference", "has_history", "kind", "parts")

    parts: list[tuple[Part, int, Content, list[tuple[int, Any]]]]

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self._identity = id(value)
        self._maxlen = value.maxlen if isinstance(value, deque) else None
        self.has_history = False
        self.parts = []
        try:
            self._reference: Weak | None = Weak(value)
        except TypeError:  # a list, say
            self._reference = None

    def is_of(self, value: Any) -> bool:
        """Whether a value is the noted container or object."""
        if self._reference is not None:
            return value is not None and self._reference() is value
        return id(value) == self._identity and type(value) is self.kind

    def holds(self, value: Any, lent: Lent | None = None) -> bool:
        """Whether a value is the noted container or object, with the noted content.

        Args:
            value: The value.
            lent: Notes the contents that were read, if given.
        """
        if not self.is_of(value):
            return False
        rows: list[Row] | None = None
        if lent is not None and id(value) not in lent.before:  # else it was looked at, and filled perhaps
            rows = []
            lent.before[id(value)] = value, rows
        for part, base, noted, inner in self.parts:
            now = part.read(value, base)
            if now is None or len(now) != len(noted):
                return False
            if rows is not None:
                rows.append((part, base, now))
            if not differs_in_notes_alone(part, noted, now, inner):
                return False
            values = now if type(now) is list else list(now.values())  # type: ignore[union-attr]
            for at, one in inner:
                if not holds(one, values[at], lent):
                    return False
        return True

    def identities(self) -> Iterator[int]:
        """Yields the ``id`` of the noted container or object, and of those inside."""
        return (one._identity for one in noted_in((self,)) if type(one) is ContentNote)

    def fill(self, value: Any, lent: Lent, *, is_new: bool = False) -> None:
        """Gives the object the noted content, in place."""
        lent.made[self._identity] = value
        for part, base, noted, _ in self.parts:
            now = part.read(value, base)
            if now is None:  # of a long container, whose first entries are unknown
                continue
            lent.meet(now)
            content = lent.contents(noted, now)
            if not is_new:
                lent.keep(value, part, base, now)
            if not same(now, content):
                part.put(value, base, now, content)

    def present(self, lent: Lent) -> Any:
        """Returns the object to bind in a rerun, with the noted content; a new object if the noted object is gone.

        Raises:
            GoneError: If a noted entry of an immutable container is gone, or a long container.
        """
        if self._identity in lent.made:
            return lent.made[self._identity]
        now = lent.met.get(self._identity) if self._reference is None else self._reference()
        if type(now) is not self.kind:
            now = None
        parts, is_mutable = contents_kind_of(self.kind)
        if len(self.parts) < len(parts) or any(base for _, base, *_ in self.parts):  # a long one, of which not all is known
            if now is None:
                raise GoneError
            self.fill(now, lent)
            return now
        if not is_mutable:
            noted = self.parts[0][2]
            content: Any = [present(one, lent) for one in noted]
            before = None if now is None else self.parts[0][0].read(now, 0)
            if before is None or not same(before, content):
                kind = self.kind
                # torch's named results take one sequence; tuples of other kinds may have constructors of their own.
                if hasattr(kind, "n_sequence_fields"):
                    now = kind(content)
                else:
                    now = frozenset.__new__(kind, content) if issubclass(kind, frozenset) else tuple.__new__(kind, content)
            self.fill(now, lent, is_new=before is None)
            return now
        if now is not None:
            self.fill(now, lent)
            return now
        now = new(self.kind, self._maxlen)
        self.fill(now, lent, is_new=True)
        return now


#: A part of a container or object, the number of its entries that are not looked at, and the content of the others.
Row = tuple[Part, int, Content]
#: Containers and objects by which a function reaches others, and their notes.
Root = tuple[Any, ContentNote]


class Again:
    """Notes the second place of a container or object that is noted elsewhere; a list may be in itself."""

    __slots__ = ("note",)

    def __init__(self, note: ContentNote) -> None:
        self.note = note


def holds(noted: Any, value: Any, lent: Lent | None = None) -> bool:
    """Whether a value is the noted one; see :meth:`ContentNote.holds`."""
    kind = type(noted)
    if kind is TensorNote or kind is Weak:
        return bool(noted.holds(value))
    if kind is ContentNote:
        return bool(noted.holds(value, lent))
    return noted.note.is_of(value) if kind is Again else noted is value


def present(noted: Any, lent: Lent) -> Any:
    """Returns the value to bind in a rerun.

    Raises:
        GoneError: If it is gone for good.
    """
    if type(noted) is Again:
        noted = noted.note
    return noted.present(lent) if type(noted) in (TensorNote, ContentNote, Weak) else noted


class Lent:
    """Contents lent to one rerun, and the contents from before.

    Attributes:
        before: Containers and objects by ``id``, with their parts before the rerun.
        changed: Tensors with a history which were written to since, with their noted versions.
        made: The containers and objects of the rerun, by the ``id`` of the noted ones.
        met: Present containers, by ``id``.
        stand_ins: Arguments of the rerun which differ from the tensors of forward.
    """

    __slots__ = ("before", "changed", "made", "met", "stand_ins")

    def __init__(self, stand_ins: StandIns) -> None:
        self.before: dict[int, tuple[Any, list[Row]]] = {}
        self.changed: list[tuple[torch.Tensor, int]] = []
        self.made: dict[int, Any] = {}
        self.met: dict[int, Any] = {}
        self.stand_ins = stand_ins

    def meet(self, content: Content) -> None:
        """Notes present containers, to be found by their ``id``."""
        for value in content.values() if type(content) is dict else content:
            if type(value) not in ATOMS:
                self.met[id(value)] = value

    def contents(self, noted: Content, now: Content) -> Content:
        """Returns the content to lend for a noted content; present values stay where the noted values are gone."""
        if type(noted) is not dict:
            try:
                return [present(one, self) for one in noted]
            except GoneError:
                return now
        found = {}
        for key, one in noted.items():
            try:
                found[key] = present(one, self)
            except GoneError:
                if key in now:
                    found[key] = now[key]
        return found

    def by_identity(self, identities: Iterable[int]) -> dict[int, Any]:
        """Returns the containers and objects of the rerun, by the ``id`` of the noted ones, which are noted whole."""
        found = {}
        for identity in identities:
            if identity in self.before:
                value, rows = self.before[identity]
                if rows and not any(base for _, base, *_ in rows):
                    found[identity] = value
            elif identity in self.made:
                found[identity] = self.made[identity]
        return found

    def keep(self, value: Any, part: Part, base: int, now: Content) -> None:
        """Notes the content of a part before another content replaces it."""
        rows = self.before.setdefault(id(value), (value, []))[1]
        if all(row[0] is not part for row in rows):  # else :meth:`ContentNote.holds` has noted it
            rows.append((part, base, now))

    def restore(self) -> None:
        """Restores the contents from before."""
        for value, rows in self.before.values():
            for part, base, before in rows:
                now = part.read(value, base)
                if now is not None and not same(now, before):
                    part.put(value, base, now, before)


def noted_in(notes: Sequence[Any]) -> Iterator[Any]:
    """Yields notes, and the notes of contents inside."""
    for noted in notes:
        yield noted
        if type(noted) is ContentNote:
            for *_, inner in noted.parts:
                yield from noted_in([one for _, one in inner])
