"""Activation checkpointing for PyTorch: exact, lean, and a drop-in for ``torch.utils.checkpoint``.

``CheckpointFunction``, ``check_backward_validity`` and ``detach_variable`` are torch's own, for code which imports these names
from here. No region of this package has a part in torch's reentrant engine.
"""

from __future__ import annotations

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

if "free-threading" in _sys.version or not getattr(_sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "ckpt_hooks does not support free-threaded Python: it tells by reference counts which saved tensors are still needed, "
        "and those are not exact without the global interpreter lock. Use the default build of Python."
    )

from ._ambient.named_random_sources import track_rng
from ._checkpoint.checkpoint import checkpoint, set_checkpoint_early_stop
from ._checkpoint.chunks import checkpoint_chunks
from ._checkpoint.loop import checkpoint_loop
from ._checkpoint.sequential import checkpoint_sequential
from ._core.frame import is_recomputing
from ._core.scopes import GraphExecGroup
from ._function.options import noop_context_fn
from ._tensors.refilling import register_finder as _register_finder
from .device_states import DefaultDeviceType, get_device_states, set_device_states
from .errors import BudgetTooSmallError, CheckpointError, DeterminismError, InternalError, MutationError, OverlapError
from .policies import CheckpointPolicy, SelectiveCheckpointContext
from .region import checkpoint_name, checkpoint_region
from .report.debug import set_checkpoint_debug_enabled
from .selective import SAC_IGNORED_OPS, create_selective_checkpoint_contexts

if _TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointFunction as CheckpointFunction
    from torch.utils.checkpoint import check_backward_validity as check_backward_validity
    from torch.utils.checkpoint import detach_variable as detach_variable

    from ._tensors.refilling import Finder as _Finder
    from .integrations import enable_in_transformers, patch_torch
    from .modules import apply_checkpointing, checkpoint_module, every, remove_checkpointing
    from .planner import plan_memory
    from .report import (
        format_saved_residuals,
        memory_ledger,
        print_saved_residuals,
        print_trace,
        saved_residuals,
        saved_tensors_report,
        trace,
    )

__version__ = "0.1.0"

__all__ = [
    "SAC_IGNORED_OPS",
    "BudgetTooSmallError",
    "CheckpointError",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "DeterminismError",
    "GraphExecGroup",
    "InternalError",
    "MutationError",
    "OverlapError",
    "SelectiveCheckpointContext",
    "apply_checkpointing",
    "checkpoint",
    "checkpoint_chunks",
    "checkpoint_loop",
    "checkpoint_module",
    "checkpoint_name",
    "checkpoint_region",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "enable_in_transformers",
    "every",
    "format_saved_residuals",
    "get_device_states",
    "is_recomputing",
    "memory_ledger",
    "noop_context_fn",
    "patch_torch",
    "plan_memory",
    "print_saved_residuals",
    "print_trace",
    "remove_checkpointing",
    "saved_residuals",
    "saved_tensors_report",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "trace",
    "track_rng",
]


def _finder_of_sharded() -> _Finder:
    from .integrations.fsdp import unit_of

    return unit_of


_register_finder("torch.distributed.fsdp", _finder_of_sharded)


#: Names of torch's reentrant engine, taken from there when asked for.
_OF_TORCH = frozenset({"CheckpointFunction", "check_backward_validity", "detach_variable"})


#: Names of the upper floors and of reports, imported when asked for.
_LATER = {
    name: room
    for room, names in {
        "modules": "apply_checkpointing checkpoint_module every remove_checkpointing",
        "integrations": "enable_in_transformers patch_torch",
        "report": "format_saved_residuals memory_ledger print_saved_residuals print_trace "
        "saved_residuals saved_tensors_report trace",
        "planner": "plan_memory",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        import importlib

        found: object = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        globals()[name] = found
        return found
    if name in _OF_TORCH:
        import torch.utils.checkpoint

        return getattr(torch.utils.checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_OF_TORCH})
