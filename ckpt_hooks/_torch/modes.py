"""Private parts of what operators run under: modes, traces, transforms, autocast, torch's switches, devices and streams."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

R = TypeVar("R")

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

# The dispatch modes that are active on this thread, from the outermost. Remove once the public way is as quick. Entering a mode
# by its own methods also sets flags, at 1.6 us, by which compiled functions know that they run under a mode.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
dispatch_mode_at: Callable[[int], Any] = torch._C._get_dispatch_stack_at
push_dispatch_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
pop_dispatch_mode: Callable[[None], Any] = torch._C._pop_torch_dispatch_stack

# Under ``wrap_inductor_compiled_regions``, Inductor's code runs inside of an operator if a flag says that some thread is under
# a mode (``torch/_inductor/output_code.py``). A mode pushed without ``__enter__`` does not set the flag, so regions set it.
_python_dispatch = torch.utils._python_dispatch


def is_seen_by_modes() -> bool:
    return bool(getattr(_python_dispatch, "_is_in_torch_dispatch_mode", False))


def be_seen_by_modes(is_seen: bool) -> None:
    _python_dispatch._is_in_torch_dispatch_mode = is_seen


# Whether a dispatch mode is torch's for tracing (fake, functional, proxy), which has a place of its own on the stack; and the
# class of a fake mode's tensors, which have no data.
is_tracing_mode: Callable[[Any], bool] = lambda mode: getattr(mode, "_mode_key", None) is not None  # noqa: E731
FAKE: Any = torch._subclasses.fake_tensor.FakeTensor

# The fake mode that is active on this thread, or None, read from its own place on the stack.
active_fake_mode: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)

# The code that runs while a module is called, in a Python frame which has the module as ``self``.
MODULE_CALL: Any = torch.nn.Module._call_impl.__code__

# A context in which calls go past function modes.
PastFunctionModes: Any = torch._C.DisableTorchFunction

# Excludes a key of the dispatcher on this thread, or includes it again.
exclude_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
is_key_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included

# Active ``TorchFunctionMode`` objects (a default device is one), outermost first.
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
function_mode_at: Callable[[int], object] = torch._C._get_function_stack_at

# Whether function modes and the ``__torch_function__`` of subclasses are asked on this thread.
are_functions_asked: Callable[[], bool] = torch._C._is_torch_function_enabled

# Pushes and pops a mode without ``__enter__`` and ``__exit__``, which change the state of some modes.
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], object] = torch._C._pop_torch_function_stack

# ``device_context`` is the mode that ``torch.set_default_device`` has pushed on this thread.
GLOBAL_DEVICE: Any = torch._GLOBAL_DEVICE_CONTEXT


def global_device_mode() -> object | None:
    """Returns the mode pushed on this thread by ``torch.set_default_device``; ``torch.get_default_device`` asks it."""
    return getattr(GLOBAL_DEVICE, "device_context", None)


def set_global_device_mode(mode: object | None) -> None:
    """Sets the mode of ``torch.set_default_device``, without changing the stack of function modes."""
    if mode is not global_device_mode():
        GLOBAL_DEVICE.device_context = mode


# Whether a ``torch.func`` transform (grad, vjp, ...) is running. A call for the innermost transform would make a stack for this
# thread, even if it stays empty, and autograd would copy the stack for each node of each later backward, at 0.1 us.
is_any_transform_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Transforms refuse saved-tensor hooks by this function. The error has no class of its own, so the code at the end of its
# traceback tells it from other errors.
_REFUSES_HOOKS = inspect.unwrap(torch.autograd.graph.disable_saved_tensors_hooks).__code__


def is_refused_by_transform(error: BaseException) -> bool:
    """Whether an error says that a ``torch.func`` transform refuses saved-tensor hooks."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_transform = any(frame.f_globals.get("__name__", "").startswith("torch._functorch.") for frame in frames[:-1])
    return is_of_transform and frames[-1].f_code is _REFUSES_HOOKS


# Whether operators of this thread are traced into a graph (``make_fx``, and what compilers and exporters build on it). The
# tracer is a dispatch mode with a slot of its own; with ``pre_dispatch=True`` it is a key of the dispatcher instead.
# The public way, ``torch.fx.experimental.proxy_tensor.get_proxy_mode``, imports sympy. Remove once it does not.
_slot_of_mode, _TRACER = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_traced() -> bool:
    """Whether operators of this thread are traced, by a tracer of either kind."""
    return _slot_of_mode(_TRACER) is not None or _is_included(_BEFORE_DISPATCH)


_innermost_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
_pop_transform: Callable[[], object] = torch._C._functorch.pop_dynamic_layer_stack
_push_transform: Callable[[Any], int] = torch._C._functorch.push_dynamic_layer_stack

# ``is_grads_batched`` maps by another vmap, under which random operators refuse to run even where nothing is batched. Torch
# returns that vmap's level only from the calls that change it.
_enter_batched_grads, _leave_batched_grads = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting
is_mapped: Callable[[], bool] = partial(_is_included, torch._C._dispatch_key_parse("VmapMode"))


def suspend_transforms() -> tuple[list[object], int]:
    """Takes every ``torch.func`` transform, and every map over gradients, off this thread."""
    # Callers ask ``is_any_transform_active`` and ``is_mapped`` before, which cost less than this call.
    # The rerun of a region runs outside of transforms, as forward did, although backward may run under one:
    # ``torch.autograd.grad(..., is_grads_batched=True)`` maps over the gradients only.
    level = _enter_batched_grads() - 1
    for _ in range(level + 1):
        _leave_batched_grads()
    return [_pop_transform() for _ in iter(_innermost_transform, None)], level


def resume_transforms(suspended: tuple[list[object], int]) -> None:
    transforms, level = suspended
    for transform in reversed(transforms):
        _push_transform(transform)
    for _ in range(level):
        _enter_batched_grads()


# The getters and setters of torch's switches take a twentieth of the time of the public forms. Most are looked up by name.
C: Any = torch._C

# A guard compares torch's global state with the state when the guard was made, as compiled code does, and imports no compiler.
# It also compares autocast and gradient mode, which have no setters here. In torch 2.11 to 2.15.
GlobalStateGuard: Any = torch._C._dynamo.guards.GlobalStateGuard

# The precision of float32, by kind of operator: "ieee", "tf32", "bf16", "none". The older getters below take a third of the
# time, but raise for settings which only this newer way can express.
precision_of: Callable[[str, str], str] = C._get_fp32_precision_getter
set_precision_of: Callable[[str, str, str], object] = C._set_fp32_precision_setter

read_cudnn_tf32: Callable[[], bool] = C._get_cudnn_allow_tf32
write_cudnn_tf32: Callable[[bool], object] = C._set_cudnn_allow_tf32

read_matmul_precision: Callable[[], str] = C._get_float32_matmul_precision
write_matmul_precision: Callable[[str], object] = C._set_float32_matmul_precision

read_function_state: Callable[[], Any] = C._get_torch_function_state
write_function_state: Callable[[Any], object] = C._set_torch_function_state
FUNCTIONS_ENABLED: Any = C._TorchFunctionState.ENABLED

has_xpu: bool = torch.xpu._is_compiled()


def read_deterministic() -> tuple[bool, bool]:
    return C._get_deterministic_algorithms(), C._get_deterministic_algorithms_warn_only()


def write_deterministic(values: tuple[bool, bool]) -> None:
    C._set_deterministic_algorithms(values[0], warn_only=values[1])


# Takes 0.06 us; the public way takes a call for each device type. Remove once the public way is as quick.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# The address of a generator in C++: several Python objects may stand for the same generator.
address_of_generator: Callable[[Any], int] = lambda generator: generator._cdata  # noqa: E731

# The current device of CUDA; and the number, device and kind of a device's current stream. Both calls skip the check that CUDA
# is initialized, and build no object: 0.1 us each. None in builds without CUDA. Remove once the public way is as quick.
cuda_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
cuda_stream_data: Callable[[int], tuple[int, int, int]] | None = getattr(torch._C, "_cuda_getCurrentStream", None)

# The name under which a backend outside of torch has registered, ``"privateuseone"`` if none has.
private_backend_name: Callable[[], str] = torch._C._get_privateuse1_backend_name


def made_apart(make: Callable[[], R]) -> R:
    """Returns the result of a function on a new thread, where no mode, trace, transform or autocast is active."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
