"""Reports on regions, and on the memory that backward holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_hooks._core.holdings import Reason

    from .entries import Advice, Maker, Origin, Residual, Waste
    from .ledger import MemoryLedger, memory_ledger
    from .ledger.data import Allocation, Change, Hold, Holder, LedgerPeak, Need, Phase, RegionEntry
    from .ledger.pictures import Picture, compare
    from .residuals import (
        SavedResiduals,
        format_saved_residuals,
        print_saved_residuals,
        saved_residuals,
        saved_tensors_report,
    )
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

# Imported when one of their names is asked for, those that import least first: a first checkpoint needs none.
_MODULES = ("entries", "steps", "tracing", "residuals", "ledger.data", "ledger.pictures", "ledger")


def __getattr__(name: str) -> object:
    if name in __all__:
        import importlib

        for module in _MODULES:
            found: object = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
