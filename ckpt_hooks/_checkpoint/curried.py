"""The curried form of ``checkpoint``, options first, and its results: checkpointed functions and checkpointed modules."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, NoReturn, SupportsIndex, TypeVar

import torch
from torch.nn import Module
from typing_extensions import Never, ParamSpec

from ckpt_hooks._core.misuse import Misuse, check_curried, check_runs, unknown_error
from ckpt_hooks._function.contexts import ContextPair, check_context_fn, noop_context_fn
from ckpt_hooks._options import DEFAULT_OPTIONS, Form, RegionOptions, defaults_of, options_from, options_of
from ckpt_hooks._torch.compiling import skipped

from .running import run

P = ParamSpec("P")
R = TypeVar("R")

_PASSED_ON = defaults_of(Form.CURRIED)


class CheckpointedFunction(Generic[P, R]):
    """A function whose calls are regions; binds to instances and can be copied, like the function."""

    __qualname__: str

    def __init__(self, function: Callable[P, R], region: Curried) -> None:
        self.function = function
        self._region = region
        functools.update_wrapper(self, function, updated=())

    @skipped
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._region.run(self.function, args, kwargs)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # A decorated function is pickled by its name, as functions are.
        named: Any = sys.modules.get(self.__module__)
        for name in getattr(self, "__qualname__", "").split("."):
            named = getattr(named, name, None)
        return self.__qualname__ if named is self else super().__reduce_ex__(protocol)

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        bind = getattr(type(self.function), "__get__", None)
        if bind is None:
            return self
        if torch.compiler.is_dynamo_compiling() and isinstance(self.function, types.FunctionType):
            # Dynamo cannot trace an explicit call of ``__get__``.
            partial: Any = functools.partial
            return self if instance is None else partial(self, instance)
        bound = bind(self.function, instance, owner)
        return self if bound is self.function else CheckpointedFunction(bound, self._region)


class CheckpointedModule(Module):
    """A module whose calls are regions, with the attributes and the class of the module; hooks run inside the region."""

    # The object shares the ``__dict__`` of the wrapped module, and its class derives from the module's class. So a model can
    # hold it in the module's place: names, ``isinstance``, ``train()`` and ``state_dict()`` stay the same.
    __slots__ = ("__wrapped__", "_region")

    __wrapped__: Module
    _region: Curried

    @skipped
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._region.run(self.__wrapped__, args, kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return checkpointed_module, (self.__wrapped__, self._region)

    def __copy__(self) -> Module:
        return checkpointed_module(copy.copy(self.__wrapped__), self._region)

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        return checkpointed_module(copy.deepcopy(self.__wrapped__, memo), copy.deepcopy(self._region, memo))

    def _replicate_for_data_parallel(self) -> Module:
        replica = self.__wrapped__._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return checkpointed_module(replica, self._region)


@functools.cache
def _class_for(kind: type[Module]) -> type[CheckpointedModule]:
    try:  # ``new_class`` derives a metaclass from both bases, as a class statement does
        name, bases = f"Checkpointed{kind.__name__}", (CheckpointedModule, kind)
        subclass = types.new_class(name, bases, exec_body=lambda namespace: namespace.update(__slots__=()))
    except TypeError as error:
        raise TypeError(
            f"checkpoint(...) cannot make a subclass of {kind.__qualname__}, the class of the module ({error}). "
            "Write `checkpoint_module(module, ...)`, which needs no subclass."
        ) from error
    subclass.__module__, subclass.__qualname__ = kind.__module__, subclass.__name__
    return subclass


def checkpointed_module(module: Module, region: Curried) -> Module:
    """Returns a module with the attributes of ``module``, whose calls run ``module`` as a region."""
    kind = _class_for(type(module))  # type: ignore[arg-type]  # mypy takes a module's ``__hash__`` for the class's
    checkpointed = object.__new__(kind)
    put = object.__setattr__  # ``Module.__setattr__`` would read ``__dict__``, which is set last
    put(checkpointed, "_region", region)
    put(checkpointed, "__wrapped__", module)
    put(checkpointed, "__dict__", module.__dict__)
    return checkpointed


@dataclasses.dataclass(frozen=True)
class Curried:
    """Options of :func:`checkpoint`, to be called with a function."""

    options: RegionOptions
    context_fn: Callable[[], ContextPair]

    def __call__(self, function: Callable[P, R], *others: Never, **named: Never) -> Callable[P, R]:
        """Returns a function or a module whose calls are regions; under Dynamo always a function."""
        check_curried(function, others, named, "checkpoint(...)")
        check_runs(function)
        module: Any = function
        # Dynamo cannot trace the creation of a class, and the class of a scripted module cannot have subclasses.
        is_function = not isinstance(module, Module) or isinstance(module, torch.jit.ScriptModule)
        if is_function or torch.compiler.is_dynamo_compiling():
            return CheckpointedFunction(function, self)
        return checkpointed_module(module, self)

    def __enter__(self) -> NoReturn:
        raise Misuse.NO_BLOCK.error(name="checkpoint(...)")

    def __exit__(self, *exc_info: object) -> None:
        """Exists since ``with`` looks for ``__exit__`` before it calls ``__enter__``, which raises."""

    @skipped
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(function, args, kwargs, self.options, self.context_fn)


def curried(options: RegionOptions, context_fn: Callable[[], ContextPair], named_options: dict[str, Any]) -> Curried:
    if context_fn is not noop_context_fn:
        check_context_fn(context_fn)
    known = {name: value for name, value in named_options.items() if name in _PASSED_ON}
    options = options_from(options, **known)
    if unknown := [name for name in named_options if name not in known]:
        advice = "Pass arguments of the function in the last call: `checkpoint(...)(function)(*args)`."
        raise unknown_error(unknown, options_of(Form.CURRIED), "Without a function, checkpoint", advice)
    return Curried(options, context_fn)


PLAIN = Curried(DEFAULT_OPTIONS, noop_context_fn)
#: The types of the curried form's results, for ``isinstance``.
MADE: Any = CheckpointedFunction, CheckpointedModule
