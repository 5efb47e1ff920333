"""Notes of values that were bound when forward began, so that a rerun finds the same values.

A note must not hold a graph, which may own the note's frame (Rule 9). So a tensor is noted by a detached alias, an object by a
weak reference, and a container by its identity and content: the container itself would hold its later entries.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch

from ckpt_hooks._tensors.copies import (
    PLAIN,
    Layout,
    alias_with_history,
    as_kind,
    as_view,
    base_of,
    copy_of,
    copy_with_history,
    has_storage,
    is_dense,
    is_plain,
    layout_of,
    tensor_in,
)
from ckpt_hooks._torch.functions import divert_conversions
from ckpt_hooks._torch.modes import PastFunctionModes
from ckpt_hooks._torch.tensors import (
    counted_detach,
    is_freed,
    is_kept_anyway,
    past_all_modes,
    share_counter,
    storage_address,
    storage_of,
    version_of,
    weak_storage,
)

from .containers import Content, Part, new, new_frozen
from .places import keys_of, num_same, same

#: Bytes up to which tensors are small. Copies of small buffers take less memory than an activation of their layer. Copies of
#: 64 KiB masks took five times the memory of everything else that regions of a small GPT hold.
SMALL = 1 << 14
#: Bytes up to which a tensor with a history in a module's attribute is copied, such as a sum to which forward adds in place.
_MOST_COPIED = 1 << 16


class GoneError(Exception):
    """A noted value no longer exists; the present value stays."""


class Weak(weakref.ref[Any]):
    """Notes an object by a weak reference; its content is not put back."""

    __slots__ = ()

    def holds(self, value: Any) -> bool:
        return value is not None and self() is value

    def present(self, loan: Any) -> Any:
        if (value := self()) is None:
            raise GoneError
        return value


class Passing(weakref.ref[Any]):
    """Notes a tensor without holding it; in place of a dead tensor a rerun gets a meta tensor."""

    __slots__ = ("_like",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._like = tensor.shape, tensor.dtype, tensor.requires_grad

    holds = Weak.holds

    def present(self, loan: Any) -> Any:
        if (tensor := loan.stand_ins.get(id(self()), self())) is not None:
            return tensor
        shape, dtype, requires_grad = self._like
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


class Held:
    """Notes a value by its ``id``: a tree must not hold values, and a journal does."""

    __slots__ = ("number",)

    def __init__(self, value: Any) -> None:
        self.number = id(value)

    def holds(self, value: Any) -> bool:
        return id(value) == self.number

    def present(self, loan: Any) -> Any:
        if (value := loan.held.get(self.number, loan.met.get(self.number))) is None:
            raise GoneError
        return value


class Use(Enum):
    """How forwards use the content of a tensor; ``UNSEEN`` stands for writes that do not change the version."""

    UNKNOWN, READ, WRITTEN, UNSEEN = range(4)


class _WeakStorage:
    """A weak reference to a storage of parameters, with hashes of the contents before ``module.double()`` and the like."""

    __slots__ = ("hashes", "reference")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference, self.hashes = weak_storage(tensor), dict[Layout, tuple[torch.device, int]]()


#: By the address of the storage, which no other storage gets while a weak reference to the storage exists.
_weak_storages: dict[int, _WeakStorage] = {}


def _weakly(tensor: torch.Tensor, address: int) -> _WeakStorage:
    if (storage := _weak_storages.get(address)) is None:
        _watch_conversions()
        if not len(_weak_storages) & 1023:
            dead = [key for key, weak in list(_weak_storages.items()) if weak.reference.expired()]  # type: ignore[no-untyped-call]
            for key in dead:
                _weak_storages.pop(key, None)
        storage = _weak_storages[address] = _WeakStorage(tensor)
    return storage


@functools.cache
def _watch_conversions() -> None:
    divert_conversions(_note_contents)


def _note_contents(module: torch.nn.Module) -> None:
    # ``module.double()`` and then ``module.float()`` bring the same bits back in other memory. Hashes taken earlier
    # show this. Copies or hashes of all parameters in each forward would cost too much.
    for parameter in module._parameters.values():
        if parameter is None or not is_plain(parameter) or parameter.is_meta or not has_storage(parameter):
            continue
        if (storage := _weak_storages.get(storage_address(parameter))) is not None:
            storage.hashes[layout_of(parameter)] = _hash_of(parameter)


def _hash_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    from ckpt_hooks._tensors.determinism import hash_in_order

    with PastFunctionModes():
        return tensor.device, int(past_all_modes(tensor, hash_in_order, tensor))


class Memory:
    """The place of a dense tensor's content: the storage, held or weakly referred to, and the layout."""

    __slots__ = ("_is_inference", "_storage", "_weak", "address", "layout")

    def __init__(self, tensor: torch.Tensor, *, is_weak: bool) -> None:
        self.address, self.layout = storage_address(tensor), layout_of(tensor)
        self._is_inference = tensor.is_inference()
        self._weak = _weakly(tensor, self.address) if is_weak else None
        self._storage = tensor.untyped_storage() if self._weak is None else self._weak.reference

    def holds(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) == self.address and layout_of(tensor) == self.layout

    def has_same_content(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in other memory has the content that was here before a conversion of its module."""
        noted_hash = None if self._weak is None else self._weak.hashes.get(self.layout)
        return noted_hash is not None and layout_of(tensor)[1:] == self.layout[1:] and _hash_of(tensor) == noted_hash

    def tensor(self) -> torch.Tensor | None:
        """Returns a tensor without history in this memory; None if the memory is gone."""
        return tensor_in(self._storage, self.layout, is_inference=self._is_inference)


def has_history(tensor: torch.Tensor) -> bool:
    """Whether an operator recorded by autograd made a tensor; any view that requires grad counts."""
    try:
        return tensor.requires_grad and not is_kept_anyway(tensor)
    except (RuntimeError, ValueError):  # raised for a multi-output view whose base was modified, and for a lazy parameter
        return False


class TensorNote:
    """A noted tensor: its identity, memory, layout, ``requires_grad``, and, if it has a history, its version."""

    # A note mostly knows its tensor again by the memory, and holds the memory by an alias. Exceptions:
    # - A leaf that requires grad, or was made in inference mode, is held itself (``leaf``), unless a module holds it.
    # - A tensor with a history or of unknown memory gets a weak reference. No other does: ``torch.utils.swap_tensors`` refuses
    #   tensors with weak references.
    # - A parameter gets no alias (``is_weak``), since frameworks free its memory, unless it is frozen and small or an argument.

    def __init__(self, tensor: torch.Tensor, *, owner: int = -1) -> None:
        self.kind, self.number, self.owner = type(tensor), id(tensor), owner
        self.address: int = tensor._cdata  # of the C++ tensor, which ``torch.utils.swap_tensors`` exchanges
        self.has_history = has_history(tensor)
        self.requires_grad = self.has_history or tensor.requires_grad
        self.version = tensor._version if self.has_history else -1
        self.use = Use.UNKNOWN
        self.latest: Any = None  # the version at the latest copy, and a function that returns the copy
        has_memory = is_dense(tensor)
        is_leaf = (has_memory and tensor.is_inference()) or (self.requires_grad and not self.has_history)
        self.leaf = tensor if is_leaf and owner < 0 else None
        is_referred = self.leaf is None and (not has_memory or self.has_history)
        self._reference = weakref.ref(tensor) if is_referred else None
        is_parameter = has_memory and isinstance(tensor, torch.nn.Parameter)
        is_weak = is_parameter and (self.requires_grad or (owner >= 0 and tensor.nbytes > SMALL))
        self.memory = Memory(tensor, is_weak=is_weak) if has_memory else None
        self.alias, self._copy = None if is_weak else _alias_of(tensor), None
        self._base = base_of(tensor)
        if owner >= 0 and self.has_history and self.alias is not None and is_plain(self.alias) and not tensor.is_meta:
            self._copy = copy_of(self.alias) if tensor.nbytes <= _MOST_COPIED else None

    def holds(self, value: Any) -> bool:
        is_same = id(value) == self.number and type(value) is self.kind and value.requires_grad is self.requires_grad
        return is_same and (self.version < 0 or value._version == self.version) and self._is_in_place(value)

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        if self.memory is None:
            return self._reference is None or self._reference() is tensor
        return self.memory.holds(tensor)

    def _is_same(self, tensor: torch.Tensor, loan: Any) -> bool:
        """Whether a tensor with the noted ``id`` is the noted tensor, and not a later object with a reused ``id``."""
        if self.alias is None or self.number in loan.held or tensor is self.leaf:
            return True
        counts, is_counting = version_of(self.alias) >= 0, version_of(tensor) >= 0
        if not (counts and is_counting):
            return counts == is_counting
        return share_counter(self.alias, tensor) or loan.has_swapped(tensor)

    def tensor(self) -> torch.Tensor | None:
        """Returns the tensor if the note has a live reference, else an alias with the same version counter."""
        tensor: torch.Tensor | None = None if self._reference is None else self._reference()
        return self.alias if tensor is None else tensor

    def present(self, loan: Any) -> torch.Tensor:
        """Returns the tensor to bind in a rerun, in the noted memory; an alias if the tensor is gone or now has a history."""
        number = self.number
        if number in loan.stand_ins or number in loan.made:
            return loan.stand_ins.get(number, loan.made.get(number))  # type: ignore[no-any-return]
        tensor = self.leaf if self._reference is None else self._reference()
        tensor = loan.held.get(number, loan.met.get(number)) if tensor is None else tensor
        is_same = type(tensor) is self.kind
        if is_same and self.holds(tensor):
            if self.memory is not None and not self.has_history:
                loan.note_memory(tensor)
            return tensor
        is_same = is_same and self._is_same(tensor, loan)
        is_leaf = is_same and (tensor.requires_grad is self.requires_grad or is_kept_anyway(tensor) or not tensor.requires_grad)
        if is_leaf and self.memory is not None and not self.has_history:
            loan.exchange(self.memory, tensor, self.requires_grad)
            return tensor
        alias = self.memory.tensor() if self.alias is None and self.memory is not None else self.alias
        if alias is None or is_freed(alias):
            raise GoneError
        if not self.has_history:
            made = as_view(as_kind(alias.detach(), self.kind), self._base).requires_grad_(self.requires_grad)
        elif alias._version == self.version:
            made = alias_with_history(alias, self.version, self._base)
        elif self._copy is not None:
            made = as_view(copy_with_history(self._copy, self.version), self._base)
        else:
            loan.changed.append((alias, self.version))
            made = tensor if is_same and self._is_in_place(tensor) else alias_with_history(alias, self.version, self._base)
        loan.made[number] = made
        return made


def _alias_of(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        with PastFunctionModes():
            alias = counted_detach(tensor)
            kind = type(tensor)
            return alias if type(alias) is kind or kind in PLAIN else alias.as_subclass(kind)
    except (RuntimeError, NotImplementedError, ValueError):
        return None


class Note:
    __slots__ = ("_maxlen", "has_history", "kind", "number", "reference", "rows")

    def __init__(self, value: Any) -> None:
        self.kind, self.number, self.has_history = type(value), id(value), False
        self._maxlen = value.maxlen if isinstance(value, deque) else None
        # For each place: its kind, the number of entries before the content, the content, and the keys of notes in the content.
        self.rows: list[tuple[Part, int, Content, Sequence[Any]]] = []
        try:
            self.reference: Any = weakref.ref(value)
        except TypeError:  # a list, for example, allows no weak references
            self.reference = None

    def is_of(self, value: Any) -> bool:
        if self.reference is not None:
            return value is not None and self.reference() is value
        return id(value) == self.number and type(value) is self.kind

    def holds(self, value: Any) -> bool:
        if not self.is_of(value):
            return False
        for part, base, content, keys in self.rows:  # a loop: ``all`` took a third of the time to rerun a trainer's method
            current = part.read(value, base)
            if current is None or num_same(content, current) != len(content) - len(keys):
                return False
            for key in keys:
                if not content[key].holds(current[key]):
                    return False
        return True

    def present(self, loan: Any) -> Any:
        """Returns the object to bind in a rerun, with the noted content; a new object if the noted object is gone."""
        if self.number in loan.made:
            return loan.made[self.number]
        current = loan.met.get(self.number) if self.reference is None else self.reference()
        current = current if self.reference is not None or type(current) is self.kind else None
        if issubclass(self.kind, (tuple, frozenset)) and self.rows:
            part, _, content, keys = self.rows[0]
            loan.met.update((id(value), value) for value in (() if current is None else part.read(current, 0)))
            values = [value.present(loan) if at in keys else value for at, value in enumerate(content)]
            if current is None or not same(part.read(current, 0), values):
                current = new_frozen(self.kind, values)
        elif current is None:
            if any(base for _, base, *_ in self.rows):  # a long container: its first entries were not noted
                raise GoneError
            current = new(self.kind, self._maxlen)
        self.fill(current, loan)
        return current

    def fill(self, value: Any, loan: Any) -> None:
        loan.made[self.number] = value
        for part, base, content, keys in self.rows:
            current = part.read(value, base)
            if current is not None:  # else a long container has lost entries that were not noted
                loan.met.update(
                    (id(bound), bound)
                    for bound in (*(current.values() if type(current) is dict else current), *keys_of(current))
                )
                loan.put(value, part, base, current, filled(content, keys, current, loan))


class Again:
    """Notes another occurrence of a container or object that has a note, as of a list in itself."""

    __slots__ = ("note",)

    def __init__(self, note: Note) -> None:
        self.note = note

    def holds(self, value: Any) -> bool:
        return self.note.is_of(value)

    def present(self, loan: Any) -> Any:
        return self.note.present(loan)


def filled(content: Content, keys: Sequence[Any], current: Content, loan: Any) -> Content:
    """Returns a noted content with values in place of notes; where a noted value is gone, the present value stays."""
    values = content.copy() if keys else content
    for key in keys:
        try:
            values[key] = content[key].present(loan)
        except GoneError:
            if type(content) is not dict:
                return current
            if key in current:
                values[key] = current[key]
            else:
                del values[key]
    return values


def notes_in(notes: Sequence[Any]) -> Iterator[Any]:
    for note in notes:
        yield note
        if isinstance(note, Note):
            for _, _, content, keys in note.rows:
                yield from notes_in([content[key] for key in keys])
