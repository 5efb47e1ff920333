"""Private parts of what a thread is under: dispatch and function modes, traces, transforms, autocast, devices and streams."""

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

# The flag by which Inductor's code, under ``wrap_inductor_compiled_regions``, asks whether to be called by an operator: whether
# some thread is under a mode (``torch/_inductor/output_code.py``). A mode pushed without ``__enter__`` does not set it.
_python_dispatch = torch.utils._python_dispatch


def is_seen_by_modes() -> bool:
    return bool(getattr(_python_dispatch, "_is_in_torch_dispatch_mode", False))


def be_seen_by_modes(is_seen: bool) -> None:
    _python_dispatch._is_in_torch_dispatch_mode = is_seen


# Whether a dispatch mode is torch's for tracing (fake, functional, proxy), which has a place of its own on the stack; and the
# class of a fake mode's tensors, which have no data.
is_tracing_mode: Callable[[Any], bool] = lambda mode: getattr(mode, "_mode_key", None) is not None  # noqa: E731
FAKE: Any = torch._subclasses.fake_tensor.FakeTensor

# The fake mode that is active on this thread, or None: it has a place of its own.
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
    """Sets the mode of ``torch.set_default_device``, without a change of the stack."""
    if mode is not global_device_mode():
        GLOBAL_DEVICE.device_context = mode


# Whether a ``torch.func`` transform (grad, vjp, ...) is running. Asking for the innermost transform makes a stack for
# this thread, even an empty stack, which autograd copies for each node of each later backward, at 0.1 us.
is_any_transform_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Transforms refuse hooks by this code. Their error has no class of its own, and is known by the code in its traceback.
_REFUSES_HOOKS = inspect.unwrap(torch.autograd.graph.disable_saved_tensors_hooks).__code__


def is_refused_by_transform(error: BaseException) -> bool:
    """Whether an error says that a ``torch.func`` transform refuses saved-tensor hooks."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_transform = any(frame.f_globals.get("__name__", "").startswith("torch._functorch.") for frame in frames[:-1])
    return is_of_transform and frames[-1].f_code is _REFUSES_HOOKS


# Whether operators of this thread are traced into a graph (``make_fx``, and what compilers and exporters build on it). The
# tracer is a dispatch mode with a slot of its own; before dispatch it is a key instead, and function modes are active as well.
# The public way, ``torch.fx.experimental.proxy_tensor.get_proxy_mode``, imports sympy. Remove once it does not.
_slot_of_mode, _TRACER = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_traced() -> bool:
    """Whether operators of this thread are traced, in the presence of a dispatch mode or a function mode."""
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
    # Callers first ask ``is_any_transform_active`` and ``is_mapped``, which cost less than a Python call.
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


# Takes 0.06 us; the public way takes a call for each device type. Remove once the public way is as quick.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# A generator's address.
address_of_generator: Callable[[Any], int] = lambda generator: generator._cdata  # noqa: E731

# The current device of CUDA, and number, device and kind of a device's current stream, without a look whether CUDA is
# initialised and without an object: 0.1 us each. None in builds without CUDA. Remove once the public way is as quick.
cuda_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
cuda_stream_data: Callable[[int], tuple[int, int, int]] | None = getattr(torch._C, "_cuda_getCurrentStream", None)

# The name under which a backend outside of torch has registered, ``"privateuseone"`` if none has.
private_backend_name: Callable[[], str] = torch._C._get_privateuse1_backend_name


def made_apart(make: Callable[[], R]) -> R:
    """Returns the result of a function on a new thread, where no mode, trace, transform or autocast is active."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
