"""Activation checkpointing for PyTorch: exact, lean, and a drop-in for ``torch.utils.checkpoint``.

``CheckpointFunction``, ``check_backward_validity`` and ``detach_variable`` are torch's own, for code which imports these names
from here. No region of this package has a part in torch's reentrant engine.
"""

from __future__ import annotations

import sys as _sys
import threading as _threading
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if "free-threading" in _sys.version or not getattr(_sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "ckpt_hooks does not support free-threaded Python: it tells by reference counts which saved tensors are still needed, "
        "and these counts are not exact without the global interpreter lock. Use the default build of Python."
    )

if _TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointFunction as CheckpointFunction
    from torch.utils.checkpoint import check_backward_validity as check_backward_validity
    from torch.utils.checkpoint import detach_variable as detach_variable

    from . import errors as errors
    from . import losses as losses
    from . import policies as policies
    from ._ambient.random import track_rng
    from ._checkpoint.checkpoint import checkpoint, set_checkpoint_early_stop
    from ._checkpoint.chunks import checkpoint_chunks
    from ._checkpoint.loop import checkpoint_loop
    from ._checkpoint.region import checkpoint_name, checkpoint_region
    from ._checkpoint.selective import SAC_IGNORED_OPS, create_selective_checkpoint_contexts
    from ._checkpoint.sequential import checkpoint_sequential
    from ._core.frame import is_recomputing
    from ._core.scopes import GraphExecGroup
    from ._core.settings import set_self_check
    from ._function.contexts import noop_context_fn
    from .device_states import DefaultDeviceType, get_device_states, set_device_states
    from .errors import BudgetTooSmallError, CheckpointError, DeterminismError, InternalError, MutationError, OverlapError
    from .integrations import enable_in_transformers, patch_torch
    from .modules import apply_checkpointing, checkpoint_module, every, remove_checkpointing, span
    from .planner import estimate_memory, plan_memory
    from .policies import CheckpointPolicy, SelectiveCheckpointContext
    from .report import memory_ledger, print_saved_residuals, saved_residuals, saved_tensors_report, trace
    from .report.debug import set_checkpoint_debug_enabled

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
    "estimate_memory",
    "every",
    "get_device_states",
    "is_recomputing",
    "memory_ledger",
    "noop_context_fn",
    "patch_torch",
    "plan_memory",
    "print_saved_residuals",
    "remove_checkpointing",
    "saved_residuals",
    "saved_tensors_report",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "set_self_check",
    "span",
    "trace",
    "track_rng",
]

#: The module of each public name. A module is imported when a name of it is first used, since a first region needs few modules.
_PLACES = {
    name: module
    for module, names in {
        "._ambient.random": "track_rng",
        "._checkpoint.checkpoint": "checkpoint set_checkpoint_early_stop",
        "._checkpoint.chunks": "checkpoint_chunks",
        "._checkpoint.loop": "checkpoint_loop",
        "._checkpoint.sequential": "checkpoint_sequential",
        "._core.frame": "is_recomputing",
        "._core.scopes": "GraphExecGroup",
        "._core.settings": "set_self_check",
        "._function.contexts": "noop_context_fn",
        ".device_states": "DefaultDeviceType get_device_states set_device_states",
        ".errors": "BudgetTooSmallError CheckpointError DeterminismError InternalError MutationError OverlapError",
        ".integrations": "enable_in_transformers patch_torch",
        ".modules": "apply_checkpointing checkpoint_module every remove_checkpointing span",
        ".losses": "",
        ".offload": "",
        ".planner": "estimate_memory plan_memory",
        ".policies": "CheckpointPolicy SelectiveCheckpointContext",
        "._checkpoint.region": "checkpoint_name checkpoint_region",
        ".report": "memory_ledger print_saved_residuals saved_residuals saved_tensors_report trace",
        ".report.debug": "set_checkpoint_debug_enabled",
        "._checkpoint.selective": "SAC_IGNORED_OPS create_selective_checkpoint_contexts",
        "torch.utils.checkpoint": "CheckpointFunction check_backward_validity detach_variable",
    }.items()
    for name in (*names.split(), module[1:])
}
_lock = _threading.RLock()  # without it two threads, importing modules that need each other, could see half-imported modules


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _PLACES[name]
    with _lock:
        module = _import_module(place, __name__)
    if place == f".{name}":
        return module
    found: object = getattr(module, name)
    if place.startswith("."):  # names of torch are not cached, since a program may replace them in torch
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *filter(str.isidentifier, _PLACES)})
