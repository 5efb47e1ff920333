"""Reports on regions, and on the memory that backward holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_hooks._core.lazy_names import names_of

if TYPE_CHECKING:
    from ckpt_hooks._core.holdings import Reason

    from .entries import Advice, Maker, Origin, Residual, Waste
    from .ledger import MemoryLedger, memory_ledger
    from .ledger.data import Allocation, Change, Hold, Holder, LedgerPeak, Phase, RegionEntry
    from .ledger.pictures import Picture, compare
    from .residuals import (
        SavedResiduals,
        format_saved_residuals,
        print_saved_residuals,
        saved_residuals,
        saved_tensors_report,
    )
    from .steps import RegionTrace, StepTrace
    from .tracing import Trace, print_trace, trace

__all__ = [
    "Advice",
    "Allocation",
    "Change",
    "Hold",
    "Holder",
    "LedgerPeak",
    "Maker",
    "MemoryLedger",
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
    "memory_ledger",
    "print_saved_residuals",
    "print_trace",
    "saved_residuals",
    "saved_tensors_report",
    "trace",
]

__getattr__, __dir__ = names_of(
    __name__,
    {
        "ckpt_hooks._core.holdings": "Reason",
        ".entries": "Advice Maker Origin Residual Waste",
        ".ledger": "MemoryLedger memory_ledger",
        ".ledger.data": "Allocation Change Hold Holder LedgerPeak Phase RegionEntry",
        ".ledger.pictures": "Picture compare",
        ".residuals": "SavedResiduals format_saved_residuals print_saved_residuals saved_residuals saved_tensors_report",
        ".steps": "RegionTrace StepTrace",
        ".tracing": "Trace print_trace trace",
    },
)
