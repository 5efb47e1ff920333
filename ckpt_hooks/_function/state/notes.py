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
from operator import is_
from typing import Any, cast

import torch

from ckpt_hooks._core.threads import other_threads_run

from .container_contents import ATOMS, Content, Part, contents_kind_of, differs_in_notes_alone, likeness, new, same
from .tensor_note import GoneError, StandIns, TensorNote, Weak

__all__ = [
    "ABSENT",
    "Again",
    "Changes",
    "ContentNote",
    "Lent",
    "Root",
    "changes_of",
    "holds",
    "noted_in",
    "present",
]

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
        rows: list[list[Any]] | None = None
        if lent is not None and id(value) not in lent.before:  # else it was looked at, and filled perhaps
            rows = []
            lent.before[id(value)] = value, rows
        for part, base, noted, inner in self.parts:
            now = part.read(value, base)
            if now is None or len(now) != len(noted):
                return False
            if rows is not None:
                rows.append([part, base, now, now])
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

    def compare(self, value: Any, changes: Changes) -> None:
        """Notes the changes of the object, and of objects inside, since the note was taken."""
        for part, base, noted, inner in self.parts:
            now: Any = part.read(value, base)
            if now is None:
                changes[id(value), id(part)] = None
                continue
            is_keyed, before = type(noted) is dict, cast("Any", noted)
            if len(now) == len(noted) and differs_in_notes_alone(part, noted, now, inner):
                keys, values = (list(now), list(now.values())) if is_keyed else ((), now)
                changed = [at for at, one in inner if not _is_as(one, values[at], changes)]
                if changed:
                    changes[id(value), id(part)] = {keys[at] for at in changed} if is_keyed else None
                    _compare_moved([one for at, one in inner if at in changed], values, changes)
            elif is_keyed:
                missing = {
                    key for key in {**before, **now} if not _is_as(before.get(key, ABSENT), now.get(key, ABSENT), changes)
                }
                changes[id(value), id(part)] = missing  # or of another order
                _compare_moved([before[key] for key in missing if key in before], now.values(), changes)
            else:
                as_noted = [_is_as(one, two, changes) for one, two in zip(noted, now, strict=False)]
                is_longer = len(now) > len(noted) and all(as_noted)
                changes[id(value), id(part)] = list(map(likeness, now[len(noted) :])) if is_longer else None
                _compare_moved(() if is_longer else noted, now, changes)

    def fill(self, value: Any, lent: Lent, *, is_new: bool = False) -> None:
        """Gives the object the noted content, in place."""
        lent.made[self._identity] = value
        for part, base, noted, _ in self.parts:
            now = part.read(value, base)
            if now is None:  # of a long container, whose first entries are unknown
                continue
            lent.meet(now)
            content = lent.contents(noted, now)
            row = None if is_new else lent.keep(value, part, base, now, content)
            if not same(now, content):
                others = part.put(value, base, now, content, keep=lent._others)
                if row is not None and others:
                    row[2], row[3] = [*row[2], *others], [*row[3], *others]

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


def _is_as(noted: Any, value: Any, changes: Changes) -> bool:
    """Whether a value is surely the noted one; notes changes of the value's content."""
    if type(noted) is not ContentNote:
        return holds(noted, value)
    if not noted.is_of(value):
        return False
    noted.compare(value, changes)
    # A list which differs may be another one, at the place in memory of a list that forward dropped.
    return noted._reference is not None or not any((id(value), id(part)) in changes for part, *_ in noted.parts)


def _compare_moved(notes: Iterable[Any], values: Iterable[Any], changes: Changes) -> None:
    """Notes the changes of entries that are at other places now; an entry at no place may have changed in any way."""
    for noted in notes:
        if type(noted) is ContentNote:
            found = next(filter(noted.is_of, values), None)
            if found is not None:
                noted.compare(found, changes)
                continue
            for one in noted_in((noted,)):
                if type(one) is ContentNote:
                    changes.update(((one._identity, id(part)), None) for part, *_ in one.parts)


#: Containers and objects by which a function reaches others, and their notes.
Root = tuple[Any, ContentNote]
#: Changes by a forward, by the ``id`` of an object and of its part: of names and keys, which; of a list, the likenesses of the
#: entries added; else None.
Changes = dict[tuple[int, int], "set[Any] | list[Any] | None"]


def changes_of(roots: Sequence[Root]) -> Changes:
    """Returns the changes since containers and objects were noted."""
    changes: Changes = {}
    for value, noted in roots:
        noted.compare(value, changes)
    return changes


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
        before: Containers and objects by ``id``, and of each part: the part; the number of entries that are not looked at;
            the content before the rerun; the content lent.
        changed: Tensors with a history which were written to since, with their noted versions.
        is_settled: Whether the rerun has run to its end, or was stopped where :meth:`is_explained`.
        made: The containers and objects of the rerun, by the ``id`` of the noted ones.
        met: Present containers, by ``id``.
        stand_ins: Arguments of the rerun which differ from the tensors of forward.
    """

    __slots__ = ("_others", "before", "changed", "is_settled", "made", "met", "stand_ins")

    def __init__(self, stand_ins: StandIns) -> None:
        self.before: dict[int, tuple[Any, list[list[Any]]]] = {}
        self.changed: list[tuple[torch.Tensor, int]] = []
        self.made: dict[int, Any] = {}
        self.met: dict[int, Any] = {}
        self.stand_ins = stand_ins
        self.is_settled = False
        self._others = other_threads_run()

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

    def keep(self, value: Any, part: Part, base: int, now: Content, content: Content) -> list[Any]:
        """Notes the content of a part before another content replaces it; returns the row of the part."""
        rows = self.before.setdefault(id(value), (value, []))[1]
        row = next((row for row in rows if row[0] is part), None)
        if row is None:
            rows.append(row := [part, base, now, content])
        elif self._others:  # since the row was made, by the look of :meth:`ContentNote.holds` perhaps
            row[2] = _with_others(row[2], row[3], now, ())
        row[3] = content
        return row

    def _differences(self, changes: Changes | None) -> Iterator[tuple[Any, list[Any], Any, Any]]:
        """Yields each container or object to restore, the row of the part, the present content, and that without the rerun."""
        for value, rows in self.before.values():
            for row in rows:
                part, base, before, lent = row
                now = part.read(value, base)
                if now is not None and not same(now, before):
                    self._others = self._others or other_threads_run()
                    if changes is not None and self._others and not same(now, lent):
                        own = changes.get((id(value), id(part)), ())
                        yield value, row, now, _with_others(before, lent, now, own)
                    else:
                        yield value, row, now, before

    def is_explained(self, changes: Changes | None) -> bool:
        """Whether a rerun may stop: it has left nothing but what forward changed as well."""
        # A place may hold what forward set and set back later, or what another thread has put there. The end of the rerun
        # alone tells which.
        self.is_settled = all(content is row[2] for _, row, _, content in self._differences(changes))
        return self.is_settled

    def restore(self, changes: Changes | None) -> None:
        """Restores the contents from before, with what other threads have changed where forward changed nothing of the like.

        Args:
            changes: The changes by forward; None if all changes are those of the rerun.
        """
        for value, (part, base, *_), now, content in self._differences(changes if self.is_settled else None):
            if content is not now:
                part.put(value, base, now, content, keep=self._others)


def _with_others(before: Any, lent: Any, now: Any, own: Any) -> Content:
    """Returns the content from before a rerun, with the changes of other threads; ``before`` itself if there are none.

    Args:
        before: The content from before.
        lent: The content lent to the rerun.
        now: The content after the rerun.
        own: The changes by forward, which the rerun made as well.
    """
    if own is None:
        return before  # type: ignore[no-any-return]
    if type(before) is dict:
        changed = {key: one for key, one in now.items() if key not in own and lent.get(key, ABSENT) is not one}
        missing = [key for key in lent if key not in now and key not in own and key in before]
        if not changed and not missing:
            return before
        found = {**before, **changed}
        for key in missing:
            del found[key]
        return found
    if not own and same(before, lent):
        return now  # type: ignore[no-any-return]
    if len(now) < len(lent) or not all(map(is_, lent, now)):
        return before  # type: ignore[no-any-return]
    added, expected = [], list(own)
    for one in now[len(lent) :]:
        found = likeness(one)
        if found in expected:
            expected.remove(found)
        else:
            added.append(one)
    return [*before, *added] if added else before


def noted_in(notes: Sequence[Any]) -> Iterator[Any]:
    """Yields notes, and the notes of contents inside."""
    for noted in notes:
        yield noted
        if type(noted) is ContentNote:
            for *_, inner in noted.parts:
                yield from noted_in([one for _, one in inner])
