"""Calls of TorchScript, diverted to a handler of the package, and the plan by which TorchScript carried out a call.

A handler is set once, and stays. 2.11 to 2.15. Goes with TorchScript.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .compiling import skipped

__all__ = ["divert_scripted", "flags_of", "latest_plan"]

#: Scripted and traced functions, and methods of scripted and traced modules.
_CLASSES: tuple[Any, ...] = torch._C.ScriptFunction, torch._C.ScriptMethod

#: What a module of TorchScript has, without a wrapper for each.
_parameters: Any = torch._C.ParameterDict
_modules: Any = torch._C.ModuleDict

#: Returns the plan of the latest call on this thread.
latest_plan: Callable[[], Any] = torch._C._last_executed_optimized_graph


def flags_of(function: Any) -> list[bool]:
    """Returns whether the modules of a scripted method are in training, and whether their parameters require grad."""
    owner = getattr(function, "owner", None)
    found: list[bool] = []
    todo = [] if owner is None else [owner]
    while todo:
        module = todo.pop()
        found.append(bool(module.hasattr("training") and module.getattr("training")))
        found += [parameter.requires_grad for _, parameter in _parameters(module).items()]
        todo += [child for _, child in _modules(module).items()]
    return found


def divert_scripted(run: Callable[..., Any]) -> None:
    """Has all calls of TorchScript run by ``run(call, function, args, kwargs)``."""
    for kind in _CLASSES:
        kind.__call__ = _diverted(run, kind.__call__)


def _diverted(run: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @skipped
    def diverted(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return run(call, self, args, kwargs)

    return diverted
