"""The self-check: samples of the values of a pass, and the error or warning for a difference."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._ambient.devices import is_capturing
from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.modes import past_modes
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._core.self_check import LATE, CheckedPlace
from ckpt_hooks._core.settings import self_check
from ckpt_hooks.errors import CheckpointError, DeterminismError

from .copies import is_on_host
from .determinism import are_close, is_opaque, ordered_hash_of, projections_of

_ADVICE = (
    "Make the recompute compute the same values: draw from torch's generators or name the generator by ckpt_hooks.track_rng, "
    'and keep state on the module. Or write `with checkpoint_region():`, which runs Python once. determinism_check="metadata" '
    "switches this check off."
)


class Sampled:
    """A pass that the self-check compares."""

    __slots__ = ("__weakref__", "_place", "may_be_unfilled", "number", "under_mode")

    def __init__(self, place: CheckedPlace) -> None:
        self._place, self.number = place, place.number
        place.sampled(self)
        # Whether the rerun is under a mode, which sees writes and operators that leave memory unfilled.
        self.under_mode = True
        # Whether an operator may leave memory unfilled, whose content differs from run to run.
        self.may_be_unfilled = False

    def passed(self) -> None:
        self._place.compared()

    def settle(self, error: CheckpointError, advice: str = _ADVICE) -> None:
        """Raises the error, or warns once for each place."""
        words = str(error)
        separator = "" if words.endswith("\n") else " "
        error.args = (f"{words}{separator}Found by the self-check in pass {self.number} of this region. {advice}",)
        is_unsure = self.may_be_unfilled and isinstance(error, DeterminismError)
        if not is_unsure and self.number < LATE and self_check.level == "error":
            raise error
        if not self._place.has_warned:
            self._place.has_warned = True
            unfilled = " The difference may be memory that operators of the region leave unfilled." if is_unsure else ""
            warn_user(f"{error}{unfilled}")


def sample_of(tensor: torch.Tensor) -> Any:
    """Returns projections of a tensor, or a hash of the bits where deterministic algorithms are asked for."""
    # Nondeterministic kernels may add in another order each time: on accelerators, in an accumulating ``index_put`` on a host.
    on_host = is_on_host(tensor)
    if is_opaque(tensor) or (not (on_host or tensor.is_meta) and is_capturing(tensor.device.type)):
        return None
    sample = ordered_hash_of(tensor) if torch.are_deterministic_algorithms_enabled() else projections_of(tensor)
    if not on_host:
        return sample
    return _numbers_in(sample.reshape(-1)) if isinstance(sample, torch.Tensor) else numbers_of([sample])[0]


def _numbers_in(sample: torch.Tensor) -> Any:
    """Returns the numbers of projections in a third of a tuple's memory, or a hash in a tuple."""
    return array("d", sample.tolist()) if sample.is_floating_point() else tuple(sample.tolist())


def numbers_of(samples: Sequence[Any]) -> list[Any]:
    """Returns samples as tuples of numbers, which take no memory of tensors; waits for each device once."""
    tensors: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    todo = list(samples)
    for sample in todo:  # including parts added in the loop
        if isinstance(sample, list):
            todo += sample
        elif isinstance(sample, torch.Tensor):
            tensors.setdefault((sample.device, sample.dtype), []).append(sample)
    numbers: dict[int, tuple[Any, ...]] = {}
    for group in tensors.values():
        flat = group[0].reshape(-1).tolist() if len(group) == 1 else torch.cat([part.reshape(-1) for part in group]).tolist()
        for part in group:
            numbers[id(part)], flat = tuple(flat[: part.numel()]), flat[part.numel() :]
    return [_in_numbers(sample, numbers) for sample in samples]


def _in_numbers(sample: Any, numbers: dict[int, tuple[Any, ...]]) -> Any:
    return [_in_numbers(part, numbers) for part in sample] if isinstance(sample, list) else numbers.get(id(sample), sample)


def others(samples: Sequence[Any], values: Sequence[Any]) -> list[int]:
    """Returns the indices of values that differ from the noted samples by more than the order of additions explains."""
    pairs = enumerate(zip(samples, values, strict=False))  # a rerun may end before the last value
    indices = [index for index, (sample, value) in pairs if sample is not None and value is not MISSING]
    recomputed = [past_modes(sample_of, values[index]) for index in indices]
    rows = [(samples[index], sample, values[index].dtype) for index, sample in zip(indices, recomputed, strict=True)]
    return [indices[row] for row in differing(rows)]


def differing(rows: Sequence[tuple[Any, Any, torch.dtype]]) -> list[int]:
    """Returns the places of pairs of samples that differ; waits for each device once."""
    numbers = past_modes(numbers_of, [sample for pair in rows for sample in pair[:2]])
    pairs = zip(numbers[::2], numbers[1::2], rows, strict=True)
    return [place for place, (expected, recomputed, row) in enumerate(pairs) if not are_close(expected, recomputed, row[2])]
