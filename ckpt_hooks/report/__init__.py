"""Reports on regions, and on the memory that backward holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .advice import Advice, Waste
    from .entries import Reason, Residual, SavedResiduals
    from .ledger.allocations import Allocation, Change, Hold, Maker, Origin
    from .ledger.holders import Holder, LedgerPeak
    from .ledger.ledger import MemoryLedger
    from .ledger.phases import Phase
    from .ledger.recording import memory_ledger
    from .ledger.regions import Need, RegionEntry
    from .pictures.panels import compare
    from .pictures.picture import Picture
    from .residuals import format_saved_residuals, print_saved_residuals, saved_residuals, saved_tensors_report
    from .steps import Drift, RegionTrace, StepTrace
    from .tracing import Trace, format_trace, print_trace, trace

__all__ = [
    "Advice",
    "Allocation",
    "Change",
    "Drift",
    "Hold",
    "Holder",
    "LedgerPeak",
    "Maker",
    "MemoryLedger",
    "Need",
    "Origin",
    "Phase",
    "Picture",
    "Reason",
    "RegionEntry",
    "RegionTrace",
    "Residual",
    "SavedResiduals",
    "StepTrace",
    "Trace",
    "Waste",
    "compare",
    "format_saved_residuals",
    "format_trace",
    "memory_ledger",
    "print_saved_residuals",
    "print_trace",
    "saved_residuals",
    "saved_tensors_report",
    "trace",
]

# Modules by the names in them, imported when asked for: a first checkpoint needs none.
_MODULES = {
    "Advice": "advice",
    "Waste": "advice",
    "Allocation": "ledger.allocations",
    "Change": "ledger.allocations",
    "Hold": "ledger.allocations",
    "Maker": "ledger.allocations",
    "Origin": "ledger.allocations",
    "Holder": "ledger.holders",
    "LedgerPeak": "ledger.holders",
    "MemoryLedger": "ledger.ledger",
    "Phase": "ledger.phases",
    "memory_ledger": "ledger.recording",
    "Need": "ledger.regions",
    "RegionEntry": "ledger.regions",
    "compare": "pictures.panels",
    "Picture": "pictures.picture",
    "Drift": "steps",
    "RegionTrace": "steps",
    "StepTrace": "steps",
    "Trace": "tracing",
    "format_trace": "tracing",
    "print_trace": "tracing",
    "trace": "tracing",
    "Reason": "entries",
    "Residual": "entries",
    "SavedResiduals": "entries",
    "format_saved_residuals": "residuals",
    "print_saved_residuals": "residuals",
    "saved_residuals": "residuals",
    "saved_tensors_report": "residuals",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
