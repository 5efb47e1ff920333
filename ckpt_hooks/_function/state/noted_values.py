"""Notes of values: the content of a name when forward began, for a rerun to find the same content again.

Numbers, strings and the like are their own notes. Tensors and plain containers have a kind of note each. All other objects have
none: their content is their own business.

A note must not keep a graph alive, since the graph may own the frame with the note (Rule 9). Therefore a tensor is noted by a
weak reference and a detached alias, which shares memory and version counter. A mutable container is noted by its identity and
its entries: to hold the container itself would hold all its later entries.
"""

from __future__ import annotations

import enum
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch

from ckpt_hooks._tensors.copies import PLAIN, as_kind, copy_of, copy_with_history, is_plain
from ckpt_hooks._torch import PastFunctionModes, counted_detach, is_freed, is_kept_anyway

__all__ = [
    "ABSENT",
    "ATOMS",
    "Complain",
    "ContainerNote",
    "GoneError",
    "PutBack",
    "TensorNote",
    "containers_in",
    "contents_of",
    "fill",
    "has_note",
    "is_atom",
    "note_of",
]

#: Returns an error for a tensor with a changed content, and its version before.
Complain = Callable[[torch.Tensor, int], BaseException]

#: Stands for the value of an unbound name.
ABSENT: Any = object()

#: Types of values without a content to change.
ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice}
    | {torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format}
)

_MUTABLE = frozenset({list, dict, OrderedDict, defaultdict, set, deque})
_DICTS = frozenset({dict, OrderedDict, defaultdict})
_IMMUTABLE = frozenset({tuple, frozenset})

#: The number of noted levels of containers in containers.
_LEVELS = 6
#: Bytes up to which a tensor with a history is copied: a running sum, say, to which forward adds in place.
_MOST_BYTES = 1 << 16


class PutBack:
    """The context of putting values back.

    Attributes:
        current: The present containers, by identity.
        made: Containers put back or made, by the identity of the noted container.
        complain: Returns an error for a tensor with a history that was written to since, and its noted version.
    """

    __slots__ = ("complain", "current", "made")

    def __init__(self, complain: Complain, current: Mapping[int, Any] | None = None) -> None:
        self.complain = complain
        self.current: Mapping[int, Any] = current or {}
        self.made: dict[int, Any] = {}


class GoneError(Exception):
    """A noted value is gone for good; the present value stays."""


def _has_history(tensor: torch.Tensor) -> bool:
    """Whether an operator recorded by autograd made a tensor; views that require grad are not asked."""
    return tensor.requires_grad and not is_kept_anyway(tensor)


def _alias_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a detached alias, or a leaf that requires grad itself; None if an alias is impossible."""
    if is_kept_anyway(tensor):
        return tensor
    try:
        with PastFunctionModes():
            alias = counted_detach(tensor)
            kind = type(tensor)
            return alias if type(alias) is kind or kind in PLAIN else alias.as_subclass(kind)
    except (RuntimeError, NotImplementedError):
        return None


class TensorNote:
    """A noted tensor.

    Attributes:
        alias: A detached alias, or a leaf that requires grad itself; None if an alias is impossible.
        has_history: Whether the tensor has a history. Once the tensor is gone, or written to, a rerun gets a copy.
        kind: The tensor's class.
        reference: Refers to the tensor weakly.
        requires_grad: Whether the tensor required grad.
    """

    __slots__ = ("_copy", "_version", "alias", "has_history", "kind", "reference", "requires_grad")

    alias: torch.Tensor | None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kind = type(tensor)
        self.reference = weakref.ref(tensor)
        self.requires_grad = tensor.requires_grad
        self.has_history = _has_history(tensor)
        self._copy: torch.Tensor | None = None
        self._version = -1
        self.alias = _alias_of(tensor)
        if self.has_history and not tensor.is_inference():
            self._version = tensor._version
            if self.alias is not None and is_plain(self.alias) and not tensor.is_meta and tensor.nbytes <= _MOST_BYTES:
                self._copy = copy_of(self.alias)

    def holds(self, value: Any) -> bool:
        """Whether a value is the tensor, with unchanged ``requires_grad``, and with unchanged version in case of a history."""
        tensor = self.reference()
        return (
            tensor is not None
            and tensor is value
            and tensor.requires_grad is self.requires_grad
            and (not self.has_history or self._version < 0 or tensor._version == self._version)
        )

    def tensor(self) -> torch.Tensor | None:
        """Returns the tensor, or the alias of a dead tensor, to read or write its memory."""
        found: torch.Tensor | None = self.reference()
        return self.alias if found is None else found

    def present(self, back: PutBack) -> torch.Tensor:
        """Returns the tensor to bind in a rerun.

        Raises:
            GoneError: If neither tensor nor alias is left.
        """
        tensor, alias = self.reference(), self.alias
        if tensor is not None and self.holds(tensor):
            return tensor
        if alias is None or is_freed(alias):
            raise GoneError
        if not self.has_history:
            found = as_kind(alias.detach(), self.kind)
            return found.requires_grad_(self.requires_grad)
        if alias._version == self._version or self._version < 0:
            content = alias
        elif self._copy is not None:
            content = self._copy
        else:
            raise back.complain(alias if tensor is None else tensor, self._version)
        return copy_with_history(content, max(self._version, 0))


class ContainerNote:
    """A noted plain container.

    Attributes:
        has_history: Whether a tensor with a history is inside.
        identity: The ``id`` of the container.
        kind: The container's type.
        entries: Notes of the entries; for a dict, of the values.
        others: Weak references to entries without a note.
    """

    __slots__ = ("_extra", "_keys", "_only_atoms", "entries", "has_history", "identity", "is_whole", "kind", "others")

    def __init__(self, value: Any, levels: int) -> None:
        self.kind = type(value)
        self.identity = id(value)
        self._keys = tuple(value) if self.kind in _DICTS else None  # keys are their own notes
        self._extra: Any = None
        if self.kind is defaultdict:
            self._extra = value.default_factory
        elif self.kind is deque:
            self._extra = value.maxlen
        self.entries: list[Any] = []
        self.others: list[weakref.ref[Any]] = []
        #: Whether each entry has a note, or can be referred to.
        self.is_whole = True
        for entry in value.values() if self.kind in _DICTS else value:
            noted = note_of(entry, levels - 1)
            if noted is ABSENT:
                try:
                    noted = weakref.ref(entry)
                except TypeError:
                    self.is_whole = False
                else:
                    self.others.append(noted)
            self.entries.append(noted)
        inner = [entry for entry in self.entries if type(entry) in (TensorNote, ContainerNote)]
        self.has_history = any(entry.has_history for entry in inner)
        self._only_atoms = not inner and not self.others and self.is_whole

    def holds(self, value: Any) -> bool:
        """Whether a value is the container, with the same entries."""
        if id(value) != self.identity or type(value) is not self.kind or len(value) != len(self.entries):
            return False
        if self._keys is not None:
            if not all(map(is_, value, self._keys)):
                return False
            value = value.values()
        if self._only_atoms:
            return all(map(is_, value, self.entries))
        return all(map(_holds, self.entries, value))

    def present(self, back: PutBack) -> Any:
        """Returns the container to bind in a rerun, with its noted entries; a new container if the noted one is gone.

        Raises:
            GoneError: If a noted entry is gone.
        """
        made = back.made
        if self.identity in made:
            return made[self.identity]
        if not self.is_whole:
            raise GoneError
        if self.kind not in _MUTABLE:
            entries = [_present(entry, back) for entry in self.entries]
            found = made[self.identity] = frozenset(entries) if self.kind is frozenset else tuple.__new__(self.kind, entries)
            return found
        now: Any = back.current.get(self.identity)
        if type(now) is not self.kind:
            now = deque(maxlen=self._extra) if self.kind is deque else self.kind()
            if self.kind is defaultdict:
                now.default_factory = self._extra
        made[self.identity] = now
        entries = [_present(entry, back) for entry in self.entries]
        fill(now, entries if self._keys is None else dict(zip(self._keys, entries, strict=True)))
        return now


def _holds(noted: Any, value: Any) -> bool:
    kind = type(noted)
    if kind is TensorNote or kind is ContainerNote:
        return bool(noted.holds(value))
    if kind is weakref.ref:
        return value is not None and noted() is value
    return noted is value


def _present(noted: Any, back: PutBack) -> Any:
    kind = type(noted)
    if kind is TensorNote or kind is ContainerNote:
        return noted.present(back)
    if kind is not weakref.ref:
        return noted
    found = noted()
    if found is None:
        raise GoneError
    return found


def note_of(value: Any, levels: int = _LEVELS) -> Any:
    """Returns a note of a value: an immutable value itself, and :data:`ABSENT` for objects of other kinds."""
    if is_atom(value):
        return value
    if isinstance(value, torch.Tensor):
        return TensorNote(value)
    kind = type(value)
    if _is_container(kind):
        return ContainerNote(value, levels) if levels and (kind not in _DICTS or all(map(is_atom, value))) else ABSENT
    return ABSENT


def has_note(value: Any) -> bool:
    """Whether values of this kind have a note."""
    return is_atom(value) or isinstance(value, torch.Tensor) or _is_container(type(value))


def is_atom(value: Any) -> bool:
    """Whether a value is its own note: an immutable value with nothing mutable inside."""
    kind = type(value)
    return kind in ATOMS or isinstance(value, enum.Enum) or (kind in _IMMUTABLE and all(map(is_atom, value)))


def _is_container(kind: type) -> bool:
    return kind in _MUTABLE or kind in _IMMUTABLE or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def containers_in(value: Any, levels: int = _LEVELS) -> Iterator[Any]:
    """Yields a container and the containers inside, as deep as notes go."""
    kind = type(value)
    if levels and _is_container(kind):
        yield value
        for entry in list(value.values() if kind in _DICTS else value):
            if type(entry) not in ATOMS:
                yield from containers_in(entry, levels - 1)


def contents_of(container: Any) -> Any:
    """Returns a copy of the entries of a mutable container; None for an immutable container."""
    kind = type(container)
    if kind not in _MUTABLE:
        return None
    return dict(container) if kind in _DICTS else list(container)


def fill(container: Any, contents: Any) -> None:
    """Puts the entries of a mutable container back."""
    kind = type(container)
    if kind in _DICTS:
        if not (
            len(container) == len(contents)
            and all(map(is_, container, contents))
            and all(map(is_, container.values(), contents.values()))
        ):
            container.clear()
            container.update(contents)
    elif kind is set:
        if len(container) != len(contents) or not all(entry in container for entry in contents):
            container.clear()
            container.update(contents)
    elif not (len(container) == len(contents) and all(map(is_, container, contents))):
        if kind is deque:
            container.clear()
            container.extend(contents)
        else:
            container[:] = contents
