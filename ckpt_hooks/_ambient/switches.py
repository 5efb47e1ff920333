"""The table of what a function sees besides arguments and random numbers: switches of the process, and state of the thread.

Each forward of a region and each recompute compares the switches once, and reads them one by one only if some have changed. The
getters are private: the public forms (``torch.backends``, ``torch.nn.attention``) are properties and contexts around the
private getters, take 1 us instead of 0.04, and in part import the compiler. Remove the private getters once the public forms
cost as little. ``tests/test_switches.py`` fails for a switch of the installed torch which has neither a row in this table nor a
reason in the test.
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


class Compared(enum.Enum):
    # Once per region, once per recompute, and in recorded regions before each operator that heeds the switch.
    BY_VALUE = enum.auto()
    # Once per region, recompute, and operator of a recorded region: a single call of 0.13 us compares all of these switches.
    BY_GUARD = enum.auto()
    ON_DEVICES = enum.auto()  # by value, once per region, if a CUDA device is in use: some take 0.5 us to read
    BY_OTHERS = enum.auto()  # not compared: a changed default shows in the switches that inherit the default


# Parts of operators' names. An operator whose name has a part in ``_KERNELS`` chooses among kernels. Which switches decide
# depends on device, dtype and build, so before such an operator a recorded region compares all switches with
# ``heeded_by=_KERNELS``. Operators with a part in ``_LAYERS`` also heed the switches with ``heeded_by=_LAYERS``.
_KERNELS = ("attention", "conv", "dot", "gelu", "gru", "linalg", "linear", "lstm", "mm", "mv", "rnn")
_LAYERS = ("conv", "gru", "lstm", "rnn")


class Switch(NamedTuple):
    #: The names in ``torch`` of all functions and properties which set the switch. ``tests/test_switches.py`` reads them, to
    #: find setters of torch that no row restores. State of a thread has none: the test looks at the process.
    setters: tuple[str, ...]
    read: Callable[[], Any]
    write: Callable[[Any], object]
    compared: Compared = Compared.BY_VALUE
    #: Parts of the names of the ``aten`` operators that heed the switch, for a switch compared by value. Empty if only Python
    #: functions heed the switch, since a replay runs no Python. Operators of other libraries may heed any switch.
    heeded_by: tuple[str, ...] = _KERNELS
    #: Whether the installed torch has the switch, and has kernels that read the switch.
    is_used: bool = True
    #: A quicker getter or mapping, and the text after its name in an expression that reads the switch (``_reader``). Raises
    #: ``RuntimeError`` if the program has set precisions both in the older and in the newer way.
    read_fast: Any = None
    form: str = "()"


def _flag(getter: str, setter: str = "", *, compared: Compared = Compared.BY_VALUE, used: bool = True) -> Switch:
    setter = f"_set_{setter or getter}"
    read: Any = getattr(modes.C, f"_get_{getter}", None)
    write: Any = getattr(modes.C, setter, None)
    return Switch((f"_C.{setter}",), read, write, compared, is_used=used and read is not None)


def _flags(*getters: str, compared: Compared = Compared.BY_VALUE, used: bool = True) -> list[Switch]:
    return [_flag(getter, compared=compared, used=used) for getter in getters]


def _guarded(read: Callable[[], Any], write: Callable[[Any], object], *setters: str) -> Switch:
    return Switch(tuple(f"_C.{setter}" for setter in setters), read, write, Compared.BY_GUARD)


def _precision(backend: str, operator: str, *others: str, compared: Compared = Compared.BY_VALUE) -> Switch:
    read, write = partial(modes.precision_of, backend, operator), partial(modes.set_precision_of, backend, operator)
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
    return modes.precision_of("cuda", "conv"), modes.precision_of("cuda", "rnn")


def _set_cudnn_precision(precision: bool | tuple[str, str]) -> None:
    if isinstance(precision, bool):
        modes.write_cudnn_tf32(precision)
    else:
        modes.set_precision_of("cuda", "conv", precision[0])
        modes.set_precision_of("cuda", "rnn", precision[1])


def _read_either(read: Callable[[], Any], read_other: Callable[[], Any]) -> Any:
    try:  # an older getter raises if the program has set precisions both in the older and in the newer way
        return read()
    except RuntimeError:
        return read_other()


def _reduced_precision(dtype: str) -> Switch:
    setter = getattr(modes.C, name := f"_set_cublas_allow_{dtype}_reduced_precision_reduction")
    return _guarded(getattr(modes.C, name.replace("set", "get", 1)), lambda values: setter(*values), name)


def _set_num_threads(count: int) -> None:
    # Only on the main thread: a recompute on another thread would change the number for the whole process.
    if threading.get_ident() == threading.main_thread().ident:
        torch.set_num_threads(count)


_CUDA: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_ARM = platform.machine() in ("aarch64", "arm64")
_ROCM = torch.version.hip is not None
_einsum: Any = torch.backends.opt_einsum
_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3", "fa4")

#: The table, with all switches of torch 2.11 to 2.15. Since 2.13 only: the depthwise kernel. Since 2.15 only: the fourth flash
#: attention, grouped products and embedded kernels.
SWITCHES: tuple[Switch, ...] = (
    # Defaults for operators whose own precision is not set, the widest first.
    _precision("generic", "all", "backends.fp32_precision", compared=Compared.BY_OTHERS),
    _precision("cuda", "all", "backends.cudnn.fp32_precision", compared=Compared.BY_OTHERS),
    _precision("mkldnn", "all", "backends.mkldnn.fp32_precision", compared=Compared.BY_OTHERS),
    # Switches read by kernels, or by code that chooses a kernel.
    *[_flag(f"{kernel}_sdp_enabled", f"sdp_use_{kernel}") for kernel in _ATTENTIONS],
    *_flags("math_sdp_allow_fp16_bf16_reduction", "cublas_allow_fp16_accumulation", "nnpack_enabled"),
    *_flags("mkldnn_enabled", "mkldnn_deterministic"),
    *_flags("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    _flag("sdp_priority_order", used=_CUDA),
    _flag("cpu_allow_fp16_reduced_precision_reduction", used=_ARM),  # other processors refuse it
    _flag("miopen_immediate", used=_ROCM),
    _flag("onednn_allow_tf32", used=modes.has_xpu),
    _precision("mkldnn", "matmul"),
    Switch(
        ("_C._set_cudnn_allow_tf32", "backends.cudnn.rnn.fp32_precision"),
        lambda: _read_either(modes.read_cudnn_tf32, _read_cudnn_precision),
        _set_cudnn_precision,
        read_fast=modes.read_cudnn_tf32,
    ),
    _precision("mkldnn", "conv")._replace(heeded_by=_LAYERS),
    _precision("mkldnn", "rnn")._replace(heeded_by=_LAYERS),
    # Each name has two rows: ``torch.backends.opt_einsum.flags`` sets a variable of the inner module, and an attribute that the
    # program sets on ``torch.backends.opt_einsum`` itself hides that variable.
    _variable(_einsum, "enabled", "backends.opt_einsum._set_enabled"),
    _variable(_einsum, "strategy", "backends.opt_einsum._set_strategy"),
    _variable(_einsum.m, "enabled", "backends.opt_einsum._set_enabled"),
    _variable(_einsum.m, "strategy", "backends.opt_einsum._set_strategy"),
    _variable(torch.backends.mha, "_is_fastpath_enabled", "backends.mha.set_fastpath_enabled"),
    _guarded(torch.get_default_dtype, torch.set_default_dtype, "_set_default_dtype", "_set_default_tensor_type"),
    _guarded(modes.read_deterministic, modes.write_deterministic, "_set_deterministic_algorithms"),
    _guarded(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, "set_autocast_cache_enabled"),
    # Left unseen: TF32 set in the newer way and then, by the next region, in the older. The guard takes them for the same, so
    # that region's recompute cannot read the older flag. A getter that tells them apart takes 18 us where it raises.
    _guarded(
        lambda: _read_either(modes.read_matmul_precision, lambda: None),
        lambda precision: precision is None or modes.write_matmul_precision(precision),
        "_set_float32_matmul_precision",
    ),
    _precision("cuda", "matmul", "_C._set_cublas_allow_tf32", compared=Compared.BY_GUARD),
    _reduced_precision("fp16"),
    _reduced_precision("bf16"),
    _guarded(torch.get_num_threads, _set_num_threads, "set_num_threads"),
    # Torch has no context manager for these switches, so they seldom change, and once per region is enough to compare them.
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
_ON_HOST = [*_DEFAULTS, *COMMON, *FURTHER, *_GUARDED]  # in the order of writing: defaults before switches that inherit them


def heeds(name: str, switches: Sequence[Switch]) -> bool:
    return any(part in name for switch in switches for part in switch.heeded_by)


#: Whether a CUDA device is in use; the call initialises no device.
are_devices_in_use: Callable[[], bool] = torch.cuda.is_initialized


def _reader(switches: Sequence[Switch]) -> Callable[[], list[Any]]:
    """Returns a function with a single expression to read every switch, since a loop takes 50% longer."""
    names: dict[str, Any] = {f"of_{index}": switch.read_fast or switch.read for index, switch in enumerate(switches)}
    read: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(map(add, names, (switch.form for switch in switches)))}]", names)
    return read


#: Reads the switches that no guard compares; raises ``RuntimeError`` as :attr:`Switch.read_fast` says.
read_fast = _reader([*COMMON, *FURTHER])
#: Reads only the common switches, for operators that heed no others.
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
        self.guard = modes.GlobalStateGuard()
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
        # Torch has older and newer setters of a precision. A write by an older setter may change a switch that was written
        # before, so a second pass corrects such switches.
        for _ in range(2):
            _write(_ON_HOST, self._values)
        if self._devices is not None:
            _write(DEVICES, self._devices)


_latest = SwitchValues()


def capture() -> SwitchValues:
    """Returns the values of the switches; regions with equal values share an object."""
    global _latest
    latest = _latest
    if not latest.is_set():
        latest = _latest = SwitchValues()
    return latest


def capture_guarded() -> SwitchValues:
    """Returns the switches after a look at the guard only: a recorder compares other switches before each operator."""
    latest = _latest
    return latest if latest.guard.check() and not are_devices_in_use() else capture()


def enter(captured: SwitchValues) -> tuple[SwitchValues, SwitchValues | None]:
    """Restores the switches, in the same gradient mode; returns the values now, and the values before if they differed."""
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
    elif not captured.guard.check():  # the function set a switch and did not set it back, or an early stop came in between
        captured.write()


# State of the thread


class ThreadState:
    """Rows for a state of the thread, and the values of the rows while the state is absent, as it usually is."""

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
    # Enters a level of nesting, as ``torch.autocast`` does: autocast caches casts inside, and drops them with the last level.

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
    return [(id(mode), mode) for mode in entered]  # the ``id`` decides comparisons, so no ``__eq__`` of a mode is called


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
# The autocast dtypes outside of any autocast block. If a forward outside of autocast enters autocast without a dtype, it gets
# one of these. Its recompute has to get the same, even inside an autocast block. They are read on a thread without autocast,
# since in a block torch returns the block's dtype.
_OFF = modes.made_apart(lambda: _read(_DTYPES)) if modes.is_any_autocast_enabled() else _read(_DTYPES)

#: Autocast of every device type. The cache of cast weights has a row in ``SWITCHES`` instead.
AUTOCAST = _Autocast(modes.is_any_autocast_enabled, [*_ENABLED, *_DTYPES], [*[False] * len(_ENABLED), *_OFF])
#: Function modes (``torch.overrides.TorchFunctionMode``); the mode of the default device, which torch also keeps apart from the
#: stack of modes; and whether torch asks modes and subclasses, since a backward that starts at a tensor subclass asks none.
FUNCTION_MODES = ThreadState(
    lambda: modes.num_function_modes() > 0 or modes.global_device_mode() is not None or not modes.are_functions_asked(),
    [
        Switch((), _read_modes, _write_modes),
        Switch((), modes.global_device_mode, modes.set_global_device_mode),
        Switch((), modes.read_function_state, modes.write_function_state),
    ],
    [[], None, modes.FUNCTIONS_ENABLED],
)
