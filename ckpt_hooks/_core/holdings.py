"""Holdings: tensors kept alive by a frame, and the reasons for holding, one enum for frames and reports alike.

A frame's holdings are found by going through its parts, for reports and never on a hot path.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ckpt_hooks._torch.autograd import SAVED_TENSORS, packed_of
from ckpt_hooks._torch.tensors import is_kept_anyway

from .descriptions import dtype_and_shape, kind_in_words
from .inner_tensors import dense_parts, parts_of
from .tensor_numbers import storage_and_size

__all__ = ["BY_POLICY", "Cause", "Holding", "Reason", "holdings_in", "owners_in", "size_of"]


class Reason(str, enum.Enum):
    """The reason why backward holds memory. Of several reasons for one storage, the first in this list counts."""

    #: An argument of the function, which its caller has.
    ARGUMENT = "argument"
    #: A parameter, or another leaf which requires grad.
    PARAMETER = "parameter"
    #: Memory that was there before: a buffer, or a constant.
    OUTSIDE = "outside"
    #: Saved by autograd, outside of any region.
    SAVED = "saved"
    #: Packed by saved-tensor hooks of the user.
    HOOKS = "hooks"
    #: An attribute of the ``ctx`` of an ``autograd.Function``, past ``save_for_backward``.
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
    #: Freed with the graph, and found in no node: torch does not show all that C++ nodes hold.
    UNSEEN = "unseen"
    #: Dropped, and brought back in backward: takes no memory until then.
    DROPPED = "dropped"
    #: Dropped, and written to since: backward raises an error.
    LOST = "lost"


#: Reasons in words for sentences and reports. Causes of the other reasons say it in their details.
_WORDS = {
    Reason.INPUT: "from outside of the region",
    Reason.POLICY: "kept by the policy",
    Reason.NAME: "kept by the policy",
    Reason.STATE: "state that the function reaches",
    Reason.RANDOM_STATE: "random state",
    Reason.RECOMPUTED: "recomputed",
}


class Cause(NamedTuple):
    """The reason for holding one tensor, with details.

    Attributes:
        reason: The reason.
        detail: An operator, a name or the like, in words, for readers alone.
    """

    reason: Reason
    detail: str = ""

    def in_words(self) -> str:
        """Returns reason and detail in words."""
        return ", ".join(filter(None, (_WORDS.get(self.reason), self.detail)))


BY_POLICY = Cause(Reason.POLICY)

_ATOMS = frozenset({type(None), bool, bytes, float, int, str, Cause, torch.device, torch.dtype, torch.Size})


class Holding(NamedTuple):
    """A tensor kept alive by a frame.

    Attributes:
        reason: The reason.
        why: The reason in more words.
        nbytes: The tensor's size in bytes. Tensors in one storage share their bytes.
        storage: The number of its storage; None without a storage of its own.
        storage_nbytes: The size of its storage in bytes; 0 without a storage of its own.
        shape: The sizes; None for a nested tensor.
        dtype: The dtype.
        device: The device; None where the user's saved-tensor hooks have the tensor.
        parts: Of a tensor made of others, the number and the size of the storage of each.
    """

    reason: Reason
    why: str
    nbytes: int
    storage: int | None
    storage_nbytes: int
    shape: torch.Size | None
    dtype: torch.dtype
    device: torch.device | None
    parts: tuple[tuple[int | None, int], ...] = ()

    @property
    def description(self) -> str:
        """Dtype and shape in words, as in ``"float32[4, 8]"``; with ``" on the host"`` for a tensor moved there."""
        return kind_in_words((self.dtype, self.shape)) + (" on the host" if self.reason is Reason.OFFLOADED else "")


def holdings_in(part: Any, cause: Cause, seen: set[int], skipped: tuple[type, ...] = ()) -> Iterator[Holding]:
    """Yields each tensor in a part of a frame, once; leaves which require grad are not the frame's.

    Args:
        part: A tensor, a container, or an object of this package.
        cause: The reason, unless a tensor is on the host or with hooks of the user's.
        seen: Identities of objects met before; the function adds to these.
        skipped: Classes of shared objects: frames, with their handles, and objects common to several frames.
    """
    for value in _found_in(part, seen, skipped):
        if isinstance(value, skipped):
            continue
        if not isinstance(value, torch.Tensor):  # it knows what it holds, though the tensor is elsewhere
            if (found := value.holding(cause)) is not None:
                yield found
        elif value.numel() and not is_kept_anyway(value):  # empty ones tell of versions
            dtype, shape = dtype_and_shape(value)
            inner = dense_parts(value)
            is_dense = len(inner) == 1 and inner[0] is value
            storage, parts = storage_and_size(value) if is_dense else (None, 0), () if is_dense else inner
            sizes = tuple(map(storage_and_size, parts))
            yield Holding(cause.reason, cause.in_words(), size_of(value), *storage, shape, dtype, value.device, sizes)


def owners_in(part: Any, kind: type[Any], skipped: tuple[type, ...] = ()) -> list[Any]:
    """Returns each object of a class in a part of a frame, as the owner of a handle too, without those inside others.

    Args:
        part: A container, or an object of this package.
        kind: The class, of frames.
        skipped: Classes of objects not to look into.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [part]
    while todo:
        for value in _found_in(todo.pop(), seen, (kind, *skipped)):
            if isinstance(value, kind):
                found[id(value)] = value
            elif not isinstance(value, (torch.Tensor, skipped)):
                todo += _attributes(value)
    return list(found.values())


def _found_in(part: Any, seen: set[int], skipped: tuple[type, ...]) -> Iterator[Any]:
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
