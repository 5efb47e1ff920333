"""Tensors of modules that forward does not write to: masks, tables of frequencies, and the like.

To copy these in each forward would cost the memory of each once more, and time. So the first forwards of a module tell which of
its tensors they write to. The others are not copied any more; instead their versions are watched, all at once, by a node of
autograd which has saved these tensors.

Learning starts anew whenever an attribute or a hook of the module or a submodule changes: a frozen module may be trained later.
For large tensors, a number that changes in each step is no such change. Always copied are tensors of modules with silent writes
(:mod:`.quiet_writes`), and tensors ever written by a forward.

A first write to a tensor that is not copied any more cannot be undone: a rerun that needs the content is an error. To bind a
buffer anew (``self.scale = new``) is right at any time: attributes are noted in each forward.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ckpt_hooks._tensors.copies import is_plain
from ckpt_hooks._torch import hold_versions

from .attributes import ModuleNote
from .noted_values import Complain, TensorNote
from .packed import Pack, pack_up
from .quiet_writes import may_write_unseen

__all__ = ["Learning", "Unwritten"]

#: In how many forwards and one more every tensor is copied.
_LOOKS = 3
#: From this size on a tensor is large.
_LARGE = 1 << 20

_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
_nbytes: Callable[[torch.Tensor], int] = operator.attrgetter("nbytes")


#: Tensors that a forward has written to, by ``id``.
_Written = dict[int, "weakref.ref[torch.Tensor]"]


def _note_written(table: _Written, tensor: torch.Tensor) -> None:
    key = id(tensor)
    if key not in table:
        table[key] = weakref.ref(tensor, lambda _: table.pop(key, None))


class _Hooks:
    """The hooks of modules, which may write to buffers; later registrations are noticed at next to no cost."""

    __slots__ = ("_latest", "_modules", "_registered")

    def __init__(self, modules: Sequence[weakref.ref[Module]]) -> None:
        self._modules = modules
        self._latest, self._registered = RemovableHandle.next_id, self._read()

    def _read(self) -> list[tuple[int, ...]]:
        modules = [module for one in self._modules if (module := one()) is not None]
        return [(*module._forward_hooks, *module._forward_pre_hooks) for module in modules]

    def hold(self) -> bool:
        """Whether the modules still have the same hooks."""
        latest = RemovableHandle.next_id
        if latest == self._latest:
            return True
        if self._read() != self._registered:
            return False
        self._latest = latest
        return True


class Unwritten:
    """Tensors not written to since the latest look.

    Attributes:
        hooks: The hooks of the modules.
        tensors: The tensors.
    """

    __slots__ = ("_expected", "_node", "_owner", "_written", "hooks", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], hooks: _Hooks, written: _Written) -> None:
        self.tensors, self.hooks = tensors, hooks
        self._written = written
        self._expected = list(map(_version, tensors))
        self._owner = hold_versions(tensors)
        self._node: Any = self._owner.grad_fn

    def hold(self) -> bool:
        """Whether no tensor was written to since."""
        try:
            self._node.saved_tensors  # noqa: B018 (of which autograd compares the versions)
        except RuntimeError:
            return False
        return True

    def check(self, complain: Complain) -> None:
        """Raises an error if a tensor was written to since.

        Raises:
            MutationError: The result of ``complain`` for the first such tensor.
        """
        if self.hold():
            return
        for tensor, version in zip(self.tensors, self._expected, strict=True):
            if tensor._version != version:
                _note_written(self._written, tensor)
                error = complain(tensor, version)
                error.args = (f"{error.args[0]} {_FIX}",)
                raise error


#: What to do about a tensor that is written to for the first time after many forwards.
_FIX = (
    "Forwards of the module had not written to it so far, so there is no copy of it; from the next forward on there is. Bind "
    "the name to a new tensor instead of writing to the old one, or write to it in one of the first forwards."
)


class Learning:
    """What the forwards of one module tell about its tensors.

    Attributes:
        is_settled: Whether nothing more is to be learnt, and the tensors to be copied are small.
        pack: The small tensors that are copied; None if there are none.
        unwritten: Those that are not copied any more; None while there are none.
    """

    __slots__ = (
        "_hooks",
        "_is_looking",
        "_key",
        "_last",
        "_looks",
        "_looks_at_large",
        "_loose",
        "_modules",
        "_written",
        "is_settled",
        "pack",
        "unwritten",
    )

    def __init__(self, modules: Sequence[weakref.ref[Module]], before: Learning | None = None) -> None:
        """Begins to learn.

        Args:
            modules: The module and its submodules.
            before: The knowledge from before a change of submodules.
        """
        self._modules = modules
        self._hooks = _Hooks(modules)
        self._written: _Written = {} if before is None else before._written
        self._looks = self._looks_at_large = 0
        self.unwritten: Unwritten | None = None
        self.restart()

    def restart(self, *, keeps_large: bool = False) -> None:
        """Has all tensors copied in the next few forwards.

        Args:
            keeps_large: Whether large tensors are left out.
        """
        self._looks = 0
        self.is_settled = self._is_looking = False
        #: Versions when the latest forward ended, by ``id``.
        self._last: dict[int, int] = {}
        if not keeps_large:
            self._looks_at_large = 0
        if not keeps_large or self.unwritten is None or min(map(_nbytes, self.unwritten.tensors)) <= _LARGE:
            self._key: Any = None
            self.pack: Pack | None = None  # which would keep memory of tensors that are gone
            self._loose: list[TensorNote] = []
            self.unwritten = None

    def hold(self) -> bool:
        """Whether nothing has changed since learning began; otherwise starts learning anew."""
        if self._hooks.hold() and (self.unwritten is None or self.unwritten.hold()):
            return True
        self._hooks = _Hooks(self._modules)
        self.restart()
        return False

    def is_good(self) -> bool:
        """Whether the knowledge of the module's tensors is good for another forward."""
        return self.is_settled and self.hold() and (self.pack is None or self.pack.is_intact())

    def to_copy(self, notes: Sequence[ModuleNote]) -> tuple[Pack | None, list[TensorNote]]:
        """Returns the tensors to copy before a forward: a pack of small tensors, and others."""
        if not self.hold() or (self._last and any(self._was_written(noted) for note in notes for noted in note.tensors)):
            self.restart()
        self._is_looking, self._last = True, {}
        key = self._looks > _LOOKS, self._looks_at_large > _LOOKS, *(note.tensors for note in notes)
        if key != self._key or (self.pack is not None and not self.pack.is_intact()):
            known = self._known(notes) if max(self._looks, self._looks_at_large) > _LOOKS else []
            self.unwritten = Unwritten([tensor for _, tensor in known], self._hooks, self._written) if known else None
            left_out = {id(noted) for noted, _ in known}
            rest = [noted for note in notes for noted in note.tensors if id(noted) not in left_out]
            self.pack, self._loose = pack_up(rest)
            self._key = key
        self.is_settled = min(self._looks, self._looks_at_large) > _LOOKS and not self._loose
        return self.pack, self._loose

    def _was_written(self, noted: TensorNote) -> bool:
        """Whether a tensor was written to since the latest forward ended."""
        tensor = noted.reference()
        version = None if tensor is None else self._last.get(id(tensor))
        return version is not None and tensor is not None and tensor._version != version

    def _known(self, notes: Sequence[ModuleNote]) -> list[tuple[TensorNote, torch.Tensor]]:
        """Returns the tensors which need no copies any more."""
        found = []
        for note in notes:
            module = note.module()
            if module is not None and note.tensors and not may_write_unseen(module):
                tensors = [(noted, tensor) for noted in note.tensors if (tensor := noted.reference()) is not None]
                found += [(noted, tensor) for noted, tensor in tensors if self._is_known(tensor)]
        return found

    def _is_known(self, tensor: torch.Tensor) -> bool:
        looks = self._looks_at_large if tensor.nbytes > _LARGE else self._looks
        is_watched = is_plain(tensor) and not (tensor.requires_grad or tensor.is_meta or tensor.is_inference())
        return is_watched and looks > _LOOKS and id(tensor) not in self._written

    def is_learning(self) -> bool:
        """Whether the writes of this forward are to be noted."""
        return self._is_looking and min(self._looks, self._looks_at_large) <= _LOOKS

    def has_run(self, notes: Sequence[ModuleNote], written: Sequence[torch.Tensor], *, failed: bool) -> None:
        """Ends a forward. Nested regions begin several forwards before an end, and these count as one forward.

        Args:
            notes: The notes of the modules.
            written: Tensors written by forward.
            failed: Whether forward ended by an exception.
        """
        for one in written:
            _note_written(self._written, one)
        self._is_looking = False
        if not failed:
            self._looks += 1
            self._looks_at_large += 1
        tensors = [tensor for note in notes for noted in note.tensors if (tensor := noted.reference()) is not None]
        self._last = {id(tensor): tensor._version for tensor in tensors if not tensor.is_inference()}
