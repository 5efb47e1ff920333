"""The table of what a function sees besides arguments and random numbers: switches of the process, and state of the thread.

A row says how a switch is read and set, how a region sees that the switch has moved, and which operators heed the switch. A
switch restored anew is one more row here; the lists for fast paths are taken from the table once. Switches are compared once a
region in forward and once a recompute, and read in full only after a move.

Private calls into torch, like the calls in :mod:`ckpt_hooks._torch`. The public forms (``torch.backends``,
``torch.nn.attention``) are properties and contexts around these, at 1 us each for 0.04, and one imports the compiler. The
private forms may go when the public forms cost as little. ``tests/test_switches.py`` goes through the switches of the installed
torch, and fails for a switch which has no row here and no reason there.
"""

from __future__ import annotations

import enum
import functools
import operator
import platform
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# Compares part of torch's state with the state at its making, as compiled code asks; in a C++ module which does not import the
# compiler. Autocast and gradient mode, which it compares too, are not set from here. 2.11 to 2.15.
from torch._C._dynamo.guards import GlobalStateGuard

from ckpt_hooks._torch.modes import (
    function_mode_at,
    global_device_mode,
    is_any_autocast_enabled,
    made_apart,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
    set_global_device_mode,
)

_c: Any = torch._C


class Compared(enum.Enum):
    """The ways in which a region sees that a switch has moved."""

    BY_VALUE = enum.auto()  # once a region, once a recompute, and in recorded regions ahead of operators which heed the switch
    BY_GUARD = enum.auto()  # by one call of 0.13 us for all: once a region, a recompute, and an operator of recorded regions
    ON_DEVICES = enum.auto()  # by value once a region, where a CUDA device is in use: some take 0.5 us to read
    BY_OTHERS = enum.auto()  # a default: the switches which it holds for tell


# Parts of names of operators: those which choose among kernels, and those among them with switches of their own. Which switch
# chooses a kernel depends on device, dtype and build, so a recorded region compares all of the first list for each operator.
_KERNELS = ("attention", "conv", "dot", "gelu", "gru", "linalg", "linear", "lstm", "mm", "mv", "rnn")
_LAYERS = ("conv", "gru", "lstm", "rnn")


class Switch(NamedTuple):
    """A switch of the process."""

    #: The names in ``torch`` of all functions and properties which set the switch.
    setters: tuple[str, ...]
    read: Callable[[], Any]
    write: Callable[[Any], object]
    compared: Compared = Compared.BY_VALUE
    #: Parts of the names of the operators of ``aten`` which heed a switch compared by value. Empty where functions of Python
    #: heed it, which no replay runs. Operators of other libraries may heed any switch.
    heeded_by: tuple[str, ...] = _KERNELS
    #: Whether the installed torch has the switch, and kernels which look at it.
    is_used: bool = True
    #: A getter which costs less, and raises ``RuntimeError`` where both ways to set a precision were used.
    read_fast: Callable[[], Any] | None = None
    #: The dictionary and the name of a variable of Python.
    place: tuple[dict[str, Any], str] | None = None


def _flag(getter: str, setter: str = "", compared: Compared = Compared.BY_VALUE, *, used: bool = True) -> Switch:
    setter = f"_set_{setter or getter}"
    read: Any = getattr(_c, f"_get_{getter}", None)
    write: Any = getattr(_c, setter, None)
    return Switch((f"_C.{setter}",), read, write, compared, is_used=used and read is not None)


def _guarded(read: Callable[[], Any], write: Callable[[Any], object], *setters: str) -> Switch:
    return Switch(tuple(f"_C.{setter}" for setter in setters), read, write, Compared.BY_GUARD)


# The precision of float32, by kind of operator: "ieee", "tf32", "bf16", "none". Torch has an older way, whose getters cost a
# third, but raise for settings which only the newer way can express.
_precision_of: Callable[[str, str], str] = _c._get_fp32_precision_getter
_set_precision_of: Callable[[str, str, str], object] = _c._set_fp32_precision_setter


def _precision(backend: str, operator: str, *others: str, compared: Compared = Compared.BY_VALUE) -> Switch:
    read, write = functools.partial(_precision_of, backend, operator), functools.partial(_set_precision_of, backend, operator)
    return Switch(("_C._set_fp32_precision_setter", *others), read, write, compared)


#: In place of the value of a variable which is missing.
_ABSENT: Any = object()


def _variable(module: Any, name: str, setter: str) -> Switch:
    variables = vars(module)

    def write(value: Any) -> None:
        if value is _ABSENT:
            variables.pop(name, None)
        else:
            variables[name] = value

    read = functools.partial(variables.get, name, _ABSENT)
    return Switch((f"backends.{setter}",), read, write, heeded_by=(), place=(variables, name))


_CUDNN_SETTERS = ("_C._set_cudnn_allow_tf32", "backends.cudnn.rnn.fp32_precision")


def _cudnn_precision() -> bool | tuple[str, str]:
    try:
        allow_tf32: bool = _c._get_cudnn_allow_tf32()
    except RuntimeError:
        return _precision_of("cuda", "conv"), _precision_of("cuda", "rnn")
    return allow_tf32


def _set_cudnn_precision(allow_tf32: bool | tuple[str, str]) -> None:
    if isinstance(allow_tf32, bool):
        _c._set_cudnn_allow_tf32(allow_tf32)
    else:
        for operator, precision in zip(("conv", "rnn"), allow_tf32, strict=True):
            _set_precision_of("cuda", operator, precision)


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


def _reduced_precision(dtype: str) -> Switch:
    setter = getattr(_c, name := f"_set_cublas_allow_{dtype}_reduced_precision_reduction")
    return _guarded(getattr(_c, name.replace("set", "get", 1)), lambda values: setter(*values), name)


def _set_num_threads(count: int) -> None:
    # On the main thread alone, for a part of it belongs to the whole process.
    if threading.get_ident() == threading.main_thread().ident:
        torch.set_num_threads(count)


_CUDA: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_ARM = platform.machine() in ("aarch64", "arm64")
_ROCM = torch.version.hip is not None
_einsum: Any = torch.backends.opt_einsum

#: The table. Switches of 2.11 to 2.15; the depthwise kernel since 2.13; the fourth flash attention, grouped products and
#: embedded kernels since 2.15.
SWITCHES: tuple[Switch, ...] = (
    # Defaults for operators without a precision of their own, the widest first.
    _precision("generic", "all", "backends.fp32_precision", compared=Compared.BY_OTHERS),
    _precision("cuda", "all", "backends.cudnn.fp32_precision", compared=Compared.BY_OTHERS),
    _precision("mkldnn", "all", "backends.mkldnn.fp32_precision", compared=Compared.BY_OTHERS),
    # Read by a dispatcher to kernels, or by a kernel.
    _flag("flash_sdp_enabled", "sdp_use_flash"),
    _flag("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    _flag("math_sdp_enabled", "sdp_use_math"),
    _flag("cudnn_sdp_enabled", "sdp_use_cudnn"),
    _flag("overrideable_sdp_enabled", "sdp_use_overrideable"),
    _flag("fa3_sdp_enabled", "sdp_use_fa3"),
    _flag("fa4_sdp_enabled", "sdp_use_fa4"),
    _flag("math_sdp_allow_fp16_bf16_reduction"),
    _flag("mkldnn_enabled"),
    _flag("mkldnn_deterministic"),
    _flag("nnpack_enabled"),
    _flag("cublas_allow_fp16_accumulation"),
    _flag("cudnn_enabled"),
    _flag("cudnn_benchmark"),
    _flag("cudnn_deterministic"),
    _flag("sdp_priority_order", used=_CUDA),
    _flag("cpu_allow_fp16_reduced_precision_reduction", used=_ARM),  # others refuse to reduce in fp16
    _flag("miopen_immediate", used=_ROCM),
    _flag("onednn_allow_tf32", used=torch.xpu._is_compiled()),
    _precision("mkldnn", "matmul"),
    Switch(_CUDNN_SETTERS, _cudnn_precision, _set_cudnn_precision, read_fast=_c._get_cudnn_allow_tf32),
    _precision("mkldnn", "conv")._replace(heeded_by=_LAYERS),
    _precision("mkldnn", "rnn")._replace(heeded_by=_LAYERS),
    # An attribute set on the module ``torch.backends.opt_einsum`` hides the variable behind it, which
    # ``torch.backends.opt_einsum.flags`` sets.
    _variable(_einsum, "enabled", "opt_einsum._set_enabled"),
    _variable(_einsum, "strategy", "opt_einsum._set_strategy"),
    _variable(_einsum.m, "enabled", "opt_einsum._set_enabled"),
    _variable(_einsum.m, "strategy", "opt_einsum._set_strategy"),
    _variable(torch.backends.mha, "_is_fastpath_enabled", "mha.set_fastpath_enabled"),
    # The first two of those with a guard are compared at the end of a recompute, too.
    _guarded(torch.get_default_dtype, torch.set_default_dtype, "_set_default_dtype", "_set_default_tensor_type"),
    _guarded(_c._get_deterministic_algorithms, _set_deterministic, "_set_deterministic_algorithms"),
    _guarded(_c._get_deterministic_algorithms_warn_only, _set_warn_only, "_set_deterministic_algorithms"),
    _guarded(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, "set_autocast_cache_enabled"),
    _guarded(_older_matmul_precision, _set_older_matmul_precision, "_set_float32_matmul_precision"),
    _precision("cuda", "matmul", "_C._set_cublas_allow_tf32", compared=Compared.BY_GUARD),
    _reduced_precision("fp16"),
    _reduced_precision("bf16"),
    _guarded(torch.get_num_threads, _set_num_threads, "set_num_threads"),
    # Without a context manager.
    _flag("blas_preferred_backend", compared=Compared.ON_DEVICES, used=_CUDA),
    _flag("linalg_preferred_backend", compared=Compared.ON_DEVICES, used=_CUDA),
    _flag("sm_carveout_experimental", compared=Compared.ON_DEVICES, used=_CUDA),
    _flag("cublaslt_prefer_grouped_gemm", compared=Compared.ON_DEVICES, used=_CUDA),
    _flag("cudnn_depthwise_kernel", compared=Compared.ON_DEVICES, used=_CUDA),
    _flag("native_aot_enabled", compared=Compared.ON_DEVICES, used=_CUDA),
    _flag("rocm_fa_preferred_backend", compared=Compared.ON_DEVICES, used=_ROCM),
)


def _used(compared: Compared) -> list[Switch]:
    return [switch for switch in SWITCHES if switch.is_used and switch.compared is compared]


_DEFAULTS, _GUARDED, DEVICES = _used(Compared.BY_OTHERS), _used(Compared.BY_GUARD), _used(Compared.ON_DEVICES)
#: Compared by value for every operator which chooses among kernels.
COMMON = [switch for switch in _used(Compared.BY_VALUE) if switch.heeded_by == _KERNELS]
#: Compared by value for other operators, or a few of these, and then along with the common ones.
FURTHER = [switch for switch in _used(Compared.BY_VALUE) if switch.heeded_by != _KERNELS]


def heeds(name: str, switches: Sequence[Switch]) -> bool:
    """Whether an operator of ``aten``, by its name, heeds any of some switches."""
    return any(part in name for switch in switches for part in switch.heeded_by)


#: Whether a CUDA device is in use; the call initialises no device.
are_devices_in_use: Callable[[], bool] = torch.cuda.is_initialized


# Comparing and setting switches


def _reader(*which: Switch, fast: bool = True) -> Callable[[], list[Any]]:
    """Returns one expression which reads every switch, as if written out: a loop costs half as much again."""
    names: dict[str, Any] = {"absent": _ABSENT}
    terms = []
    for index, switch in enumerate(which):
        if switch.place is None:
            names[f"get_{index}"] = (switch.read_fast if fast else None) or switch.read
            terms.append(f"get_{index}()")
        else:
            names[f"there_{index}"], name = switch.place
            terms.append(f"there_{index}[{name!r}]" if name in switch.place[0] else f"there_{index}.get({name!r}, absent)")
    read: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(terms)}]", names)
    return read


#: Reads the switches unknown to guards; raises ``RuntimeError`` where both ways to set a precision were used.
read_fast = _reader(*COMMON, *FURTHER)
_read_slow = _reader(*COMMON, *FURTHER, fast=False)
#: Reads the first of these: the switches for operators which heed no rarer ones.
read_common = _reader(*COMMON)
_read_defaults = _reader(*_DEFAULTS)
_read_guarded = _reader(*_GUARDED)
_read_device_switches = _reader(*DEVICES)
# The first two guarded switches are compared after a recompute, for functions tend to set them without a context manager, and
# an early stop leaves these half done.
_get_default_dtype, _are_deterministic = (switch.read for switch in _GUARDED[:2])


def _read_unguarded() -> list[Any]:
    try:
        return read_fast()
    except RuntimeError:
        return _read_slow()


def read_devices() -> list[Any] | None:
    """Returns the switches for devices; None where no device is in use."""
    return _read_device_switches() if DEVICES and are_devices_in_use() else None


def _write(which: Sequence[Switch], values: Sequence[Any]) -> None:
    for switch, value in zip(which, values, strict=True):
        if value != switch.read():
            switch.write(value)


class Snapshot:
    """The values of the switches at some moment."""

    __slots__ = ("_defaults", "common", "devices", "guard", "guarded", "unguarded")

    def __init__(self, unguarded: list[Any], devices: list[Any] | None) -> None:
        self.guard = GlobalStateGuard()
        self.unguarded = unguarded
        self.common = unguarded[: len(COMMON)]
        self.guarded = _read_guarded()
        self.devices = devices
        self._defaults = _read_defaults()

    def holds(self, unguarded: list[Any]) -> bool:
        """Whether the switches have these values now; false also where gradient mode or autocast are not the same."""
        return self.guard.check() and unguarded == self.unguarded

    def write(self) -> None:
        # A default comes before the switches which it holds for. A switch of the old kind may move a switch of the new kind, so
        # a second pass sets the rest.
        for _ in range(2):
            _write(_DEFAULTS, self._defaults)
            _write([*COMMON, *FURTHER], self.unguarded)
            _write(_GUARDED, self.guarded)
        if self.devices is not None:
            _write(DEVICES, self.devices)


#: The captured switches, and the different switches found before a recompute, if any.
Undo = tuple[Snapshot, "Snapshot | None"]

_latest = Snapshot(_read_unguarded(), None)


def capture() -> Snapshot:
    """Returns the switches; regions with the same switches share one snapshot."""
    global _latest
    latest, unguarded = _latest, _read_unguarded()
    devices = read_devices()
    if not latest.holds(unguarded) or devices != latest.devices:
        latest = _latest = Snapshot(unguarded, devices)
    return latest


def enter(captured: Snapshot) -> Undo:
    """Restores the switches, in the same gradient mode; returns the undo for :func:`leave`."""
    unguarded = _read_unguarded()
    devices = None if captured.devices is None else _read_device_switches()
    if captured.holds(unguarded) and devices == captured.devices:
        return captured, None
    before = Snapshot(unguarded, devices)
    try:
        captured.write()
    except BaseException:  # Ctrl-C
        before.write()
        raise
    return captured, before


def leave(undo: Undo) -> None:
    """Restores the switches as of before :func:`enter`."""
    captured, before = undo
    if before is not None:
        before.write()
    elif _get_default_dtype() is not captured.guarded[0] or _are_deterministic() is not captured.guarded[1]:
        captured.write()


# State of the thread


class ThreadState(NamedTuple):
    """A row for state of a thread that is absent in the ordinary case, of which None tells."""

    is_there: Callable[[], bool]
    read: Callable[[], Any]
    #: Restores a value; returns the undo for ``leave``, None where nothing had to change.
    enter: Callable[[Any], Any]
    leave: Callable[[Any], None]

    def capture(self) -> Any:
        """Returns the state; None where absent."""
        return self.read() if self.is_there() else None


_DEVICE_TYPES = tuple(
    device_type
    for device_type in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "maia", "ipu", "xla", "privateuseone")
    if torch.amp.is_autocast_available(device_type)
)
# Whether casts of weights are cached, and (enabled, dtype) for each device type in order.
_Casts = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]


_read_off: Callable[[], Any] = lambda: tuple((False, torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES)  # noqa: E731
# The default dtype of each type. A region outside of autocast may enter autocast without a dtype, and gets this one, in a
# backward under autocast too. (In a block of autocast, the present dtype is that of the block.)
_OFF = made_apart(_read_off) if is_any_autocast_enabled() else _read_off()


def _read_casts() -> _Casts:
    return torch.is_autocast_cache_enabled(), tuple(
        (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)) for device_type in _DEVICE_TYPES
    )


def _write_casts(casts: _Casts) -> None:
    cache_enabled, settings = casts
    torch.set_autocast_cache_enabled(cache_enabled)
    for device_type, (enabled, dtype) in zip(_DEVICE_TYPES, settings, strict=True):
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


def _enter_casts(captured: _Casts | None) -> _Casts:
    before = _read_casts()
    # A level of nesting, as of ``torch.autocast``: casts are cached within, and dropped with the last level.
    torch.autocast_increment_nesting()
    _write_casts((before[0], _OFF) if captured is None else captured)
    return before


def _leave_casts(before: _Casts) -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _write_casts(before)


# Modes, outermost first, and last the mode of ``torch.set_default_device``, noted in a second place besides, or None.
_Modes = tuple[object, ...]


def _read_modes() -> _Modes:
    return (*map(function_mode_at, range(num_function_modes())), global_device_mode())


def _write_modes(modes: _Modes) -> None:
    # The same objects: to enter a mode again would change its state, and the mode may be in use.
    *pushed, device_mode = modes
    while num_function_modes():
        pop_function_mode()
    for mode in pushed:
        push_function_mode(mode)
    set_global_device_mode(device_mode)


def _enter_modes(captured: _Modes | None) -> _Modes | None:
    before, captured = _read_modes(), captured or (None,)
    if len(before) == len(captured) and all(map(operator.is_, before, captured)):
        return None
    _write_modes(captured)
    return before


def _are_modes_there() -> bool:
    return num_function_modes() > 0 or global_device_mode() is not None


#: Autocast of every device type, with the cache of cast weights.
AUTOCAST = ThreadState(is_any_autocast_enabled, _read_casts, _enter_casts, _leave_casts)
#: Function modes (``torch.overrides.TorchFunctionMode``), of which the default device is one.
FUNCTION_MODES = ThreadState(_are_modes_there, _read_modes, _enter_modes, _write_modes)
THREAD_STATES = (AUTOCAST, FUNCTION_MODES)
