"""The table of what a function sees besides arguments and random numbers: switches of the process, and state of the thread.

Switches are compared once a region in forward and once a recompute, and read in full only after a move. The getters are
private: the public forms (``torch.backends``, ``torch.nn.attention``) are properties and contexts around them, which take 1 us
instead of 0.04, and some import the compiler; the private forms may go when the public forms cost as little.
``tests/test_switches.py`` fails for a switch of the installed torch which has neither a row here nor a reason there.
"""

from __future__ import annotations

import enum
import platform
import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple

import torch

from ckpt_hooks._torch import modes
from ckpt_hooks._torch import switches as private


class Compared(enum.Enum):
    BY_VALUE = enum.auto()  # once a region, once a recompute, and in recorded regions ahead of operators which heed the switch
    BY_GUARD = enum.auto()  # by a call of 0.13 us for all: once a region, a recompute, and an operator of recorded regions
    ON_DEVICES = enum.auto()  # by value once a region, where a CUDA device is in use: some take 0.5 us to read
    BY_OTHERS = enum.auto()  # not compared: a changed default shows in the switches which inherit it


# Parts of operators' names. An operator with a part in ``_KERNELS`` chooses among kernels, by switches that depend on device,
# dtype and build. A recorded region therefore compares all switches with ``heeded_by=_KERNELS``; ``_LAYERS`` heed more.
_KERNELS = ("attention", "conv", "dot", "gelu", "gru", "linalg", "linear", "lstm", "mm", "mv", "rnn")
_LAYERS = ("conv", "gru", "lstm", "rnn")


class Switch(NamedTuple):
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
    #: Reads quicker, in an expression of this form. Raises ``RuntimeError`` where both ways to set a precision were used.
    read_fast: Any = None
    form: str = "()"


def _flag(getter: str, setter: str = "", *, compared: Compared = Compared.BY_VALUE, used: bool = True) -> Switch:
    setter = f"_set_{setter or getter}"
    read: Any = getattr(private.C, f"_get_{getter}", None)
    write: Any = getattr(private.C, setter, None)
    return Switch((f"_C.{setter}",), read, write, compared, is_used=used and read is not None)


def _flags(*getters: str, compared: Compared = Compared.BY_VALUE, used: bool = True) -> list[Switch]:
    return [_flag(getter, compared=compared, used=used) for getter in getters]


def _guarded(read: Callable[[], Any], write: Callable[[Any], object], *setters: str) -> Switch:
    return Switch(tuple(f"_C.{setter}" for setter in setters), read, write, Compared.BY_GUARD)


def _precision(backend: str, operator: str, *others: str, compared: Compared = Compared.BY_VALUE) -> Switch:
    read, write = partial(private.precision_of, backend, operator), partial(private.set_precision_of, backend, operator)
    return Switch(("_C._set_fp32_precision_setter", *others), read, write, compared)


def _variable(module: Any, name: str, setter: str) -> Switch:
    variables = vars(module)

    def write(value: Any) -> None:
        if value is ...:  # the variable was missing
            variables.pop(name, None)
        else:
            variables[name] = value

    form = f"[{name!r}]" if name in variables else f".get({name!r}, ...)"
    return Switch((setter,), partial(variables.get, name, ...), write, heeded_by=(), read_fast=variables, form=form)


def _read_cudnn_precision() -> tuple[str, str]:
    return private.precision_of("cuda", "conv"), private.precision_of("cuda", "rnn")


def _set_cudnn_precision(precision: bool | tuple[str, str]) -> None:
    if isinstance(precision, bool):
        private.write_cudnn_tf32(precision)
    else:
        private.set_precision_of("cuda", "conv", precision[0])
        private.set_precision_of("cuda", "rnn", precision[1])


def _read_either(read: Callable[[], Any], read_other: Callable[[], Any]) -> Any:
    try:  # an older getter raises where both ways to set a precision were used
        return read()
    except RuntimeError:
        return read_other()


def _reduced_precision(dtype: str) -> Switch:
    setter = getattr(private.C, name := f"_set_cublas_allow_{dtype}_reduced_precision_reduction")
    return _guarded(getattr(private.C, name.replace("set", "get", 1)), lambda values: setter(*values), name)


def _set_num_threads(count: int) -> None:
    # Only on the main thread: another thread would change it for the whole process.
    if threading.get_ident() == threading.main_thread().ident:
        torch.set_num_threads(count)


_CUDA: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_ARM = platform.machine() in ("aarch64", "arm64")
_ROCM = torch.version.hip is not None
_einsum: Any = torch.backends.opt_einsum
_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3", "fa4")

#: The table. Switches of 2.11 to 2.15; the depthwise kernel since 2.13; the fourth flash attention, grouped products and
#: embedded kernels since 2.15.
SWITCHES: tuple[Switch, ...] = (
    # Defaults for operators without a precision of their own, the widest first.
    _precision("generic", "all", "backends.fp32_precision", compared=Compared.BY_OTHERS),
    _precision("cuda", "all", "backends.cudnn.fp32_precision", compared=Compared.BY_OTHERS),
    _precision("mkldnn", "all", "backends.mkldnn.fp32_precision", compared=Compared.BY_OTHERS),
    # Read by a dispatcher to kernels, or by a kernel.
    *[_flag(f"{kernel}_sdp_enabled", f"sdp_use_{kernel}") for kernel in _ATTENTIONS],
    *_flags("math_sdp_allow_fp16_bf16_reduction", "cublas_allow_fp16_accumulation", "nnpack_enabled"),
    *_flags("mkldnn_enabled", "mkldnn_deterministic"),
    *_flags("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    _flag("sdp_priority_order", used=_CUDA),
    _flag("cpu_allow_fp16_reduced_precision_reduction", used=_ARM),  # other processors refuse it
    _flag("miopen_immediate", used=_ROCM),
    _flag("onednn_allow_tf32", used=private.has_xpu),
    _precision("mkldnn", "matmul"),
    Switch(
        ("_C._set_cudnn_allow_tf32", "backends.cudnn.rnn.fp32_precision"),
        lambda: _read_either(private.read_cudnn_tf32, _read_cudnn_precision),
        _set_cudnn_precision,
        read_fast=private.read_cudnn_tf32,
    ),
    _precision("mkldnn", "conv")._replace(heeded_by=_LAYERS),
    _precision("mkldnn", "rnn")._replace(heeded_by=_LAYERS),
    # An attribute set on the module ``torch.backends.opt_einsum`` hides the variable behind it, which
    # ``torch.backends.opt_einsum.flags`` sets.
    _variable(_einsum, "enabled", "backends.opt_einsum._set_enabled"),
    _variable(_einsum, "strategy", "backends.opt_einsum._set_strategy"),
    _variable(_einsum.m, "enabled", "backends.opt_einsum._set_enabled"),
    _variable(_einsum.m, "strategy", "backends.opt_einsum._set_strategy"),
    _variable(torch.backends.mha, "_is_fastpath_enabled", "backends.mha.set_fastpath_enabled"),
    _guarded(torch.get_default_dtype, torch.set_default_dtype, "_set_default_dtype", "_set_default_tensor_type"),
    _guarded(private.read_deterministic, private.write_deterministic, "_set_deterministic_algorithms"),
    _guarded(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, "set_autocast_cache_enabled"),
    _guarded(
        lambda: _read_either(private.read_matmul_precision, lambda: None),
        lambda precision: precision is None or private.write_matmul_precision(precision),
        "_set_float32_matmul_precision",
    ),
    _precision("cuda", "matmul", "_C._set_cublas_allow_tf32", compared=Compared.BY_GUARD),
    _reduced_precision("fp16"),
    _reduced_precision("bf16"),
    _guarded(torch.get_num_threads, _set_num_threads, "set_num_threads"),
    # Switches for which torch has no context manager.
    *_flags("blas_preferred_backend", "linalg_preferred_backend", compared=Compared.ON_DEVICES, used=_CUDA),
    *_flags("sm_carveout_experimental", "cublaslt_prefer_grouped_gemm", compared=Compared.ON_DEVICES, used=_CUDA),
    *_flags("cudnn_depthwise_kernel", "native_aot_enabled", compared=Compared.ON_DEVICES, used=_CUDA),
    _flag("rocm_fa_preferred_backend", compared=Compared.ON_DEVICES, used=_ROCM),
)


def _used(compared: Compared) -> list[Switch]:
    return [switch for switch in SWITCHES if switch.is_used and switch.compared is compared]


_DEFAULTS, _GUARDED, DEVICES = _used(Compared.BY_OTHERS), _used(Compared.BY_GUARD), _used(Compared.ON_DEVICES)
#: Compared by value for every operator which chooses among kernels.
COMMON = [switch for switch in _used(Compared.BY_VALUE) if switch.heeded_by == _KERNELS]
#: Compared by value, along with the common switches, for the few operators which heed them.
FURTHER = [switch for switch in _used(Compared.BY_VALUE) if switch.heeded_by != _KERNELS]
_ON_HOST = [*_DEFAULTS, *COMMON, *FURTHER, *_GUARDED]  # a default comes before the switches which inherit it


def heeds(name: str, switches: Sequence[Switch]) -> bool:
    return any(part in name for switch in switches for part in switch.heeded_by)


#: Whether a CUDA device is in use; the call initialises no device.
are_devices_in_use: Callable[[], bool] = torch.cuda.is_initialized


# Comparing and setting switches


def _reader(switches: Sequence[Switch]) -> Callable[[], list[Any]]:
    """Returns a function of a single expression which reads every switch: a loop takes 50% longer."""
    names: dict[str, Any] = {f"of_{index}": switch.read_fast or switch.read for index, switch in enumerate(switches)}
    read: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(map(add, names, (switch.form for switch in switches)))}]", names)
    return read


#: Reads the switches unknown to guards; raises ``RuntimeError`` where both ways to set a precision were used.
read_fast = _reader([*COMMON, *FURTHER])
#: Reads the common switches alone: for operators which heed no rarer switches.
read_common = _reader(COMMON)


def _read_devices() -> list[Any] | None:
    return _read(DEVICES) if DEVICES and are_devices_in_use() else None


def _read(switches: Sequence[Switch]) -> list[Any]:
    return [switch.read() for switch in switches]


def _write(switches: Sequence[Switch], values: Sequence[Any]) -> None:
    for switch, value in zip(switches, values, strict=True):
        if value != switch.read():
            switch.write(value)


class SwitchValues:
    __slots__ = ("_devices", "_values", "common", "guard", "unguarded")

    def __init__(self) -> None:
        self.guard = private.GlobalStateGuard()
        self._values, self._devices = _read(_ON_HOST), _read_devices()
        self.unguarded = self._values[len(_DEFAULTS) : -len(_GUARDED)]
        self.common = self.unguarded[: len(COMMON)]

    def is_set(self) -> bool:
        """Whether the switches have these values now; false also where gradient mode or autocast are not the same."""
        if not self.guard.check():
            return False
        try:
            unguarded = read_fast()
        except RuntimeError:
            unguarded = _read([*COMMON, *FURTHER])
        return unguarded == self.unguarded and self._devices == (_read_devices() if DEVICES else None)

    def write(self) -> None:
        # A switch of the old kind may move a switch of the new kind, so a second pass sets the rest.
        for _ in range(2):
            _write(_ON_HOST, self._values)
        if self._devices is not None:
            _write(DEVICES, self._devices)


_latest = SwitchValues()


def capture() -> SwitchValues:
    """Returns the switches; regions with the same switches share an object."""
    global _latest
    latest = _latest
    if not latest.is_set():
        latest = _latest = SwitchValues()
    return latest


def capture_guarded() -> SwitchValues:
    """Returns the switches by the guard alone: a recorder compares the others before each operator that heeds them."""
    latest = _latest
    return latest if latest.guard.check() and not are_devices_in_use() else capture()


def enter(captured: SwitchValues) -> tuple[SwitchValues, SwitchValues | None]:
    """Restores the switches, in the same gradient mode; returns them, and the different switches before, if any."""
    if captured.is_set():
        return captured, None
    before = SwitchValues()
    try:
        captured.write()
    except BaseException:  # Ctrl-C
        before.write()
        raise
    return captured, before


def leave(undo: tuple[SwitchValues, SwitchValues | None]) -> None:
    captured, before = undo
    if before is not None:
        before.write()
    elif not captured.guard.check():  # set without a context manager, or half done at an early stop
        captured.write()


# State of the thread


class ThreadState:
    """Rows for state of a thread, and their values where the state is absent, which is the usual case."""

    def __init__(self, is_there: Callable[[], bool], rows: Sequence[Switch], absent: Sequence[Any]) -> None:
        self._is_there, self._rows, self._absent = is_there, rows, absent

    def capture(self) -> Sequence[Any] | None:
        return _read(self._rows) if self._is_there() else None

    def enter(self, captured: Sequence[Any] | None) -> Sequence[Any] | None:
        """Restores a captured state; returns the undo for :meth:`leave`, None where nothing had to change."""
        if captured is None and not self._is_there():
            return None
        before = _read(self._rows)
        _write(self._rows, self._absent if captured is None else captured)
        return before

    def leave(self, before: Sequence[Any] | None) -> None:
        if before is not None:
            _write(self._rows, before)


class _Autocast(ThreadState):
    # Enters a level of nesting, as ``torch.autocast`` does: casts are cached inside, and dropped with the last level.

    def enter(self, captured: Sequence[Any] | None) -> Sequence[Any] | None:
        before = super().enter(captured)
        if before is not None:
            torch.autocast_increment_nesting()
        return before

    def leave(self, before: Sequence[Any] | None) -> None:
        if before is not None and torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        super().leave(before)


def _read_modes() -> list[tuple[int, object]]:
    entered = map(modes.function_mode_at, range(modes.num_function_modes()))
    return [(id(mode), mode) for mode in entered]  # compared by identity


def _write_modes(wanted: list[tuple[int, object]]) -> None:
    # Pushes the same objects: entering a mode again would change its state, and the mode may be in use.
    while modes.num_function_modes():
        modes.pop_function_mode()
    for _, mode in wanted:
        modes.push_function_mode(mode)


_KINDS = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "maia", "ipu", "xla", "privateuseone")
_TYPES = [kind for kind in _KINDS if torch.amp.is_autocast_available(kind)]
_ENABLED = [Switch((), partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)) for kind in _TYPES]
_DTYPES = [Switch((), partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)) for kind in _TYPES]
# The default dtype of each device type, which a region outside of autocast gets if it enters autocast without a dtype, also in
# a recompute under autocast. Read outside of autocast, where the current dtype is the block's.
_OFF = modes.made_apart(lambda: _read(_DTYPES)) if modes.is_any_autocast_enabled() else _read(_DTYPES)

#: Autocast of every device type; the cache of cast weights is a switch of its own.
AUTOCAST = _Autocast(modes.is_any_autocast_enabled, [*_ENABLED, *_DTYPES], [*[False] * len(_ENABLED), *_OFF])
#: Function modes (``torch.overrides.TorchFunctionMode``), the mode of the default device, which torch also keeps elsewhere, and
#: whether torch asks modes and subclasses: it asks none in a backward which begins with a tensor of a subclass.
FUNCTION_MODES = ThreadState(
    lambda: modes.num_function_modes() > 0 or modes.global_device_mode() is not None or not modes.are_functions_asked(),
    [
        Switch((), _read_modes, _write_modes),
        Switch((), modes.global_device_mode, modes.set_global_device_mode),
        Switch((), private.read_function_state, private.write_function_state),
    ],
    [[], None, private.FUNCTIONS_ENABLED],
)
