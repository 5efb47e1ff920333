"""Saved tensors, tensors kept alive by a frame, and the reasons: an enum for frames and reports alike.

Reports walk a frame's parts to list its holdings, never on a hot path.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from ckpt_hooks._torch.autograd import SAVED_TENSORS, packed_of
from ckpt_hooks._torch.tensors import dense_parts, dry_storages, is_kept_anyway, parts_of, storage_of

from .descriptions import dtype_and_shape, kind_in_words

_next_number = itertools.count(1).__next__

# Numbers of storages, by ``id``. An entry is removed when its storage dies, before another object can get the same ``id``.
_numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
# The way back, from a number in a report to the live storage: the ``id`` of each numbered storage, by its number.
_identities: dict[int, int] = {}

# Observers to tell when a storage is freed, by the storage's number.
_audience: dict[int, weakref.WeakSet[Any]] = {}


def _forget(key: int, number: int, _: Any) -> None:
    del _numbers[key], _identities[number]
    for observer in _audience.pop(number, ()):
        observer.freed(number)


def _number_of(storage: torch.UntypedStorage) -> int:
    numbered = _numbers.get(id(storage))
    if numbered is not None:
        return numbered[1]
    number = _next_number()
    _identities[number] = id(storage)
    _numbers[id(storage)] = weakref.ref(storage, partial(_forget, id(storage), number)), number
    return number


def storage_and_size(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Returns the number of a tensor's storage, the same for all views, and its size in bytes; (None, 0) without a storage."""
    if storage_of(tensor) is None:
        return None, 0
    storage = tensor.untyped_storage()
    return _number_of(storage), storage.nbytes()


def address_in(storage: Any) -> int:
    """Returns the address of a storage's memory, or of its object in a dry run; 0 without memory, as for fake tensors."""
    if storage.device.type == "meta":
        return storage._cdata if storage._cdata in dry_storages else 0
    try:
        return int(storage.data_ptr())
    except RuntimeError:
        return 0


def address_of(storage: int | None) -> int:
    """Returns the memory address of the storage with this number; 0 if the storage is gone, or has no memory."""
    key = None if storage is None else _identities.get(storage)
    target = None if key is None else _numbers[key][0]()
    return 0 if target is None else address_in(target)


def tell_when_freed(storage: int, observers: Iterable[Any]) -> None:
    """Registers observers to hear when a storage is freed, each once. Observers are held weakly."""
    _audience.setdefault(storage, weakref.WeakSet()).update(observers)


class Reason(str, enum.Enum):
    """The reason why backward holds memory. Of several reasons for one storage, the first in this list counts."""

    #: An argument of the function, which its caller has.
    ARGUMENT = "argument"
    #: A parameter, or another leaf which requires grad.
    PARAMETER = "parameter"
    #: Memory that was there before the traced step: a buffer, or a constant.
    OUTSIDE = "outside"
    #: Saved by autograd, outside of any region.
    SAVED = "saved"
    #: Packed by saved-tensor hooks of the user.
    HOOKS = "hooks"
    #: An attribute of the ``ctx`` of an ``autograd.Function``, set without ``save_for_backward``.
    CTX = "ctx"
    #: Kept by a region, since its operator cannot be replayed.
    NOT_REPLAYED = "cannot be replayed"
    #: An argument of a region, or a tensor from outside of a recorded region.
    INPUT = "region input"
    #: Kept by a policy.
    POLICY = "policy"
    #: Kept by a policy, by the tensor's name.
    NAME = "name"
    #: Moved to the host.
    OFFLOADED = "offloaded"
    #: State that a region's function reaches: copies of buffers, and aliases.
    STATE = "state"
    #: The state of a random generator, for a recompute.
    RANDOM_STATE = "random state"
    #: Brought back by a running backward.
    RECOMPUTED = "recomputed"
    #: The gradient of a leaf.
    GRADIENT = "gradient"
    #: Made by a running backward, and freed before its end.
    BACKWARD = "backward"
    #: Freed with the graph, and seen in no node: torch does not show all that C++ nodes hold.
    UNSEEN = "unseen"
    #: Dropped, and brought back in backward: takes no memory until then.
    DROPPED = "dropped"
    #: Dropped, and written to since: backward raises an error.
    LOST = "lost"


#: Reasons in words for sentences and reports. For other reasons the details of the cause are enough.
_WORDS = {
    Reason.INPUT: "from outside of the region",
    Reason.POLICY: "kept by the policy",
    Reason.NAME: "kept by the policy",
    Reason.STATE: "state that the function reaches",
    Reason.RANDOM_STATE: "random state",
    Reason.RECOMPUTED: "recomputed",
}


class Cause(NamedTuple):
    reason: Reason
    detail: str = ""  # an operator, a name or the like, in words for the reader: no code depends on them

    def in_words(self) -> str:
        return ", ".join(filter(None, (_WORDS.get(self.reason), self.detail)))


BY_POLICY = Cause(Reason.POLICY)

_ATOMS = frozenset({type(None), bool, bytes, float, int, str, Cause, torch.device, torch.dtype, torch.Size})


class Holding(NamedTuple):
    """A tensor kept alive by a frame."""

    reason: Reason
    why: str  # in more words
    nbytes: int  # tensors in a storage share its bytes
    storage: int | None  # the number of the storage; None if the tensor has none, or only its inner tensors have storages
    storage_nbytes: int  # 0 if ``storage`` is None
    shape: torch.Size | None  # None for a nested tensor
    dtype: torch.dtype
    device: torch.device | None  # None where the user's saved-tensor hooks have the tensor
    parts: tuple[tuple[int | None, int], ...] = ()  # number and size of each inner tensor's storage

    @property
    def description(self) -> str:
        """Dtype and shape in words, as in ``"float32[4, 8]"``; with ``" on the host"`` for a tensor moved there."""
        return kind_in_words((self.dtype, self.shape)) + (" on the host" if self.reason is Reason.OFFLOADED else "")


def holdings_in(part: Any, cause: Cause, seen: set[int], skipped: tuple[type, ...] = ()) -> Iterator[Holding]:
    """Yields each tensor in a part of a frame, once, except for leaves which require grad: the frame does not own them."""
    # ``seen`` has the ``id`` of each visited object. Frames with their handles, and objects that frames share, are skipped.
    for value in _tensors_and_owners_in(part, seen, skipped):
        if isinstance(value, skipped):
            continue
        if not isinstance(value, torch.Tensor):  # a value that describes its tensor, which may be on the host
            if (holding := value.holding(cause)) is not None:
                yield holding
        elif value.numel() and not is_kept_anyway(value):  # an empty tensor is a version witness
            dtype, shape = dtype_and_shape(value)
            inner = dense_parts(value)
            is_dense = len(inner) == 1 and inner[0] is value
            storage, parts = storage_and_size(value) if is_dense else (None, 0), () if is_dense else inner
            sizes = tuple(map(storage_and_size, parts))
            yield Holding(cause.reason, cause.in_words(), size_of(value), *storage, shape, dtype, value.device, sizes)


def owners_in(part: Any, kind: type[Any], skipped: tuple[type, ...] = ()) -> list[Any]:
    """Returns each object of a class in a part of a frame, or behind a handle there; does not look inside such objects."""
    owners: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [part]
    while todo:
        for value in _tensors_and_owners_in(todo.pop(), seen, (kind, *skipped)):
            if isinstance(value, kind):
                owners[id(value)] = value
            elif not isinstance(value, (torch.Tensor, skipped)):
                todo += _attributes(value)
    return list(owners.values())


def _tensors_and_owners_in(part: Any, seen: set[int], skipped: tuple[type, ...]) -> Iterator[Any]:
    """Yields tensors, objects with a ``holding`` of their own, and objects of the skipped classes."""
    todo = [part]
    while todo:
        value = todo.pop()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield value
            continue
        owner = getattr(value, "frame", value)
        if isinstance(owner, skipped):
            yield owner
        elif isinstance(value, dict):
            seen.add(id(value))
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            seen.add(id(value))
            todo += value
        elif isinstance(value, SAVED_TENSORS):
            seen.add(id(value))
            todo.append(packed_of(value))
        elif hasattr(type(value), "holding"):
            seen.add(id(value))
            yield value
        # A frame consists of objects of this package; what other objects refer to is not the frame's.
        elif type(value).__module__.startswith("ckpt_hooks.") and not isinstance(value, type):
            seen.add(id(value))
            todo += _attributes(value)


def size_of(tensor: torch.Tensor) -> int:
    """Returns the size of a tensor in bytes; of a tensor of another class or layout, the size of its parts."""
    parts = parts_of(tensor)
    return tensor.nbytes if parts is None else sum(size_of(part) for part in parts if isinstance(part, torch.Tensor))


def _attributes(value: Any) -> list[Any]:
    names = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return [getattr(value, name, None) for name in names] + list(getattr(value, "__dict__", {}).values())


class Saved(NamedTuple):
    region: tuple[str, ...]  # the names of the regions around and of the region itself, outermost first
    # How many tensors the region saved before. A recorded region counts tensors with a handle, and numbers all others below 0.
    position: int
    fate: Reason  # DROPPED, LOST, or the reason for holding the tensor
    # None for a nested tensor, or where unknown: in a recorded region without observers, and where metadata is not compared.
    shape: torch.Size | None
    dtype: torch.dtype | None
    nbytes: int | None
    made_by: str | None = None  # the operator which returned the tensor; None where unknown


def nbytes_of(shape: torch.Size, dtype: torch.dtype) -> int | None:
    """Returns the size of a dense tensor in bytes; None for a nested tensor with a ragged dimension."""
    return shape.numel() * dtype.itemsize if all(type(size) is int for size in shape) else None
