"""Shapes of calls: by these a plan tells which of its steps a call of a block belongs to."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.descriptions import dtype_and_shape, kind_in_words
from ckpt_hooks._tensors.nested_values import instances_in
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks.modules.forward import RegionRunner
from ckpt_hooks.policies import save_indices
from ckpt_hooks.policies.base import operator_named

__all__ = ["OtherShapes", "PlannedRunner", "Runs", "Shapes", "shapes_in_words", "shapes_of"]

#: The dtype and the shape of each tensor in the arguments of a call.
Shapes = tuple[tuple[torch.dtype, Any], ...]
#: Submodule, operator and number of each run whose result is kept.
Runs = tuple[tuple[str, str, int], ...]


def shapes_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Returns the shapes of a call.

    Args:
        function: The function. The arguments of a ``functools.partial`` count: Transformers puts the keywords of a layer there.
        args: The arguments.
        kwargs: The keyword arguments.
    """
    while isinstance(function, functools.partial):
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    tensors = instances_in((args, [kwargs[name] for name in sorted(kwargs)]), torch.Tensor)
    return tuple(map(dtype_and_shape, tensors))


def shapes_in_words(shapes: Shapes) -> str:
    """Returns the shapes of a call in words, as in ``"float32[4, 8], int64[4]"``."""
    return ", ".join(map(kind_in_words, shapes)) or "no tensors"


class OtherShapes:
    """Says once that a call has shapes which a plan has not measured."""

    def __init__(self) -> None:
        self._has_said = False

    def __call__(self, block: str, shapes: Shapes) -> None:
        """Says so of the first such call."""
        if not self._has_said:
            self._has_said = True
            warn_user(
                f"The plan has measured no step in which block {block!r} gets {shapes_in_words(shapes)}: in such steps its "
                "blocks keep nothing, and all of their forward runs again. Measure one: `plan.add(step)`, before "
                "`plan.apply()`."
            )


class PlannedRunner(RegionRunner):
    """Calls a block as its plan says: as a region which keeps some results, or plainly.

    A call of other shapes is a region which keeps nothing.
    """

    def __init__(self, name: str, kept: Mapping[Shapes, Runs | None], on_other: Callable[[str, Shapes], None]) -> None:
        """Takes what to keep.

        Args:
            name: The block's name.
            kept: The runs to keep, by the shapes of the call; None for a plain call.
            on_other: Is called with the name and the shapes of a call whose shapes are not there.
        """
        super().__init__(True, {"name": name, "replay_whole": False})
        self._name, self._kept, self._on_other = name, kept, on_other
        self._traced = {runs: self._runner_for(runs, None) for runs in kept.values() if runs}
        # Names of submodules are those in the called module, whatever module calls it. Replicas share this object.
        self._runners: weakref.WeakKeyDictionary[Any, dict[Runs, RegionRunner]] = weakref.WeakKeyDictionary()

    @skipped
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function as the block."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        shapes = shapes_of(function, args, kwargs)
        kept = self._kept.get(shapes, ())
        is_traced = torch.compiler.is_dynamo_compiling()
        if not kept and not is_traced and shapes not in self._kept:
            self._on_other(self._name, shapes)
        if kept is None:
            return function(*args, **kwargs)
        if not kept:
            return self._run(function, args, kwargs)
        # Dynamo traces regions that are there, and makes none.
        return (self._traced[kept] if is_traced else self._runner(function, kept))._run(function, args, kwargs)

    def _runner(self, function: Any, kept: Runs) -> RegionRunner:
        while isinstance(function, functools.partial):
            function = function.func
        owner = getattr(function, "__self__", None)
        module = owner if isinstance(owner, Module) else None
        runners = self._runners.setdefault(module or self, {})
        found = runners.get(kept)
        if found is None:
            found = runners[kept] = self._runner_for(kept, module)
        return found

    def _runner_for(self, kept: Runs, module: Module | None) -> RegionRunner:
        policy = save_indices([(name, operator_named(operator), number) for name, operator, number in kept], root=module)
        return RegionRunner(True, {"name": self._name, "replay_whole": False, "policy": policy})

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedRunner, (self._name, self._kept, self._on_other)
