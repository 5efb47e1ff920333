"""What programs run: operators, custom functions and TorchScript, whose calls are diverted to a watcher of the package.

A handler is set once, at the first region that watches, and stays: attributes set and deleted often on a base class slow
every subclass for good on Python 3.13. While no watcher is at work, a plain call pays for a single check.
"""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, _SingleLevelFunction
from torch.utils.hooks import RemovableHandle

from .compiling import skipped

# The classes of operators: overloads, higher-order operators, and packets of the overloads of a name. Remove once public.
OVERLOAD: Any = torch._ops.OpOverload
OPERATORS: Any = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
Operator = torch._ops.OpOverload | torch._ops.HigherOrderOperator  # for type checkers
OPERATOR_PACKET: Any = torch._ops.OpOverloadPacket

# Whether an operator has an effect that must not be repeated: the effect is registered by ``torch.library``, or an argument is
# an object of TorchBind. ``import torch`` loads the module; torch's own policies ask the same function since 2.15.
has_effects: Callable[[Any], bool] = torch._higher_order_ops.effects.has_effects

# Waits until a collective has filled a tensor, and returns the tensor. A second wait does no harm. Remove once the operator is
# public.
wait_for_collective: Any = lambda tensor: torch.ops._c10d_functional.wait_tensor.default(tensor)  # noqa: E731

# Whether ``torch.jit.trace`` is at work, which records each look at a size as an operator. Remove once the
# public ``torch.jit.is_tracing`` is as quick.
is_jit_tracing: Callable[[], bool] = torch._C._is_tracing

# Calls of custom functions are diverted. Remove once torch tells dispatch modes of custom functions.
# 2.11 to 2.14: ``Function.apply`` calls this base method, so that ``apply = F.apply``, bound early, is diverted too.
# 2.15: ``Function.apply`` is this method, and binds defaults of arguments itself; names bound before the first region skip the
# diversion.
IS_BOUND_EARLY = isinstance(vars(torch.autograd.Function)["apply"], types.ClassMethodDescriptorType)
_apply: Callable[[None, Any], Callable[..., Any]] = torch._C._FunctionBase.__dict__["apply"].__get__


def apply(function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a custom function, undiverted; autograd calls pack hooks for what the function saves from this frame of Python."""
    return _apply(None, function)(*args, **kwargs)


#: The code of :func:`apply`, by which a pack hook knows its caller.
APPLY_CODE = apply.__code__


def has_setup_context(function: Any) -> bool:
    """Whether a custom function has a ``setup_context``: then its forward gets no ``ctx``."""
    return function.setup_context is not _SingleLevelFunction.setup_context


_Find = Callable[[Any], Callable[..., Any] | None]
# Returns the callable to use in place of a custom function's ``apply``, or None; set by :func:`divert_functions`.
_find: _Find = lambda function: None  # noqa: E731
_missed: Callable[[Any], None] = lambda function: None  # noqa: E731

#: The watchers at work in the process: while there is none, a call of a custom function runs undiverted.
AT_WORK: set[weakref.ref[Any]] = set()


def bound(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a call with defaults, where forward gets no ``ctx``, as torch binds them."""
    if not (IS_BOUND_EARLY and has_setup_context(function)):
        return args, kwargs
    arguments = inspect.signature(function.forward).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.args, arguments.kwargs


class _Apply:
    """Stands as ``apply`` on the base class of custom functions: a descriptor costs 0.2 us a call, a method twice as much."""

    __slots__ = ()

    # ``at_work`` and ``plain`` are default arguments, since both are set once, and an attribute takes twice the time.
    def __get__(self, instance: Any, function: Any, at_work: set[Any] = AT_WORK, plain: Any = _apply) -> Any:
        return (at_work and _find(function)) or plain(None, function)


#: Runs a call which may write to tensors unseen; takes the writer in words, the arguments of the call, and the call.
_Unseen = Callable[[str, Any, Callable[[], Any]], Any]


def divert_functions(find: _Find, unseen: _Unseen, shared: _Unseen, missed: Callable[[Any], None]) -> None:
    """Diverts calls of custom functions to ``find``, and methods which write by a Python function or share memory."""
    global _find, _missed
    # ``missed`` gets each function that calls ``save_for_backward``, however it was called. The methods are replaced for the
    # whole process, since no hook or mode sees such calls
    # (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/function.py).
    _find, _missed = find, missed
    base: Any = torch.autograd.Function if IS_BOUND_EARLY else _SingleLevelFunction
    base.apply = _Apply()
    if IS_BOUND_EARLY:
        context: Any = FunctionCtx
        context.save_for_backward = _save_looking
    tensor: Any = torch.Tensor
    for name in ("apply_", "map_", "map2_"):
        setattr(tensor, name, _method(f"Tensor.{name}", getattr(tensor, name), unseen))
    for name in ("numpy", "__dlpack__"):  # ``__array__`` calls ``numpy``
        setattr(tensor, name, _method(f"Tensor.{name}", getattr(tensor, name), shared))
    modules: Any = torch, torch.utils.dlpack
    for module in modules:
        module.to_dlpack = _method("to_dlpack", module.to_dlpack, shared)


def _save_looking(self: Any, *tensors: torch.Tensor) -> None:
    """Replaces ``FunctionCtx.save_for_backward``, to see calls of functions whose ``apply`` was bound early."""
    if AT_WORK and isinstance(self, torch.autograd.function.BackwardCFunction):
        _missed(self._forward_cls)  # type: ignore[attr-defined]
    self.to_save = tensors


def _method(name: str, method: Callable[..., Any], unseen: _Unseen) -> Callable[..., Any]:
    @wraps(method)
    def run(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not AT_WORK:
            return method(self, *args, **kwargs)
        return unseen(name, self, partial(method, self, *args, **kwargs))

    return run


TRITON = "triton.runtime.jit"


def divert_triton(unseen: _Unseen) -> None:
    kernel = getattr(sys.modules.get(TRITON), "JITFunction", None)
    if kernel is None or hasattr(kernel.run, "is_diverted"):  # diverted already; ``wraps`` of a library keeps this attribute
        return
    launch = kernel.run

    @wraps(launch)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not AT_WORK or kwargs.get("warmup"):  # a warmup only compiles
            return launch(self, *args, **kwargs)
        name = getattr(self, "__name__", "kernel")
        return unseen(f"the Triton kernel {name}", (args, kwargs), partial(launch, self, *args, **kwargs))

    run.is_diverted = True  # type: ignore[attr-defined]
    kernel.run = run


def divert_conversions(note: Callable[[torch.nn.Module], None]) -> None:
    """Makes modules call ``note`` before they give their own parameters other memory, as by ``module.double()`` or ``to``."""
    module: Any = torch.nn.Module
    convert = module._apply

    @wraps(convert)
    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            note(self)
        return convert(self, *args, **kwargs)

    module._apply = run


def tell_hooks(tell: Callable[[RemovableHandle], None]) -> None:
    """Calls ``tell`` with every new hook of tensors, nodes and modules."""
    # Remove once torch tells which hooks a node has.
    register = RemovableHandle.__init__

    @skipped
    def registered(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        register(self, *args, **kwargs)
        tell(self)

    RemovableHandle.__init__ = registered  # type: ignore[method-assign]


def divert_scripted(run: Callable[[Callable[..., Any], Any, Any, Any], Any]) -> None:
    """Has all calls of TorchScript run by ``run(call, function, args, kwargs)``."""
    # The classes of scripted and traced functions, and of methods of such modules. Remove with TorchScript.
    kinds: tuple[Any, ...] = torch._C.ScriptFunction, torch._C.ScriptMethod
    for kind in kinds:
        kind.__call__ = _scripted(kind.__call__, run)


def _scripted(call: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @skipped
    def diverted(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return run(call, self, args, kwargs)

    return diverted
