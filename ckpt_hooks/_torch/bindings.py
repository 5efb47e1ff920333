"""Torch's own bindings of operators, which take arguments by a parser that costs a third less than an overload's.

A binding calls one of several overloads, by its arguments. It stands in for an overload if each call with arguments of the
schema's types leads to this overload, with the same arguments.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .functions import OVERLOAD
from .modes import is_any_transform_active, num_dispatch_modes, num_function_modes

# Where functions and methods of generated code are. Goes when an overload takes its arguments as quickly.
_HOLDERS = (
    torch._C._VariableFunctions,
    torch._C.TensorBase,
    *(getattr(torch._C, name) for name in ("_nn", "_linalg", "_special", "_fft")),
)

#: Values of each type in a schema, which lead to all overloads that such values may lead to. None can stand for no argument.
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
_MOST = 256  # calls to try


def is_composite(overload: Any) -> bool:
    """Whether an operator is made of others for all devices, or TorchScript's own."""
    name = overload.name()
    has_kernel: bool = torch._C._dispatch_has_kernel(name)
    return not has_kernel or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


class _ReachedError(Exception):
    pass


class _Probe(torch.Tensor):
    """Raises at the first operator, with what it gets: nothing runs."""

    # Not a mode, which an interrupt could leave behind.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _ReachedError(func, args, kwargs or {})


@functools.cache
def _probe() -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(_Probe, (1,))
    return made


def _reached(call: Callable[..., Any], args: Sequence[Any]) -> Any:
    try:
        call(*args)
    except _ReachedError as reached:
        return reached.args
    except (TypeError, RuntimeError, ValueError, IndexError):
        pass
    return None


def _examples_of(argument: Any) -> tuple[Any, ...]:
    kind = str(argument.real_type)
    inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    values = (_probe(),) if inner == "Tensor" else _EXAMPLES.get(inner, ())
    return (*values, None) if values and inner is not kind else values


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        first is second or (type(first) is type(second) and not isinstance(first, torch.Tensor) and first == second)
        for first, second in zip(one, other, strict=True)
    )


def can_probe() -> bool:
    """Whether calls of this thread lead straight to the tensors' own handlers."""
    return not (num_function_modes() or num_dispatch_modes() or is_any_transform_active())


def binding_of(overload: Any, count: int) -> Callable[..., Any] | None:
    """Returns the binding that stands in for an overload with a number of arguments, all by position."""
    name = overload._schema.name.removeprefix("aten::") if type(overload) is OVERLOAD else "::"
    # Results by name are of a class of their own; of a number a binding makes a tensor; a composite runs before it is seen.
    if "::" in name or hasattr(torch.return_types, name) or overload._overloadname == "Scalar" or is_composite(overload):
        return None
    found = [binding for holder in _HOLDERS if (binding := getattr(holder, name, None)) is not None]
    arguments = overload._schema.arguments[:count]
    if not found or any(argument.kwarg_only for argument in arguments):
        return None
    calls = list(itertools.islice(itertools.product(*map(_examples_of, arguments)), _MOST + 1))
    if len(calls) > _MOST:
        return None
    expected = [(args, _reached(overload._op, args)) for args in calls]
    expected = [(args, reached) for args, reached in expected if reached is not None and reached[0] is overload]
    if not expected:
        return None
    return next((binding for binding in found if all(_is_same(reached, binding, args) for args, reached in expected)), None)


def _is_same(expected: Any, binding: Callable[..., Any], args: Sequence[Any]) -> bool:
    found = _reached(binding, args)
    return found is not None and found[0] is expected[0] and _are_same(found[1], expected[1]) and found[2] == expected[2]
