"""Ambient state: a rerun sees what forward saw, whatever is in force around backward, which finds it again afterwards."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from typing import Any

import pytest
import torch
import torch.utils._device
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.behaviours.runs import FORMS, SILENT, Run, assert_as_eager, gradients, runs
from tests.measure import CountOps, Log, leaf
from tests.test_threads import in_threads

# Settings that can be read and written


def attribute(owner: Any, name: str, other: Any) -> tuple[Any, Any, Any]:
    """Returns how to read and how to write an attribute, and a value that is not its default."""
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name), other


def autocast(device_type, dtype):
    """The same for enabling autocast of a device type with some dtype."""

    def write(setting):
        torch.set_autocast_enabled(device_type, setting[0])
        torch.set_autocast_dtype(device_type, setting[1])

    return lambda: (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)), write, (True, dtype)


def private(getter, setter, other):
    """The same for a switch of which torch has no public getter, or none without side effects."""
    return getattr(torch._C, getter), getattr(torch._C, setter), other


cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
opt_einsum, mha, nnpack = torch.backends.opt_einsum, torch.backends.mha, torch.backends.nnpack

AUTOCAST = {
    "autocast of XPU": autocast("xpu", torch.float16),
    "autocast of MPS": autocast("mps", torch.bfloat16),
}
SETTINGS = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "sdpa flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    "sdpa memory efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    "sdpa math": (cuda.math_sdp_enabled, cuda.enable_math_sdp, False),
    "sdpa cuDNN": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
    "sdpa overrideable": private("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable", False),
    "sdpa flash 3": private("_get_fa3_sdp_enabled", "_set_sdp_use_fa3", True),
    **(
        {"sdpa flash 4": private("_get_fa4_sdp_enabled", "_set_sdp_use_fa4", True)}
        if hasattr(torch._C, "_get_fa4_sdp_enabled")
        else {}
    ),
    "sdpa reductions in half precision": (
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
    ),
    **(
        {"sdpa priority": (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, [2, 1, 0, 3, 4])}
        if cuda.is_built()
        else {}
    ),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "tf32 of matmul": attribute(cuda.matmul, "allow_tf32", True),
    "tf32 of cuDNN": attribute(cudnn, "allow_tf32", False),
    "fp32_precision of CUDA matmul": attribute(cuda.matmul, "fp32_precision", "tf32"),
    "fp32_precision of mkldnn matmul": attribute(mkldnn.matmul, "fp32_precision", "bf16"),
    "fp32_precision of mkldnn conv": attribute(mkldnn.conv, "fp32_precision", "bf16"),
    "fp32_precision of mkldnn rnn": attribute(mkldnn.rnn, "fp32_precision", "bf16"),
    "fp16 accumulation": attribute(cuda.matmul, "allow_fp16_accumulation", True),
    "fp16 reduction of matmul": attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduction of matmul": attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "nnpack": (torch._C._get_nnpack_enabled, nnpack.set_flags, False),
    "opt_einsum.enabled": attribute(opt_einsum, "enabled", not opt_einsum.enabled),
    "opt_einsum.strategy": attribute(opt_einsum, "strategy", "optimal"),
    "opt_einsum.set_flags": attribute(opt_einsum.m, "enabled", not opt_einsum.enabled),
    "opt_einsum.set_flags of the strategy": attribute(opt_einsum.m, "strategy", "optimal"),
    "transformers' fast path": (mha.get_fastpath_enabled, mha.set_fastpath_enabled, False),
    "number of threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "cudnn.enabled": attribute(cudnn, "enabled", False),
    "cudnn.benchmark": attribute(cudnn, "benchmark", True),
    "cudnn.deterministic": attribute(cudnn, "deterministic", True),
    "mkldnn.enabled": attribute(mkldnn, "enabled", False),
    "mkldnn.deterministic": attribute(mkldnn, "deterministic", True),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda setting: torch.use_deterministic_algorithms(setting[0], warn_only=setting[1]),
        (True, True),
    ),
}


@contextlib.contextmanager
def written(*settings):
    """Writes the other value of each setting, for a block."""
    before = [read() for read, _, _ in settings]
    try:
        for _, write, other in settings:
            write(other)
        yield
    finally:
        for (_, write, _), value in zip(settings, before, strict=True):
            write(value)


def assert_seen(run, around, *settings):
    """Asserts that a rerun reads what forward read, where the settings are written around forward or around backward."""

    def read():
        return [read() for read, _, _ in settings]

    def function(x):
        seen.append(read())
        return x.sin().exp()

    seen: list[Any] = Log()
    with written(*settings) if around == "forward" else contextlib.nullcontext():
        y = run(function, leaf(3)).sum()
        expected = read()
    with written(*settings) if around == "backward" else contextlib.nullcontext():
        before = read()
        y.backward()
        assert read() == before
    assert before != expected
    assert len(seen) > 1
    assert seen == [expected] * len(seen)


@pytest.mark.parametrize("around", ["forward", "backward"])
@pytest.mark.parametrize("setting", list(SETTINGS))
@runs(torch_fails=SILENT)
def test_setting(run, setting, around):
    assert_seen(run, around, SETTINGS[setting])


# Of many kinds of operators at once
PRECISIONS = {
    "all": attribute(torch.backends, "fp32_precision", "tf32"),
    "mkldnn": attribute(mkldnn, "fp32_precision", "bf16"),
}


@pytest.mark.parametrize("around", ["forward", "backward"])
@pytest.mark.parametrize("kind", list(PRECISIONS))
@runs(torch_fails=SILENT)
def test_precisions_of_many_kinds_of_operators(run, kind, around):
    """They hold where a kind has no precision of its own, and do not hold any more where the block has ended."""
    precision_of = torch._C._get_fp32_precision_getter

    def read():
        return [precision_of(backend, operator) for backend in ("mkldnn", "cuda") for operator in ("matmul", "conv", "rnn")]

    def function(x):
        seen.append(read())
        return x.sin().exp()

    seen: list[Any] = Log()
    first = read()
    with written(PRECISIONS[kind]) if around == "forward" else contextlib.nullcontext():
        y = run(function, leaf(3)).sum()
    with written(PRECISIONS[kind]) if around == "backward" else contextlib.nullcontext():
        before = read()
        y.backward()
        assert read() == before
    assert read() == first
    assert (before != first) == (around == "backward")
    assert len(seen) == 2
    assert seen[0] == seen[1]


@pytest.mark.parametrize("around", ["forward", "backward"])
@runs(*FORMS, torch_fails=SILENT)
def test_autocast_of_several_accelerator_types(run, around):
    assert_seen(run, around, *AUTOCAST.values())


AUTOCAST_CACHE = (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False)


@runs(*FORMS)
def test_autocast_of_cpu(run):
    def program(run):
        layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        x = torch.rand(2, 3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.float16):
            y = run(layer, x)
        return gradients(y, x, *layer.parameters())

    assert_as_eager(program, run)


@runs(*FORMS)
def test_autocast_inside_with_the_dtype_in_force(run):
    """``torch.autocast`` takes its dtype from outside, where backward runs under another one."""

    def program(run):
        layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

        def function(x):
            with torch.autocast("cpu"):
                return layer(x)

        x = torch.rand(2, 3, requires_grad=True)
        y = run(function, x)
        with torch.autocast("cpu", dtype=torch.float16):
            return gradients(y, x, *layer.parameters())

    assert_as_eager(program, run)


@pytest.mark.parametrize("warm", ["forward", "recompute"])
@runs(*FORMS)
def test_autocast_weight_cache(run, warm):
    """Casts of a weight are there before forward and gone before the rerun, or the other way round."""

    def program(run):
        layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        x = torch.rand(2, 3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            other = layer(x).sum() if warm == "forward" else 0
            y = run(layer, x)
            if warm == "recompute":
                other = layer(x).sum()
                y.sum().backward()
        return gradients(y.sum() + other if warm == "forward" else other, x, *layer.parameters())

    assert_as_eager(program, run)


# Defaults of factory functions


def default_device_is(setter, around):
    """Returns a program that asks for the default device in forward and in the rerun, and afterwards."""

    def program(run):
        devices = Log()

        def function(x):
            devices.append((torch.ones(1).device.type, torch.get_default_device().type))
            return x.sin().exp()

        x = leaf(3)
        with setter() if around == "forward" else contextlib.nullcontext():
            y = run(function, x)
        with setter() if around == "backward" else contextlib.nullcontext():
            result = gradients(y, x), torch.get_default_device().type
        return result, *set(devices), torch.ones(1).device.type, torch.get_default_device().type

    return program


@contextlib.contextmanager
def set_default_device():
    torch.set_default_device("meta:0")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("setter", [lambda: torch.device("meta"), set_default_device], ids=["context", "set_default_device"])
@runs(*FORMS)
def test_default_device(run, setter):
    assert_as_eager(default_device_is(setter, "forward"), run)


@pytest.mark.parametrize("form", FORMS)
def test_default_device_set_around_backward(form):
    assert_as_eager(default_device_is(set_default_device, "backward"), Run("ours", form))


# Context variables and modes

_factor: contextvars.ContextVar[float] = contextvars.ContextVar("_factor", default=1.0)


def scaled_by_context(backward):
    """Returns a program that reads a context variable, which is set around forward."""

    def program(run):
        x = leaf(3)
        token = _factor.set(2.0)
        try:
            y = run(lambda x: (x * _factor.get()).sin().exp(), x).sum()
        finally:
            _factor.reset(token)
        backward(y)
        return y, x.grad, _factor.get()

    return program


@runs(*FORMS, torch_fails=SILENT)
def test_context_variable_set_around_forward(run):
    assert_as_eager(scaled_by_context(lambda y: y.backward()), run)


@runs("region", "nested", torch_fails=SILENT)
def test_context_variable_set_around_forward_and_backward_on_another_thread(run):
    assert_as_eager(scaled_by_context(lambda y: in_threads(y.backward)), run)


@runs(torch_fails=SILENT)
def test_context_variable_set_around_backward_where_forward_had_none(run):
    def program(run):
        x = leaf(3)
        y = contextvars.Context().run(run, lambda x: (x * _factor.get()).sin().exp(), x)
        token = _factor.set(2.0)
        try:
            return gradients(y, x)
        finally:
            _factor.reset(token)

    assert_as_eager(program, run)


class Cosine(TorchFunctionMode):
    """Makes every sine a cosine of twice its argument."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.sin:
            return torch.cos(2 * args[0])
        return func(*args, **(kwargs or {}))


def under_function_mode(*around):
    """Returns a program that is under a function mode in some part."""

    def program(run):
        x = leaf(3)
        with Cosine() if "forward" in around else contextlib.nullcontext():
            y = run(lambda x: torch.sin(x).exp(), x)
        with Cosine() if "backward" in around else contextlib.nullcontext():
            return gradients(y, x)

    return program


@pytest.mark.parametrize("around", [["forward"], ["forward", "backward"]], ids="-".join)
@runs(*FORMS, torch_fails=SILENT)
def test_function_mode(run, around):
    """Also where backward is under it: ``Tensor.backward`` goes to the mode, which is suspended meanwhile."""
    assert_as_eager(under_function_mode(*around), run)


@runs(*FORMS)
def test_dispatch_modes_of_forward_do_not_count_the_rerun(run):
    with CountOps() as ops:
        y = run(lambda x: x.sin().exp(), leaf(3))
    y.sum().backward()
    assert (ops.counts["sin"], ops.counts["exp"]) == (1, 1)
