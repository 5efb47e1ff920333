"""Calls of TorchScript, diverted to a handler of the package, and the plan by which TorchScript carried out a call.

A handler is set once, and stays. 2.11 to 2.15. Goes with TorchScript.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .compiling import skipped

__all__ = ["divert_scripted", "is_profiled", "latest_plan"]

#: Scripted and traced functions, and methods of scripted and traced modules.
_CLASSES: tuple[Any, ...] = torch._C.ScriptFunction, torch._C.ScriptMethod

#: Returns the plan of the latest call on this thread.
latest_plan: Callable[[], Any] = torch._C._last_executed_optimized_graph


def is_profiled(plan: Any) -> bool:
    """Whether a plan takes notes for another plan, which will be carried out by a later call."""
    return "prim::profile" in str(plan)


def divert_scripted(run: Callable[..., Any]) -> None:
    """Has all calls of TorchScript run by ``run(call, function, args, kwargs)``."""
    for kind in _CLASSES:
        kind.__call__ = _diverted(run, kind.__call__)


def _diverted(run: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @skipped
    def diverted(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return run(call, self, args, kwargs)

    return diverted
