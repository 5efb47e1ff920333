"""The rule of buffers: which tensors a forward copies before a write may come, and how long each copy is kept.

Small tensors (:data:`SMALL`) are always copied. Regions which found the same content share the copy.

A large tensor is copied in the first forward that meets it. If that forward did not write to it, the copy goes when the forward
ends, and later forwards take none. If it did, every later forward takes a copy and keeps it.

A forward counts as the first again after a change of ``training`` or another flag, of a hook, of a submodule, or of a small
buffer by other code: observers are switched on by such changes.

A large tensor without a copy is held to its version, as a parameter is: a write is an error, and from then on there are copies.
No version tells of writes by kernels of batch norm or by way of ``.data``. So the first forward compares contents, once. Where
it finds one tensor of a module written so, the module's other large ones count as written: a write may leave the same content.
Whatever is only read costs a region no memory (Rule 9).
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, Generic, TypeVar

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ckpt_hooks._tensors.copies import copy_of, has_storage, is_dense, same_bits, same_layout

from .attributes import AttributeNotes
from .limits import LOOKS_AT_FROZEN, MOST_OUTSIDE, SMALL
from .small_buffers import SmallBuffers, SmallCopy, is_small_on_host
from .tensor_note import TensorNote

#: Returns an error for a tensor with a changed content, and its version before.
Complain = Callable[[torch.Tensor, int], BaseException]

#: A name in a module, as the dict that holds it and the key.
Slot = tuple[dict[str, Any], str]


class Use(enum.Enum):
    """What forwards were seen to do to a tensor."""

    UNKNOWN = enum.auto()
    READ = enum.auto()
    #: Written to, and the version told.
    WRITTEN = enum.auto()
    #: Written to, and no version told.
    UNSEEN = enum.auto()


WRITES = (Use.WRITTEN, Use.UNSEEN)


V = TypeVar("V")


class ByTensor(Generic[V]):
    """A table by tensor, whose entries go with the tensors. Torch's ``WeakTensorKeyDictionary`` takes forty times as long."""

    __slots__ = ("__weakref__", "_entries")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], V]] = {}

    def get(self, tensor: torch.Tensor, default: V) -> V:
        """Returns the entry of a tensor."""
        found = self._entries.get(id(tensor))
        return default if found is None or found[0]() is not tensor else found[1]

    def __setitem__(self, tensor: torch.Tensor, value: V) -> None:
        self._entries[id(tensor)] = weakref.ref(tensor, functools.partial(_forget, weakref.ref(self), id(tensor))), value


def _forget(table: weakref.ref[ByTensor[Any]], key: int, _: Any) -> None:
    found = table()
    if found is not None:
        found._entries.pop(key, None)


Uses = ByTensor[Use]

#: Tensors which no module owns, as far as forwards wrote to them. Nothing tells when one that is only read will be written to:
#: such a tensor is copied in each forward.
outside = Uses()

#: The latest copy of each tensor, with its version, while a region holds the copy.
_copies: ByTensor[tuple[int, Callable[[], torch.Tensor | None]] | None] = ByTensor()


def is_copied(tensor: torch.Tensor) -> bool:
    """Whether a tensor's content can be copied, compared and put back. Other classes and layouts have versions alone."""
    return is_dense(tensor) and not (tensor.requires_grad or tensor.is_meta or tensor.is_inference()) and has_storage(tensor)


def copy_before(tensor: torch.Tensor, use: Use, *, is_owned: bool = True) -> torch.Tensor | None:
    """Returns a copy of a tensor, for a forward that may write to it; None for a large tensor which no module owns.

    Args:
        tensor: The tensor: none that is large and only read.
        use: What forwards were seen to do to it.
        is_owned: Whether a module owns it.
    """
    is_small = tensor.nbytes <= SMALL
    if not (is_small or is_owned or tensor.nbytes <= MOST_OUTSIDE):
        return None
    latest = _copies.get(tensor, None)
    if latest is not None and latest[0] == tensor._version:
        copy = latest[1]()
        if copy is not None and not has_changed(tensor, copy, use):
            return copy
    copy = copy_of(tensor)
    # A device cannot tell whether its content is that of the step before, so its small copies stay from step to step.
    stays = is_small and is_owned and not answers_at_once(tensor)
    _copies[tensor] = tensor._version, (lambda: copy) if stays else weakref.ref(copy)
    return copy


def has_changed(tensor: torch.Tensor, copy: torch.Tensor, use: Use) -> bool:
    """Whether a tensor of unchanged version may differ from its copy. A device is not made to wait: its answer may be wrong."""
    if not (same_layout(tensor, copy) and has_storage(tensor)):
        return True
    return not same_bits(tensor, copy) if answers_at_once(tensor) else use not in (Use.READ, Use.WRITTEN)


def answers_at_once(tensor: torch.Tensor) -> bool:
    """Whether contents are compared without waiting for a device."""
    return tensor.device.type == "cpu"


def use_after(tensor: torch.Tensor, copy: torch.Tensor | None, use: Use, *, was_written: bool, may_wait: bool) -> Use:
    """Returns what is known of a tensor once a forward has ended.

    Args:
        tensor: The tensor.
        copy: The content before forward, if there is a copy.
        use: What was known before.
        was_written: Whether its version has moved.
        may_wait: Whether a device may be asked: in the first forward. A module that binds a buffer anew has an unknown one in
            each forward, and the version alone tells of that.
    """
    if was_written and use is not Use.UNSEEN:
        return Use.WRITTEN
    if use is not Use.UNKNOWN or copy is None or not has_storage(tensor):  # which a framework frees, and fills anew
        return use
    if not (may_wait or answers_at_once(tensor)):
        return Use.UNKNOWN if tensor.nbytes <= SMALL else Use.READ
    return Use.READ if same_layout(tensor, copy) and same_bits(tensor, copy) else Use.UNSEEN


class Buffers:
    """How forwards have used the tensors of one module, submodules included.

    Attributes:
        num_forwards: How many whole forwards were seen since the first.
        uses: What forwards were seen to do to each tensor.
        written_names: Parameters without gradients to which forwards wrote: number of the module, and name.
    """

    __slots__ = (
        "_latest_hook",
        "_modules",
        "_notes",
        "_others",
        "_registered",
        "_small",
        "num_forwards",
        "uses",
        "written_names",
    )

    def __init__(self, modules: Sequence[weakref.ref[Module]], before: Buffers | None) -> None:
        """Knows nothing but the names of written parameters.

        Args:
            modules: The module and its submodules.
            before: The knowledge from before a change of submodules.
        """
        self._modules = modules
        self._notes: Sequence[Sequence[TensorNote]] = ()
        self._small: SmallBuffers | None = None
        self._others: list[tuple[TensorNote, int]] = []
        self.written_names: set[tuple[int, str]] = set()
        self.num_forwards: int = 0 if before is None or before.written_names else before.num_forwards
        self.uses = Uses()
        self._latest_hook, self._registered = RemovableHandle.next_id, self._hooks()

    def forget(self) -> None:
        """Has the next forward count as the first. Forwards under way tell the old table what they find."""
        self.uses, self.num_forwards = Uses(), 0
        if self._small is not None:
            self._small.forget()

    def _hooks(self) -> list[tuple[int, ...]]:
        return [(*module._forward_hooks, *module._forward_pre_hooks) for module in self._alive()]

    def _alive(self) -> list[Module]:
        return [module for one in self._modules if (module := one()) is not None]

    def has_other_hooks(self) -> bool:
        """Whether the modules got or lost hooks since the latest forward began. Costs nothing while none is registered."""
        return RemovableHandle.next_id != self._latest_hook and self._hooks() != self._registered

    def knows_parameters(self) -> bool:
        """Whether parameters without gradients were looked at in enough forwards, of which their versions tell later ones."""
        return self.num_forwards >= LOOKS_AT_FROZEN

    def parameters(self) -> Iterator[tuple[int, bool, tuple[Buffers, tuple[int, str], Slot]]]:
        """Yields the parameters without gradients to which forwards write, or may write: size, whether this is known, place.

        Most never change, but some modules keep state in such parameters: the codes of a quantiser, the averages of a teacher.
        """
        for number, module in enumerate(self._alive()):
            for name, parameter in module._parameters.items():
                is_written = (number, name) in self.written_names
                may_write = not (self.knows_parameters() or parameter is None or parameter.requires_grad)
                if parameter is not None and (is_written or (may_write and is_copied(parameter))):
                    yield parameter.nbytes, is_written, (self, (number, name), (module._parameters, name))

    def begin(self, notes: AttributeNotes) -> tuple[SmallCopy | None, Sequence[tuple[TensorNote, int]]]:
        """Begins a forward: returns the copy of small tensors on the host, and the notes of others with a number a module."""
        if RemovableHandle.next_id != self._latest_hook:
            if self.has_other_hooks():
                self.forget()
            self._latest_hook, self._registered = RemovableHandle.next_id, self._hooks()
        if notes.tensors is not self._notes:
            if len(notes.tensors) == len(self._notes) and all(map(is_, notes.tensors, self._notes)):
                self._notes = notes.tensors
            else:
                self._place(notes.tensors)
        copy = None if self._small is None else self._small.begin()
        if self._small is not None and copy is None:  # one has other memory, or another shape
            self._place(notes.tensors)
            copy = None if self._small is None else self._small.begin()
        if copy is not None and copy.found_other:
            self.forget()
        return copy, self._others

    def _place(self, tensors: Sequence[Sequence[TensorNote]]) -> None:
        self._notes, self._others = tensors, []
        small: list[TensorNote] = []
        for module, notes in enumerate(tensors):
            for note in notes:
                if is_small_on_host(note, SMALL):
                    small.append(note)
                else:
                    self._others.append((note, module))
        self._small = SmallBuffers(small) if small else None
