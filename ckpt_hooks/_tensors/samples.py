"""The self-check: samples of the values of a pass, and what becomes of a difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ckpt_hooks._ambient.streams import is_capturing
from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.modes import QuietDispatchMode, past_modes
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._core.self_check import LATE, Place, settings
from ckpt_hooks._operators.facts import UNINITIALIZED, facts_of
from ckpt_hooks.errors import DeterminismError

from .determinism import are_close, is_opaque, ordered_hash_of, projections_of

#: Operators of ATen that leave memory of their results unfilled.
_UNFILLED = UNINITIALIZED | {"resize_", "_grouped_mm", "_varlen_attn", "_flash_attention_forward"}


class UnfilledWatch(QuietDispatchMode):
    """Sees operators which may leave memory unfilled: what is there differs from run to run, and means nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.has_run = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self.has_run or self.paused):
            namespace, _, name = facts_of(func).full_name.partition(".")
            self.has_run = namespace != "aten" or name.partition(".")[0] in _UNFILLED
        return super().__torch_dispatch__(func, types, args, kwargs)


class Sampled:
    """A pass that the self-check compares."""

    __slots__ = ("_place", "number", "watch")

    def __init__(self, place: Place) -> None:
        self._place, self.number = place, place.number
        self.watch = UnfilledWatch()

    def passed(self) -> None:
        self._place.compared()

    def settle(self, error: DeterminismError) -> None:
        """Raises the error of a difference, or warns once a place."""
        words = (
            f" Found by the self-check in pass {self.number} of this region. Put what differs where a recompute finds it: "
            "random numbers in torch's generators or named by ckpt_hooks.track_rng, state on the module. Or write "
            '`with checkpoint_region():`, which runs Python once; or determinism_check="metadata", for no such check.'
        )
        error.args = (f"{error}{words}",)
        if not self.watch.has_run and self.number < LATE and settings.level == "error":
            raise error
        if not self._place.has_warned:
            self._place.has_warned = True
            unfilled = " Operators of the region leave memory unfilled, which may be all." if self.watch.has_run else ""
            warn_user(f"{error}{unfilled}")


def sample_of(tensor: torch.Tensor) -> Any:
    """Returns projections of a tensor, or a hash of the bits where deterministic algorithms are asked for."""
    # Else kernels may add in another order each time: accelerators, and an accumulating ``index_put`` on a host.
    if is_opaque(tensor) or (tensor.device.type not in ("cpu", "meta") and is_capturing(tensor.device.type)):
        return None
    return _lean(ordered_hash_of(tensor) if torch.are_deterministic_algorithms_enabled() else projections_of(tensor))


def _lean(sample: Any) -> Any:
    if isinstance(sample, list):
        return list(map(_lean, sample))
    return tuple(sample.tolist()) if isinstance(sample, torch.Tensor) and sample.is_cpu else sample


def others(samples: Sequence[Any], values: Sequence[Any]) -> Iterator[int]:
    """Finds the values that differ from the noted samples by more than the order of additions explains."""
    for index, (sample, value) in enumerate(zip(samples, values, strict=False)):
        if sample is not None and value is not MISSING and differs(sample, value):
            yield index


def differs(sample: Any, value: torch.Tensor) -> bool:
    found = past_modes(sample_of, value)
    if type(sample) is not type(found):
        return False  # another way to compare is asked for by now
    return not past_modes(are_close, sample, found, value.dtype)
