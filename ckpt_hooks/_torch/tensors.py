"""Private parts of tensors: storages, versions, detaching past modes, inner tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import TypeVarTuple, Unpack

from .modes import exclude_key, is_key_excluded, made_apart, num_dispatch_modes

is_traceable_wrapper_subclass: Callable[[Any], bool] = torch.utils._python_dispatch.is_traceable_wrapper_subclass

# Returns the address of a tensor's storage object, in half the time of asking for the storage; raises
# ``NotImplementedError`` for tensors without a storage. Remove once the public way is as quick.
storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

# A context in which operators bypass autograd, the counting of versions, and the tracking of views.
BelowAutograd: Any = torch._C._AutoDispatchBelowADInplaceOrView

# ``neg_view`` returns a view that is the negative of its memory, where the public way copies. The setters mark a tensor,
# without a copy, as the conjugate or the negative of its memory.
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
set_conj, set_neg = torch._C._set_conj, torch._C._set_neg
_COUNTING = torch._C.DispatchKey.ADInplaceOrView
# Whether the operator that a dispatch mode sees has gone through the key that ties the version of a view to its base:
# ``detach()`` has, the ``detach`` of ``.data`` has not.
is_below_counting: Callable[[], bool] = functools.partial(is_key_excluded, _COUNTING)

# Makes a guard: while the object exists, dispatch modes are not asked on this thread. A guard in a local variable ends with the
# function, even by Ctrl-C.
_ModesNotAsked: Callable[[], object] = torch._C._DisableTorchDispatch


def counted_detach(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an alias with the same version counter, from within a dispatch mode too, unlike a plain ``detach``."""
    excluded = is_key_excluded(_COUNTING)
    exclude_key(_COUNTING, False)
    try:
        return detach_past_modes(tensor) if num_dispatch_modes() else tensor.detach()
    finally:
        exclude_key(_COUNTING, excluded)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")


def run_past_modes(function: Callable[[Unpack[_Args]], _Result], *args: Unpack[_Args]) -> _Result:
    """Calls a function past dispatch modes, and past the handlers of subclasses."""
    guard = _ModesNotAsked()
    try:
        return function(*args)
    finally:
        del guard  # the traceback of an exception would keep it


def past_all_modes(tensor: torch.Tensor, function: Callable[[Unpack[_Args]], _Result], *args: Unpack[_Args]) -> _Result:
    """Calls a function past dispatch modes, torch's modes for tracing included; the function works on ``tensor``."""
    if not num_dispatch_modes():
        return function(*args)
    if type(tensor) in _PLAIN:
        return run_past_modes(function, *args)
    # A fake tensor makes fake tensors under its own mode, even if that mode is not active.
    with torch.utils._python_dispatch._disable_current_modes():
        return function(*args)


def handles_operators(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class which runs operators in its own way, below autograd."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor that shares another tensor's version counter and keeps no memory alive."""
    witness = counted_detach(tensor)
    # Witnesses of other tensors stay aliases: the data of a subclass cannot be exchanged.
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized):
        empty = run_past_modes(functools.partial(torch.empty, 0, dtype=tensor.dtype, device=tensor.device))
        run_past_modes(setattr, witness, "data", empty)
    return witness


def detach_past_modes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor.detach()`` past dispatch modes: 0.6 us, and 1.9 under a mode which does nothing."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return tensor.detach()
    guard = _ModesNotAsked()  # as in ``run_past_modes``, written out: 0.2 us less
    try:
        return tensor.detach()
    finally:
        del guard


# The content of a nested tensor of the strided kind: all of its numbers, and the sizes of its parts. The public way goes
# through the parts in turn. Remove once the public way is as quick.
nested_parts: Callable[[Any], list[Any]] = lambda tensor: [  # noqa: E731
    tensor.contiguous().values(),
    tensor._nested_tensor_size().tolist(),
]

# Sets the version counters of tensors, which count modifications in place. Only for tensors that the package made, or to
# restore a version: else autograd would miss a write.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter


def storage_of(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's storage object, the same for all views; None for a tensor without a storage."""
    # The public ``data_ptr`` is 0 for freed memory, and makes a lazy copy a real copy.
    try:
        return storage_address(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def version_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's version; -1 for a tensor made in inference mode, which counts no writes."""
    try:
        return -1 if tensor.is_inference() else tensor._version
    except RuntimeError:
        return -1


def share_counter(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share a version counter, so that a write to one moves the version of the other."""
    if tensor is other:
        return True
    if tensor.is_inference() or other.is_inference():
        return False
    before, version = tensor._version, other._version
    set_versions((tensor,), (version + 1,))
    is_shared = other._version != version
    set_versions((tensor,), (before,))
    return is_shared


def is_kept_anyway(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf that requires grad and no view: mostly a parameter, which lives on anyway."""
    # ``is_leaf`` of a view whose base was written to may give the view a new place in the graph, or raise.
    return tensor.requires_grad and not tensor._is_view() and tensor.is_leaf


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory was freed, as frameworks do with gathered parameters."""
    try:
        if type(tensor) in _PLAIN and tensor.data_ptr():  # not for fakes, where ``data_ptr`` warns and will raise
            return False
        return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0
    except (NotImplementedError, RuntimeError):
        return False


_BY_ROWS, _BY_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors directly inside a wrapper subclass; none for other tensors."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    return [part for name in flatten()[0] if isinstance(part := getattr(tensor, name), torch.Tensor)]


def parts_of(tensor: torch.Tensor) -> list[Any] | None:
    """Returns the parts of a tensor, tensors and for some layouts numbers; None for a tensor with memory of its own."""
    if hasattr(tensor, "__tensor_flatten__"):
        return inner_tensors(tensor)
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # the public methods raise where indices repeat
    if tensor.layout in _BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def dense_parts(value: Any) -> list[torch.Tensor]:
    """Returns the tensors with memory of their own which a tensor is made of; nothing for other objects."""
    if type(value) in _PLAIN and value.layout is torch.strided:
        return [value]
    if not isinstance(value, torch.Tensor):
        return []
    parts = parts_of(value)
    return [value] if parts is None else [inner for part in parts for inner in dense_parts(part)]


def _count(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


# The count for memory with a single tensor: a reference of the tensor, and a reference of the object made to ask.
_ALONE = made_apart(lambda: _count(torch.empty(1)))


def num_holders(tensor: torch.Tensor) -> int:
    """Returns the number of tensors that share a tensor's storage, held by Python or by C++."""
    return _count(tensor) - _ALONE + 1


#: The device of each storage of fake tensors which a dry run counts as memory, by the address of the storage object.
dry_storages: dict[int, torch.device] = {}


# A weak reference to the object of a tensor's storage: while the reference exists, no other storage takes the address. The
# second function returns the storage of such a reference, None if it is gone.
def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def storage_from(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
