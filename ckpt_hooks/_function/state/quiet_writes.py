"""Modules which may write to their buffers silently: each forward copies their buffers, whether written so far or not.

Some kernels move no version counter, as the kernel of batch norm; nor do writes by way of ``tensor.data``, NumPy, collectives,
or users' own operators. Such a module may write nothing in its first forwards, as a frozen module, and begin later. Of torch's
modules the writers are known. The code of other modules is searched for the names which such writes need, and so are hooks, and
functions named by the code.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from ckpt_hooks._operators.unsaid import QUIET_FUNCTIONS

__all__ = ["may_write_unseen"]

#: The packages of torch's modules which write to buffers, or make other modules do so.
_WRITERS = (
    "torch.ao.",
    "torch.distributed.",
    "torch.nn.intrinsic.",
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.instancenorm",
    "torch.nn.qat.",
    "torch.nn.quantizable.",
    "torch.nn.quantized.",
    "torch.nn.utils.",
    "torch.quantization.",
)
#: Buffers of a batch norm, torch's or a user's.
_STATISTICS = frozenset({"num_batches_tracked", "running_mean", "running_var"})
_NAMES = QUIET_FUNCTIONS | {
    *("_unsafe_preserve_version_counter", "_unsafe_set_version_counter", "ctypes", "cuda_kernel", "data", "data_ptr", "dist"),
    *("distributed", "from_dlpack", "numpy", "set_", "storage", "swap_tensors", "to_dlpack", "triton", "untyped_storage"),
}
#: Parts of torch which run users' own operators.
_NAMES_OF_TORCH = frozenset({"library", "ops"})
#: The number of levels of functions, named by functions, to search.
_LEVELS = 2


def _is_torchs(name: Any) -> bool:
    return str(name).partition(".")[0] == "torch"


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names_in(constant)


def _function_may(function: types.FunctionType, levels: int = _LEVELS) -> bool:
    names = set(_names_in(function.__code__))
    if not names.isdisjoint(_NAMES) or ("torch" in names and not names.isdisjoint(_NAMES_OF_TORCH)):
        return True
    named = [function.__globals__.get(name) for name in names] if levels else []
    return any(type(one) is types.FunctionType and _function_may(one, levels - 1) for one in named)


_known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _class_may(kind: type) -> bool:
    known = _known.get(kind)
    if known is None:
        known = _known[kind] = any(_own_code_may(base) for base in kind.__mro__)
    return known


def _own_code_may(kind: type) -> bool:
    if _is_torchs(kind.__module__):
        return f"{kind.__module__}.".startswith(_WRITERS)
    for name, value in list(vars(kind).items()):
        if name != "__init__":
            found = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if type(found) is types.FunctionType and _function_may(found):
                return True
    return False


def _callable_may(value: Any) -> bool:
    while type(value) is functools.partial:
        value = value.func
    if type(value) is types.MethodType:
        return _callable_may(value.__func__) or _class_may(type(value.__self__))
    return _function_may(value) if type(value) is types.FunctionType else _class_may(type(value))


def may_write_unseen(module: Module) -> bool:
    """Whether a module may write to its buffers without moving version counters."""
    own = vars(module)
    hooks = [*own.get("_forward_hooks", {}).values(), *own.get("_forward_pre_hooks", {}).values()]
    functions = [value for value in own.values() if type(value) in (types.FunctionType, types.MethodType, functools.partial)]
    return (
        not _STATISTICS.isdisjoint(own["_buffers"])
        or _class_may(type(module))
        or any(_callable_may(value) for value in (*hooks, *functions))
    )
