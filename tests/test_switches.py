"""Every switch of the installed torch has a verdict: a recompute sees what forward saw, or a sentence says why it need not."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import ClassVar

import pytest
import torch
import torch.backends.quantized
import torch.backends.xnnpack
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_hooks import _ambient, checkpoint, checkpoint_region
from ckpt_hooks._ambient import devices, switches
from ckpt_hooks._operators.facts import facts_of
from tests.behaviours.test_ambient import AUTOCAST_CACHE, PRECISIONS, SETTINGS, attribute, written
from tests.measure import Log, leaf

#: Restored by a row of the table: seen in a recompute as in forward, and left as found. Tests here and in
#: tests/behaviours/test_ambient.py show each.
RESTORED = {f"torch.{setter}" for switch in switches.SWITCHES for setter in switch.setters}

#: Restored by ``AUTOCAST``, a row for state of the thread.
RESTORED_WITH_AUTOCAST = {"torch._C.set_autocast_dtype", "torch._C.set_autocast_enabled"}

_MODES = "A state of this thread, not of the process, which a frame sets for its recompute by other means."
_ERRORS = "It decides on warnings and errors, not on results."
_AUTOCAST = "Another name for what `set_autocast_enabled` and `set_autocast_dtype` set."
_HOW = "It says how an operator is found or shown, and not what it computes."
_TENSOR = "It changes a tensor, or an object, and no switch."
_MEMORY = "It says where memory is and how long it is kept."
_COMPILER = "It belongs to a compiler, which a region's operators have passed when they run."
_SHARED = "It says who else runs at the same time, and not what an operator computes."

#: Not restored, and why.
NOT_RESTORED = {
    "torch._C._cuda_set_cudnn_benchmark_limit": "It bounds a search, whose result cuDNN keeps from forward to recompute.",
    "torch._C._cuda_set_sync_debug_mode": _ERRORS,
    "torch._C._cudnn_set_conv_benchmark_empty_cache": _MEMORY,
    "torch._C._enable_mobile_interface_call_export": _COMPILER,
    "torch._C._set_autograd_fallback_mode": _ERRORS,
    "torch._C._set_backcompat_broadcast_warn": _ERRORS,
    "torch._C._set_backcompat_keepdim_warn": _ERRORS,
    "torch._C._set_cached_tensors_enabled": _MEMORY,
    "torch._C._set_check_sparse_tensor_invariants": _ERRORS,
    "torch._C._set_conj": _TENSOR,
    "torch._C._set_default_mobile_cpu_allocator": _MEMORY,
    "torch._C._set_deterministic_fill_uninitialized_memory": "It shows in memory alone that nothing was written to.",
    "torch._C._set_dispatch_mode": _MODES,
    "torch._C._set_dtensor_allow_implicit_replication": "Backward of such operators needs it too, and says so where it is off.",
    "torch._C._set_fake_constant": _TENSOR,
    "torch._C._set_fwd_grad_enabled": "Forward mode goes by another way than saved tensors.",
    "torch._C._set_generator_metaclass": _HOW,
    "torch._C._set_grad_enabled": _MODES,
    "torch._C._set_grad_layout_enforcement_enabled": "It is asked when a gradient is accumulated, after any recompute.",
    "torch._C._set_graph_exec_group": _MODES,
    "torch._C._set_graph_executor_optimize": _COMPILER,
    "torch._C._set_meta_in_tls_dispatch_include": _MODES,
    "torch._C._set_multithreading_enabled": _SHARED,
    "torch._C._set_native_aot_unconditional_masked": "It is for torch's own tests, and does nothing without their registry.",
    "torch._C._set_neg": _TENSOR,
    "torch._C._set_only_lift_cpu_tensors": "It goes with fake tensors, which go with a mode.",
    "torch._C._set_override_stale_capture_stream": _SHARED,
    "torch._C._set_print_stack_traces_on_fatal_signal": _ERRORS,
    "torch._C._set_qengine": "It is asked when weights are packed; a quantized operator asks the packed weight.",
    "torch._C._set_should_use_format_with_string_table": _HOW,
    "torch._C._set_skip_next_torch_function": _MODES,
    "torch._C._set_storage_access_error_msg": _TENSOR,
    "torch._C._set_storage_data_ptr_access_error_msg": _TENSOR,
    "torch._C._set_tensor_metadata": _TENSOR,
    "torch._C._set_thread_name": _HOW,
    "torch._C._set_throw_on_mutable_data_ptr": _TENSOR,
    "torch._C._set_torch_function_state": _MODES,
    "torch._C._set_tracing_state": _COMPILER,
    "torch._C._set_value_trace": _COMPILER,
    "torch._C._set_view_replay_enabled": "It says how a view gets its node, which gives the same gradients.",
    "torch._C._set_warnAlways": _ERRORS,
    "torch._C._set_warn_deprecated_on_mutable_data_ptr": _TENSOR,
    "torch._C._set_warn_on_accumulate_grad_stream_mismatch": _ERRORS,
    "torch._C._set_worker_pids": _SHARED,
    "torch._C._set_worker_signal_handlers": _SHARED,
    "torch._C.set_anomaly_enabled": _ERRORS,
    "torch._C.set_autocast_cpu_dtype": _AUTOCAST,
    "torch._C.set_autocast_cpu_enabled": _AUTOCAST,
    "torch._C.set_autocast_gpu_dtype": _AUTOCAST,
    "torch._C.set_autocast_ipu_dtype": _AUTOCAST,
    "torch._C.set_autocast_ipu_enabled": _AUTOCAST,
    "torch._C.set_autocast_xla_dtype": _AUTOCAST,
    "torch._C.set_autocast_xla_enabled": _AUTOCAST,
    "torch._C.set_flush_denormal": "Torch cannot say what it is, so it cannot be put back.",
    "torch._C.set_num_interop_threads": _SHARED,
    "torch._C.set_vital": _HOW,
    "torch.backends.cudnn.benchmark_limit": "It bounds a search, whose result cuDNN keeps from forward to recompute.",
    "torch.backends.quantized.engine": "It is asked when weights are packed; a quantized operator asks the packed weight.",
    "torch.backends.quantized.supported_engines": "It cannot be set.",
    "torch.backends.xnnpack.enabled": "It cannot be set.",
}

#: The same for families of setters, by how their names begin.
NOT_RESTORED_FAMILIES = {
    "torch._C._accelerator_hooks_set_": "Backward runs each node on the device of its forward.",
    "torch._C._cuda_tunableop_set_": "It guides a search, whose result is kept from forward to recompute.",
    "torch._C._debug_set_": _COMPILER,
    "torch._C._dispatch_set_": _ERRORS,
    "torch._C._dispatch_tls_set_": _MODES,
    "torch._C._jit_": _COMPILER,
    "torch._C._logging_set_": _HOW,
    "torch._C._tracer_set_": _COMPILER,
    "torch.backends.python_native.": "Its switches register and unregister kernels, as `torch.library` does.",
}

#: Functions of ``torch.backends`` that go through setters of ``torch._C``.
WAYS = {
    "enable_cudnn_sdp",
    "enable_flash_sdp",
    "enable_math_sdp",
    "enable_mem_efficient_sdp",
    "set_flags",
    "_set_fp32_precision_setter",
}


def is_setter(name):
    bare = name.lstrip("_")
    return bare.startswith(("set_", "enable_")) or "_set_" in name


def setters():
    """Yields the names of all switches that the installed torch has; those of ``torch._C`` for properties around them."""
    for name in dir(torch._C):
        if is_setter(name) and callable(getattr(torch._C, name)):
            yield f"torch._C.{name}"
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith("torch.backends") or "._" in module_name:
            continue
        for kind in type(module).__mro__:
            if kind.__module__.startswith("torch.backends"):
                for name, value in vars(kind).items():
                    if hasattr(type(value), "__set__"):
                        behind = getattr(getattr(value, "setter", None), "__name__", "")
                        yield f"torch._C.{behind}" if hasattr(torch._C, behind) else f"{module_name}.{name}"
        for name, value in vars(getattr(module, "m", module)).items():
            if callable(value) and getattr(value, "__module__", None) == module_name and is_setter(name) and name not in WAYS:
                yield f"{module_name}.{name}"


def verdicts():
    return {*RESTORED, *RESTORED_WITH_AUTOCAST, *NOT_RESTORED}


def test_every_switch_has_a_verdict():
    """One that a new torch brings gets one here: restored, by a row in ``_ambient/switches.py``, or a sentence why not."""
    for name in ("quantized", "xnnpack", "cudnn.rnn"):
        importlib.import_module(f"torch.backends.{name}")
    found = sorted(set(setters()))
    assert len(found) > 100
    missing = [name for name in found if name not in verdicts() and not name.startswith(tuple(NOT_RESTORED_FAMILIES))]
    assert missing == []


def rows():
    """Returns the rows of the table that hold without a device."""
    used = [switch for switch in switches.SWITCHES if switch.is_used and switch.compared is not switches.Compared.ON_DEVICES]
    return [pytest.param(switch, id=f"{position} {switch.setters[-1]}") for position, switch in enumerate(used)]


#: In force where the precisions of convolutions and recurrent layers are not set, as a test may have set them.
CUDNN_DEFAULT = attribute(torch.backends.cudnn, "fp32_precision", "tf32")


@pytest.mark.parametrize("switch", rows())
def test_every_row_has_a_setting(switch):
    """Which moves it, and which tests of recomputes go through."""
    for _ in range(2):  # an attribute that was never set is there from then on
        before, moved = switch.read(), []
        for setting in (*SETTINGS.values(), *PRECISIONS.values(), AUTOCAST_CACHE, CUDNN_DEFAULT):
            with written(setting):
                moved.append(switch.read() != before)
    assert any(moved)
    assert switch.read() == before


def test_operators_of_other_libraries_may_heed_any_switch():
    """Nothing is known of them."""
    assert facts_of(torch.ops.quantized.add.default).looks_at_all_switches


class Reading(TorchDispatchMode):
    """Reads a switch at each product of matrices and each convolution."""

    def __init__(self, read):
        super().__init__()
        self.read, self.seen = read, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.convolution.default):
            self.seen.append(self.read())
        return func(*args, **(kwargs or {}))


def skip_unheeded(setting, operator):
    """Skips a test of an operator which heeds no switch that a setting moves, by the table."""
    rows = [switch for switch in switches.SWITCHES if switch.is_used]
    before = [switch.read() for switch in rows]
    with written(setting):
        moved = [switch for switch, value in zip(rows, before, strict=True) if switch.read() != value]
    assert moved
    if not any(switch.compared is switches.Compared.BY_GUARD or switches.heeds(operator, [switch]) for switch in moved):
        pytest.skip("the operator does not heed it")


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("operator", ["product", "convolution"])
def test_a_switch_that_moves_inside_a_recorded_region(operator, setting):
    """Each operator is replayed under the switches that it ran under, which move without notice."""
    skip_unheeded(SETTINGS[setting], "mm" if operator == "product" else "convolution")
    read, write, other = SETTINGS[setting]
    x = leaf(3, 3) if operator == "product" else leaf(1, 1, 3, 3)
    weight = torch.ones(x.shape if operator == "product" else (1, 1, 1, 1), dtype=x.dtype)
    run = torch.mm if operator == "product" else torch.nn.functional.conv2d
    first = read()
    with checkpoint_region():
        a = run(x, weight).sin()
        with written((read, write, other)):
            b = run(a, weight).sin()
            moved = read()
        c = run(b, weight).sin()
    with Reading(read) as mode:
        c.sum().backward()
    assert moved != first
    assert mode.seen[:3] == [first, moved, first]
    assert read() == first


class Reads(torch.autograd.Function):
    """Notes a switch in forward, which a replay runs again for what is saved."""

    read: ClassVar = None
    seen: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        Reads.seen.append(Reads.read())
        ctx.save_for_backward(x.sin())
        return x.cos()

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.saved_tensors[0]


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("begins", ["in the region", "before the region"])
def test_a_switch_that_moves_ahead_of_a_custom_function(begins, setting):
    """Its kernels may heed any switch; operators before it heed none."""
    Reads.read, write, other = SETTINGS[setting]
    first, Reads.seen = Reads.read(), []
    moved = (Reads.read, write, other)
    x = leaf(3, 3)
    with written(moved) if begins == "before the region" else contextlib.nullcontext(), checkpoint_region():
        a = x.sin()
        with written(moved) if begins == "in the region" else contextlib.nullcontext():
            b = Reads.apply(a)
        c = b * 2
    c.sum().backward()
    assert len(Reads.seen) == 2
    assert Reads.seen[0] == Reads.seen[1] != first
    assert Reads.read() == first


def device_flags():
    """Returns setters' names and other values of switches for devices that the installed torch has."""
    others = {
        "_set_blas_preferred_backend": lambda: torch._C._BlasBackend.Cublaslt,
        "_set_linalg_preferred_backend": lambda: torch._C._LinalgBackend.Cusolver,
        "_set_cublaslt_prefer_grouped_gemm": lambda: True,
        "_set_cudnn_depthwise_kernel": lambda: "cudnn",
        "_set_native_aot_enabled": lambda: False,
    }
    present = {switch.setters[0].rpartition(".")[2] for switch in switches.DEVICES}
    return [pytest.param(name, other, id=name) for name, other in others.items() if name in present]


@pytest.mark.parametrize("around", ["forward", "backward"])
@pytest.mark.parametrize(("setter", "other"), device_flags())
@pytest.mark.parametrize("kind", ["function", "recorded"])
def test_a_switch_for_devices(monkeypatch, kind, setter, other, around):
    """Where a device is in use; this one is made up."""
    monkeypatch.setattr(switches, "are_devices_in_use", lambda: True)
    monkeypatch.setattr(devices, "names_without_devices", -1)
    for module in (_ambient, switches):  # later tests, without a device, share no values with these
        monkeypatch.setattr(module, "_latest", module._latest)
    read = getattr(torch._C, setter.replace("_set_", "_get_"))
    setting = read, getattr(torch._C, setter), other()
    x, seen = leaf(3, 3), Log()

    def function(x):
        seen.append(read())
        return (x @ x).sin()

    with written(setting) if around == "forward" else contextlib.nullcontext():
        expected = read()
        if kind == "function":
            y = checkpoint(function, x)
        else:
            with checkpoint_region():
                y = (x @ x).sin()
    with written(setting) if around == "backward" else contextlib.nullcontext(), Reading(read) as mode:
        before = read()
        y.sum().backward()
        assert read() == before
    seen = seen[1:] if kind == "function" else mode.seen[:1]
    assert seen == [expected]
    assert before != expected


def test_switches_for_devices_cost_nothing_without_one(monkeypatch):
    """They are not read, for some of them take longer than a whole region may."""
    monkeypatch.setattr(switches, "DEVICES", [switches.Switch((), lambda: pytest.fail("was read"), lambda value: None)])
    monkeypatch.setattr(switches, "are_devices_in_use", lambda: False)
    checkpoint(torch.sin, leaf(3)).sum().backward()


def test_precisions_of_one_backend_that_only_the_newer_way_can_say():
    """The older getter raises, in forward, before the recompute and after it."""
    conv, rnn = torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before, seen = (conv.fp32_precision, rnn.fp32_precision), Log()

    def function(x):
        seen.append((conv.fp32_precision, rnn.fp32_precision))
        return x.sin().sin()

    try:
        conv.fp32_precision, rnn.fp32_precision = "ieee", "tf32"
        with pytest.raises(RuntimeError):
            torch._C._get_cudnn_allow_tf32()
        y = checkpoint(function, leaf(3))
        conv.fp32_precision, rnn.fp32_precision = "tf32", "ieee"
        y.sum().backward()
        assert seen == [("ieee", "tf32")] * 2
        assert (conv.fp32_precision, rnn.fp32_precision) == ("tf32", "ieee")
    finally:
        conv.fp32_precision, rnn.fp32_precision = before
