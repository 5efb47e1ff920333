"""Reports on regions, and on the memory that backward holds."""

from __future__ import annotations

from ckpt_hooks._core.holdings import Reason

from .ledger import MemoryLedger, memory_ledger
from .ledger.data import Allocation, Change, Hold, Holder, LedgerPeak, Phase, RegionEntry
from .ledger.pictures import Picture, compare
from .printing import Maker, Origin, Residual
from .residuals import SavedResiduals, print_saved_residuals, saved_residuals, saved_tensors_report
from .tracing import RegionTrace, StepTrace, Trace, trace

__all__ = [
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
    "compare",
    "memory_ledger",
    "print_saved_residuals",
    "saved_residuals",
    "saved_tensors_report",
    "trace",
]
