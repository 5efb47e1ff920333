"""Quicker calls of operators: torch's own bindings, whose argument parser takes a third less time than an overload's.

A binding calls one of several overloads, by its arguments. It stands in for an overload if each call with arguments of the
schema's types leads to this overload, with the same arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .functions import OVERLOAD
from .modes import TorchDispatchMode, made_apart

# The holders of the generated bindings. Remove this module once an overload takes its arguments as quickly.
_HOLDERS = (
    torch._C._VariableFunctions,
    torch._C.TensorBase,
    *(getattr(torch._C, name) for name in ("_nn", "_linalg", "_special", "_fft")),
)

#: Examples for each type in a schema: together they reach all overloads that values of the type may reach.
_EXAMPLES: dict[str, tuple[Any, ...]] = {
    "int": (1,),
    "float": (1.0, 1),
    "number": (1.0, 1, True, 1j),
    "bool": (True,),
    "str": ("none",),
    "List[int]": ([1, 1], [1], []),
    "List[bool]": ([True, True, True],),
    "List[float]": ([1.0, 1.0],),
    "ScalarType": (torch.float32,),
}
_MOST = 256  # the most calls to try: an operator with more combinations of examples gets no binding


def is_composite(overload: Any) -> bool:
    """Whether an operator is composed of other operators on all devices, or is TorchScript's own."""
    name = overload.name()
    has_kernel: bool = torch._C._dispatch_has_kernel(name)
    return not has_kernel or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


class _ReachedError(Exception):
    pass


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at the first operator, with the operator and its arguments, before it runs."""

    # Without this method, torch imports Dynamo to wrap the handler.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _ReachedError(func, args, kwargs or {})


def _reached(call: Callable[..., Any], args: Sequence[Any]) -> Any:
    try:
        with _Probe():  # type: ignore[no-untyped-call]
            call(*args)
    except _ReachedError as reached:
        return reached.args
    except (TypeError, RuntimeError, ValueError, IndexError):
        pass
    return None


def _examples_of(argument: Any, tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = str(argument.real_type)
    inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    values = (tensor,) if inner == "Tensor" else _EXAMPLES.get(inner, ())
    return (*values, None) if values and inner is not kind else values


def _are_same(args: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(args) == len(others) and all(
        first is second or (type(first) is type(second) and not isinstance(first, torch.Tensor) and first == second)
        for first, second in zip(args, others, strict=True)
    )


def binding_of(overload: Any, count: int) -> Callable[..., Any] | None:
    """Returns the binding that stands in for an overload with a number of arguments, all by position."""
    try:
        return made_apart(lambda: _find_binding(overload, count))  # on another thread, which no Ctrl-C interrupts
    except RuntimeError:  # no thread can start, as at exit
        return None


def _find_binding(overload: Any, count: int) -> Callable[..., Any] | None:
    name = overload._schema.name.removeprefix("aten::") if type(overload) is OVERLOAD else "::"
    # Not replaced: operators whose binding returns a named tuple or turns a number into a tensor, and composites, which run
    # before the probe sees them.
    if "::" in name or hasattr(torch.return_types, name) or overload._overloadname == "Scalar" or is_composite(overload):
        return None
    bindings = [binding for holder in _HOLDERS if (binding := getattr(holder, name, None)) is not None]
    arguments = overload._schema.arguments[:count]
    if not bindings or any(argument.kwarg_only for argument in arguments):
        return None
    tensor = torch.empty(1)
    calls = list(itertools.islice(itertools.product(*(_examples_of(argument, tensor) for argument in arguments)), _MOST + 1))
    if len(calls) > _MOST:
        return None
    expected = [(args, _reached(overload._op, args)) for args in calls]
    expected = [(args, reached) for args, reached in expected if reached is not None and reached[0] is overload]
    if not expected:
        return None
    return next((binding for binding in bindings if all(_is_same(reached, binding, args) for args, reached in expected)), None)


def _is_same(expected: Any, binding: Callable[..., Any], args: Sequence[Any]) -> bool:
    call = _reached(binding, args)
    return call is not None and call[0] is expected[0] and _are_same(call[1], expected[1]) and call[2] == expected[2]
