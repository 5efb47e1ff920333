"""Reports on regions, and on the memory that backward holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .steps import Drift, RegionTrace, StepTrace
    from .trace_text import format_trace, print_trace
    from .tracing import Trace, trace

__all__ = [
    "Drift",
    "RegionTrace",
    "StepTrace",
    "Trace",
    "format_trace",
    "print_trace",
    "trace",
]

# Modules by the names in them, imported when asked for: a first checkpoint needs none.
_MODULES = {
    "Drift": "steps",
    "RegionTrace": "steps",
    "StepTrace": "steps",
    "Trace": "tracing",
    "format_trace": "trace_text",
    "print_trace": "trace_text",
    "trace": "tracing",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
