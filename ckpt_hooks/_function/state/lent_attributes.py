"""Attributes of modules, put back for one rerun as forward found them, and restored after the rerun."""

from __future__ import annotations

from typing import Any

from .attributes import MACHINERY, PARTS, AttributeNotes, ModuleNote, containers_of
from .noted_values import ABSENT, Complain, contents_of, fill

__all__ = ["AttributesUndo"]


class _Before:
    """The attributes of a module before a rerun."""

    __slots__ = ("_contents", "_names", "_own")

    def __init__(self, own: dict[str, Any], *, with_buffers: bool) -> None:
        self._own, self._names = own, own.copy()
        self._contents = [(container, contents_of(container)) for container in containers_of(own)]
        self._contents += [(own[name], own[name].copy()) for name in PARTS[not with_buffers :]]

    def restore(self) -> None:
        own, names = self._own, self._names
        for name in [name for name in own if name not in names and name not in MACHINERY]:
            del own[name]
        for name, value in names.items():
            if own.get(name, ABSENT) is not value and name not in MACHINERY:
                own[name] = value
        for container, contents in self._contents:
            if contents is not None:
                fill(container, contents)


class AttributesUndo:
    """Attributes of modules lent to one rerun.

    Attributes:
        may_initialise: Whether the function may initialise something once more, since a flag or the like was put back.
    """

    __slots__ = ("_before", "_complain", "_notes", "_same", "_with_buffers", "may_initialise")

    def __init__(self, complain: Complain, *, with_buffers: bool) -> None:
        """Prepares for a rerun.

        Args:
            complain: Returns an error for a tensor with a history that was written to since.
            with_buffers: Whether the rerun finds buffers as forward found them.
        """
        self._complain, self._with_buffers = complain, with_buffers
        self._before: list[_Before] = []
        self._same: list[tuple[ModuleNote, dict[str, Any], Any]] = []
        self._notes: AttributeNotes | None = None
        self.may_initialise = False

    def put_back(self, notes: AttributeNotes, *, has_new_parts: bool) -> None:
        """Binds the noted attributes of modules.

        Args:
            notes: The notes of the modules.
            has_new_parts: Whether submodules or parameters may have been added since.
        """
        if not has_new_parts and notes.simply_hold():
            self._notes = notes
            return
        for note in notes.notes:
            module = note.module()
            if module is None:
                continue
            own = module.__dict__
            if not note.has_history and note.holds(own) and not (has_new_parts and not note.has_parts_of(own)):
                self._same.append((note, own, note.objects_in(own)))
                continue
            self._before.append(_Before(own, with_buffers=self._with_buffers))
            if note.put_back(own, self._complain, with_buffers=self._with_buffers):
                self.may_initialise = True

    def restore(self) -> None:
        """Restores the attributes from before the rerun."""
        if self._notes is not None:
            if self._notes.simply_hold():
                return
            self._same = [(note, module.__dict__, None) for note in self._notes.notes if (module := note.module()) is not None]
        for note, own, objects in self._same:
            note.restore(own, objects, self._complain, with_buffers=self._with_buffers)
        for before in reversed(self._before):
            before.restore()
