"""Every switch of torch which decides on kernels and roundings, with its getter and setter.

Private calls into torch, like the calls in :mod:`ckpt_hooks._torch`. The public forms (``torch.backends``,
``torch.nn.attention``) are properties and contexts around these, at 1 us each, and one of them imports the compiler. The
private forms may go when the public forms cost as little. ``tests/test_switches.py`` goes through the switches of the installed
torch, and fails for a switch without a verdict.

Times are for torch 2.13 on one x86-64 core: a switch of the process is read in 0.04 us, a precision of float32 in 0.3.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C._dynamo.guards import GlobalStateGuard

__all__ = [
    "ABSENT",
    "CUDNN_PRECISION",
    "DEVICE_FLAGS",
    "FLAGS",
    "GUARDED_FLAGS",
    "MKLDNN_PRECISION",
    "PRECISION_DEFAULTS",
    "RARER_PRECISIONS",
    "VARIABLES",
    "Flag",
    "StateGuard",
    "are_devices_in_use",
    "new_state_guard",
]

_c: Any = torch._C

#: The getter and the setter of a switch.
Flag = tuple[Callable[[], Any], Callable[[Any], object]]


def _flags(*names: tuple[str, str]) -> list[Flag]:
    """Returns the switches among these getters and setters which the installed torch has."""
    return [(getattr(_c, getter), getattr(_c, setter)) for getter, setter in names if hasattr(_c, getter)]


# Switches read by a dispatcher to kernels, or by a kernel. 2.11 to 2.15; the fourth flash attention since 2.15.
FLAGS: list[Flag] = _flags(
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    ("_get_fa4_sdp_enabled", "_set_sdp_use_fa4"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
)
if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    FLAGS += _flags(("_get_sdp_priority_order", "_set_sdp_priority_order"))
if platform.machine() in ("aarch64", "arm64"):  # others refuse to reduce in fp16
    FLAGS += _flags(("_get_cpu_allow_fp16_reduced_precision_reduction", "_set_cpu_allow_fp16_reduced_precision_reduction"))
if torch.version.hip is not None:
    FLAGS += _flags(("_get_miopen_immediate", "_set_miopen_immediate"))
if torch.xpu._is_compiled():
    FLAGS += _flags(("_get_onednn_allow_tf32", "_set_onednn_allow_tf32"))

# Switches of operators on CUDA devices, without a context manager. Some take 0.5 us to read, so these are read once a region,
# and only where such a device is in use. The depthwise kernel since 2.13, grouped products and embedded kernels since 2.15.
DEVICE_FLAGS: list[Flag] = []
if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    DEVICE_FLAGS += _flags(
        ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
        ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
        ("_get_sm_carveout_experimental", "_set_sm_carveout_experimental"),
        ("_get_cublaslt_prefer_grouped_gemm", "_set_cublaslt_prefer_grouped_gemm"),
        ("_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel"),
        ("_get_native_aot_enabled", "_set_native_aot_enabled"),
    )
if torch.version.hip is not None:
    DEVICE_FLAGS += _flags(("_get_rocm_fa_preferred_backend", "_set_rocm_fa_preferred_backend"))

#: Whether a CUDA device is in use; the call initialises no device.
are_devices_in_use: Callable[[], bool] = torch.cuda.is_initialized

# Python variables read by functions of torch, as a dictionary and a name. An attribute set on the module
# ``torch.backends.opt_einsum`` hides the variable behind it, which ``torch.backends.opt_einsum.flags`` sets. 2.11 to 2.15.
_einsum: Any = torch.backends.opt_einsum
VARIABLES: list[tuple[dict[str, Any], str]] = [
    (vars(_einsum), "enabled"),
    (vars(_einsum), "strategy"),
    (vars(_einsum.m), "enabled"),
    (vars(_einsum.m), "strategy"),
    (vars(torch.backends.mha), "_is_fastpath_enabled"),
]


class _Absent:
    """Stands for a missing variable."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()

# The precision of float32, by kind of operator: "ieee", "tf32", "bf16", "none". Torch has an older way, whose getters cost a
# third, but raise for settings which only the newer way can express.
_precision_of: Callable[[str, str], str] = _c._get_fp32_precision_getter
_set_precision_of: Callable[[str, str, str], object] = _c._set_fp32_precision_setter


def _precision(backend: str, operator: str) -> Flag:
    return functools.partial(_precision_of, backend, operator), functools.partial(_set_precision_of, backend, operator)


#: Defaults for operators without a precision of their own, the widest first.
PRECISION_DEFAULTS: list[Flag] = [_precision("generic", "all"), _precision("cuda", "all"), _precision("mkldnn", "all")]
MKLDNN_PRECISION: Flag = _precision("mkldnn", "matmul")
#: Precisions of rarer operators: convolutions and recurrent layers on the host.
RARER_PRECISIONS: list[Flag] = [_precision("mkldnn", "conv"), _precision("mkldnn", "rnn")]


def _cudnn_precision() -> tuple[str, str]:
    return _precision_of("cuda", "conv"), _precision_of("cuda", "rnn")


def _set_cudnn_precision(allow_tf32: bool | tuple[str, str]) -> None:
    if isinstance(allow_tf32, bool):
        _c._set_cudnn_allow_tf32(allow_tf32)
    else:
        for operator, precision in zip(("conv", "rnn"), allow_tf32, strict=True):
            _set_precision_of("cuda", operator, precision)


#: A getter which may raise if both ways to set a precision were used, a getter which does not, and a setter for both.
CUDNN_PRECISION: tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], object]] = (
    _c._get_cudnn_allow_tf32,
    _cudnn_precision,
    _set_cudnn_precision,
)


def _older_matmul_precision() -> str | None:
    try:
        precision: str = _c._get_float32_matmul_precision()
    except RuntimeError:
        return None
    return precision


def _set_older_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        _c._set_float32_matmul_precision(precision)


def _set_deterministic(mode: bool) -> None:
    _c._set_deterministic_algorithms(mode, warn_only=_c._get_deterministic_algorithms_warn_only())


def _set_warn_only(warn_only: bool) -> None:
    _c._set_deterministic_algorithms(_c._get_deterministic_algorithms(), warn_only=warn_only)


def _reduced_precision(dtype: str) -> Flag:
    name = f"cublas_allow_{dtype}_reduced_precision_reduction"
    setter = getattr(_c, f"_set_{name}")
    return getattr(_c, f"_get_{name}"), lambda values: setter(*values)


def _set_num_threads(count: int) -> None:
    """Sets the number of threads of operators; on the main thread alone, for a part of it belongs to the whole process."""
    if threading.get_ident() == threading.main_thread().ident:
        torch.set_num_threads(count)


# Switches compared by a ``GlobalStateGuard`` in one call of 0.13 us. Compiled code asks such a guard whether it still applies;
# the guard is in a C++ module which does not import the compiler. Autocast and gradient mode, which it compares too, are not
# set from here. 2.11 to 2.15.
GUARDED_FLAGS: list[Flag] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_c._get_deterministic_algorithms, _set_deterministic),
    (_c._get_deterministic_algorithms_warn_only, _set_warn_only),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_older_matmul_precision, _set_older_matmul_precision),
    _precision("cuda", "matmul"),
    _reduced_precision("fp16"),
    _reduced_precision("bf16"),
    (torch.get_num_threads, _set_num_threads),
]


class StateGuard(Protocol):
    """Compares part of torch's state with the state at its making."""

    def check(self) -> bool:
        """Returns whether the state is the same."""


new_state_guard: Callable[[], StateGuard] = GlobalStateGuard
