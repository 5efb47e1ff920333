"""``checkpoint_module`` and ``apply_checkpointing``: regions on a model, with all names as they are.

A module becomes a region by an object in its ``forward``, an attribute of the instance. Names of parameters, buffers and
submodules, the module's class, and hooks stay as they are; hooks run outside of the region. The road not taken: hooks before
and after forward. Torch skips the latter on Ctrl-C, and a rerun would call the user's earlier hooks twice.
"""

from __future__ import annotations

from .applying import AppliedCheckpointing, AppliedRegion, apply_checkpointing, checkpoint_module, remove_checkpointing
from .selecting import SelectLike, every, span

__all__ = [
    "AppliedCheckpointing",
    "AppliedRegion",
    "SelectLike",
    "apply_checkpointing",
    "checkpoint_module",
    "every",
    "remove_checkpointing",
    "span",
]
