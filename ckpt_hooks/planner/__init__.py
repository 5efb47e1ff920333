"""Byte budgets: the fastest step that fits, for any eager model.

One profiled step, a simulation of every plan from it, and the cheapest plan that fits, which is measured before it is returned.
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
