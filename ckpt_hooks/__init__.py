"""Activation checkpointing for PyTorch: exact, lean, and a drop-in for ``torch.utils.checkpoint``."""

from ._checkpoint import checkpoint, checkpoint_sequential, noop_context_fn, set_checkpoint_early_stop
from ._runtime.groups import GraphExecGroup
from ._runtime.stack import is_recomputing
from .debug import set_checkpoint_debug_enabled
from .device_states import DefaultDeviceType, get_device_states, set_device_states
from .errors import CheckpointError, DeterminismError, InputMutationError, InternalError, OverlapError

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DefaultDeviceType",
    "DeterminismError",
    "GraphExecGroup",
    "InputMutationError",
    "InternalError",
    "OverlapError",
    "checkpoint",
    "checkpoint_sequential",
    "get_device_states",
    "is_recomputing",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]
