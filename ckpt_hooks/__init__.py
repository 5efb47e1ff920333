"""Activation checkpointing for PyTorch: exact, lean, and a drop-in for ``torch.utils.checkpoint``."""

from ._ambient.tracking import track_rng
from ._checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop
from ._contexts import noop_context_fn
from ._runtime.groups import GraphExecGroup
from ._runtime.stack import is_recomputing
from .debug import set_checkpoint_debug_enabled
from .device_states import DefaultDeviceType, get_device_states, set_device_states
from .errors import CheckpointError, DeterminismError, InternalError, MutationError, OverlapError
from .policies import CheckpointPolicy, SelectiveCheckpointContext
from .region import checkpoint_name, checkpoint_region
from .selective import SAC_IGNORED_OPS, create_selective_checkpoint_contexts

__version__ = "0.1.0"

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "DeterminismError",
    "GraphExecGroup",
    "InternalError",
    "MutationError",
    "OverlapError",
    "SelectiveCheckpointContext",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_region",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "get_device_states",
    "is_recomputing",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "track_rng",
]
