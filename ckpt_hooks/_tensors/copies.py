"""Copies of tensors, and the restoring of content, strides and version.

Hooks which copy (``save_on_cpu``) return a dense tensor at version 0, whatever was packed. A rerun needs the strides and the
version: a transposed input takes other kernels, and versions tell whether a saved tensor was modified since.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_hooks._torch.autograd import set_grad_enabled
from ckpt_hooks._torch.modes import FAKE
from ckpt_hooks._torch.tensors import (
    is_freed,
    neg_view,
    past_all_modes,
    set_versions,
    storage_address,
    storage_from,
    storage_of,
)

from .nested import replaced_in

#: Types of tensors without a subclass's behavior.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

#: Plain types, and fake tensors, which have no values.
PLAIN_OR_FAKE = PLAIN | {FAKE}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a dtype, sizes and strides, and content in memory."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain, or a fake of a plain tensor."""
    return type(tensor) in PLAIN_OR_FAKE and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def as_kind(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Returns a tensor without gradients as a parameter or a plain tensor, as ``kind`` says, on the same memory."""
    return torch.nn.Parameter(tensor, requires_grad=False) if issubclass(kind, torch.nn.Parameter) else tensor


def restore_layout(tensor: torch.Tensor, strides: tuple[int, ...] | None, version: int) -> torch.Tensor:
    """Returns a tensor of the same values and gradient edge, with these strides (None for any) and this version."""
    if (strides is None or tensor.stride() == strides) and tensor._version == version:
        return tensor
    with torch.enable_grad():
        copy: torch.Tensor = _Copy.apply(tensor, strides)  # type: ignore[no-untyped-call]
    set_versions((copy,), (version,))
    return copy


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    # Past all modes, since a tracing mode would return a fake tensor.
    data: torch.Tensor = past_all_modes(tensor, getattr, tensor, "data")
    return data


def copy_of(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Returns a copy of a strided tensor with the same strides, or with ``strides``: other strides may mean another kernel."""
    # Past dispatch modes: a mode which reuses outputs would take the copy for an operator of the region.
    copy: torch.Tensor = past_all_modes(tensor, _copy_of, tensor, strides)
    return copy


def _copy_of(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    if torch.is_inference_mode_enabled():  # a copy made there would have no version
        with torch.inference_mode(False):
            return _copy_of(tensor, strides)
    if strides is None and tensor.is_contiguous():
        return (tensor.detach() if tensor.requires_grad else tensor).clone()  # ``clone`` keeps the strides of dense tensors
    strides = tensor.stride() if strides is None else strides
    stored = _stored(tensor.detach(), strides)
    copy = stored.new_empty_strided(stored.shape, strides)  # keeps the tensor's class
    copy.copy_(stored)  # elements that share a place are equal, so the order of writes does not matter
    if copy.shape != tensor.shape:
        copy = copy.new_empty(0).set_(copy.untyped_storage(), 0, tensor.shape, strides)
    return copy


#: Storages and their copies, by the address of the original, which is held so that no other storage takes the address.
Clones = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]


def copy_in(tensor: torch.Tensor, clones: Clones) -> torch.Tensor:
    """Returns a copy of a tensor with the same strides; tensors which share memory share it in the copies too."""
    copy: torch.Tensor = past_all_modes(tensor, _copy_in, tensor, clones)
    return copy


def _copy_in(tensor: torch.Tensor, clones: Clones) -> torch.Tensor:
    if not is_plain(tensor):
        return tensor.detach().clone()
    address = storage_address(tensor)
    clone = clones.get(address)
    if clone is None:
        original = tensor.untyped_storage()
        clone = clones[address] = original, original.clone()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return _put_in(clone[1], layout_of(tensor))


def stand_in_for(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Returns a copy with the version of the tensor, to be saved in its place."""
    copy = copy_of(tensor, strides)
    if copy._version != tensor._version:
        set_versions((copy,), (tensor._version,))
    return copy


def copy_with_history(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Returns a non-leaf copy which requires grad, for a function which may write to the copy or look at its history."""
    with torch.enable_grad():
        copy: torch.Tensor = _Copy.apply(tensor.detach().requires_grad_(), tensor.stride() if is_plain(tensor) else None)  # type: ignore[no-untyped-call]
    set_versions((copy,), (version,))
    return copy


def alias_with_history(tensor: torch.Tensor, version: int, base: Base | None = None) -> torch.Tensor:
    """Returns an alias which requires grad and is no leaf, and a view if there is a base: a stand-in for a result."""
    # Frames save leaves without a handle, so a leaf in place of a result would change the count of saved tensors in the rerun.
    # Two operators make the alias, in a fifth of the time of a ``torch.autograd.Function``.
    alias: torch.Tensor = past_all_modes(tensor, _alias, tensor, base)
    if version > 0:
        set_versions((alias,), (version,))
    return alias


def _alias(tensor: torch.Tensor, base: Base | None) -> torch.Tensor:
    if base is None:
        with torch.enable_grad():
            return _unviewed(tensor.detach().requires_grad_())
    whole = _whole(tensor, base).detach().requires_grad_()  # a leaf refuses writes, but only unwritten results get stand-ins
    with torch.enable_grad():
        return _part(whole, tensor)


def _unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the output of an operator that shares memory with its input, without being a view to autograd."""
    if not tensor.requires_grad:
        return tensor.detach()
    if is_plain(tensor) and tensor.dim() and tensor.shape[0] and not (tensor.is_conj() or tensor.is_neg()):
        (tensor,) = torch.unsafe_split(tensor, tensor.shape[0])
        return tensor
    return _Alias.apply(tensor)  # type: ignore[no-untyped-call, no-any-return]


#: Shape, strides and offset of a view's base in the shared memory, and the offset of the view. Empty where ``as_strided`` of
#: the base cannot make the view, such as a view of another dtype.
Base = tuple[Any, ...]


def base_of(tensor: torch.Tensor) -> Base | None:
    """Returns the place of a view's base in memory; None for a tensor that is no view."""
    base = tensor._base
    if base is None or not is_dense(tensor):
        return None
    if not is_dense(base) or base.dtype is not tensor.dtype:
        return ()
    return base.shape, base.stride(), base.storage_offset(), tensor.storage_offset()


def as_view(tensor: torch.Tensor, base: Base | None) -> torch.Tensor:
    """Returns a view with the memory, gradient edge and version of a tensor that is no view; the tensor if ``base`` is None."""
    # Compiled code needs the view: AOTAutograd detaches views before saving, and Dynamo compares the sizes of a view's base.
    if base is None:
        return tensor
    view: torch.Tensor = past_all_modes(tensor, _view, tensor, base)
    if view._version != tensor._version:
        set_versions((view,), (tensor._version,))
    return view


def _view(tensor: torch.Tensor, base: Base) -> torch.Tensor:
    with torch.enable_grad():
        whole = _whole(tensor, base)
        return _part(tensor if whole is tensor else _unviewed(whole), tensor)


def _whole(tensor: torch.Tensor, base: Base) -> torch.Tensor:
    """Returns a tensor with the layout of the base in the view's memory; the view itself if the base does not fit there."""
    if base and base[3] == tensor.storage_offset():
        try:
            return tensor.as_strided(*base[:3])
        except RuntimeError:
            pass
    return tensor


def _part(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def copies_of(value: Any) -> Any:
    """Returns the outputs of an operator, each tensor replaced by a copy of the same version."""
    return replaced_in(value, torch.Tensor, _copy_or_clone)


def _copy_or_clone(tensor: torch.Tensor) -> torch.Tensor:
    return stand_in_for(tensor) if is_plain(tensor) and not tensor.is_inference() else tensor.detach().clone()


def _stored(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Returns the stored part of a tensor: a single element in each expanded dimension (of stride 0)."""
    for dimension, stride in enumerate(tensor.stride() if strides is None else strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


class _Copy(torch.autograd.Function):
    """The copy as an operator: the output is no view, and no leaf unless the input is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
        return tensor.clone() if strides is None else copy_of(tensor, strides)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


_kind_of = operator.attrgetter("shape", "dtype", "device")


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor still has its memory, which a framework may free."""
    return tensor.untyped_storage().nbytes() >= _needed(tensor)


def _needed(tensor: torch.Tensor) -> int:
    """Returns the bytes up to the end of a strided tensor in its storage."""
    count = tensor.numel()
    if not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + count) * tensor.element_size() if count else 0  # type: ignore[return-value]


def same_layout(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return _kind_of(tensor) == _kind_of(other) and tensor.stride() == other.stride()


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a look at a tensor's numbers waits for no device."""
    return tensor.is_cpu


#: An integer of each size. Floating-point numbers would compare by value: -0.0 as 0.0, and not-a-number as unlike itself.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits. True for tensors of a class without accessible bits: sparse, quantized, fake."""
    if not (is_plain(tensor) and is_plain(other)):
        return type(tensor) is type(other) and tensor.is_nested is other.is_nested
    if tensor.shape != other.shape or tensor.dtype is not other.dtype:
        return False
    return tensor.is_meta or bool(past_all_modes(tensor, lambda: torch.equal(bits_of(tensor), bits_of(other))))


#: The content of a tensor at some moment: bytes if the tensor is contiguous on the host, else a copy.
Image = bytes | torch.Tensor


def image_of(tensor: torch.Tensor) -> Image:
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # For a small tensor this takes a tenth of the time of a copy.
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return copy_of(tensor)


def differs(tensor: torch.Tensor, image: Image) -> bool | torch.Tensor:
    """Whether a tensor's bits differ from an image; for a device the answer is a tensor there, and the host does not wait."""
    if isinstance(image, bytes):
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) != image
    differing: bool | torch.Tensor = past_all_modes(tensor, _differ, tensor, image)
    return differing


def _differ(tensor: torch.Tensor, other: torch.Tensor) -> bool | torch.Tensor:
    differing = bits_of(tensor).ne(bits_of(other)).any()
    return bool(differing) if tensor.is_cpu else differing


def copy_from(image: Image, tensor: torch.Tensor) -> torch.Tensor:
    copy: torch.Tensor = image if isinstance(image, torch.Tensor) else past_all_modes(tensor, _copy_from, image, tensor)
    return copy


def _copy_from(image: bytes, tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(image), dtype=tensor.dtype).view(tensor.shape)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.itemsize])


def _fill(tensor: torch.Tensor, content: torch.Tensor, layout: torch.Tensor | None) -> None:
    fits = same_layout(tensor, content)
    if layout is not None and not (fits and storage_of(tensor) == storage_of(layout)):
        tensor.data, fits = layout, True
    if not has_storage(tensor):
        tensor.untyped_storage().resize_(_needed(tensor))  # a rerun has freed the memory
    if not fits:
        tensor.data = copy_of(content)  # an observer of quantization gave the tensor another shape
    elif 0 in tensor.stride():
        _stored(tensor).copy_(_stored(content))
    else:
        tensor.copy_(content)


def fill_all(tensors: Iterable[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor | None]]) -> None:
    """Gives each tensor a content and a version, and the memory and layout of an earlier alias, if there is any."""
    grad_enabled = torch.is_grad_enabled()
    set_grad_enabled(False)
    filled: list[torch.Tensor] = []
    versions: list[int] = []
    try:
        for tensor, version, content, layout in tensors:
            past_all_modes(tensor, _fill, tensor, content, layout)
            filled.append(tensor)
            versions.append(version)
    finally:
        if filled:
            set_versions(tuple(filled), tuple(versions))
        set_grad_enabled(grad_enabled)


#: Where a tensor's elements are in the storage: offset, shape, strides, type, and whether they are conjugated or negated.
Layout = tuple[Any, torch.Size, tuple[int, ...], torch.dtype, bool, bool]


def is_theirs(tensor: torch.Tensor, layout: Layout) -> bool:
    """Whether a framework may manage a tensor's memory: the tensor is empty, or was empty in forward."""
    return is_freed(tensor) or 0 in tensor.shape or 0 in layout[1]


def layout_of(tensor: torch.Tensor) -> Layout:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def tensor_in(storage: torch.UntypedStorage | StorageWeakRef, layout: Layout, *, is_inference: bool) -> torch.Tensor | None:
    """Returns a tensor on a storage, without history; None if the storage is gone."""
    memory = storage_from(storage) if isinstance(storage, StorageWeakRef) else storage
    if memory is None:
        return None
    with torch.inference_mode(is_inference):
        made: torch.Tensor = past_all_modes(torch.empty(0), _put_in, memory, layout)
    return made


def _put_in(storage: torch.UntypedStorage, layout: Layout) -> torch.Tensor:
    offset, shape, strides, dtype, is_conj, is_neg = layout
    made = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
    # The content of memory may be the tensor's conjugate, or its negative.
    made = made.conj() if is_conj else made
    return neg_view(made) if is_neg else made
