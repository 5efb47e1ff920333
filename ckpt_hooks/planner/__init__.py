"""Byte budgets: the fastest step that fits, for any eager model.

One step is profiled, and the memory of every plan is simulated from it. The cheapest plan that fits is measured, then returned.
"""

from __future__ import annotations

from .estimating import BlockActivations, MemoryEstimate, estimate_memory
from .guard import Guard
from .pareto import ParetoFront, ParetoPoint
from .plan import Plan, plan_memory
from .planned import KeptRun, PlannedBlock, PlannedChunks

__all__ = [
    "BlockActivations",
    "Guard",
    "KeptRun",
    "MemoryEstimate",
    "ParetoFront",
    "ParetoPoint",
    "Plan",
    "PlannedBlock",
    "PlannedChunks",
    "estimate_memory",
    "plan_memory",
]
