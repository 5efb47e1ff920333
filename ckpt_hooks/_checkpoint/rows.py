"""Whether the rows of a function's argument depend on each other: some rows at once, and in two halves."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch

from ckpt_hooks import _ambient
from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.misuse import Misuse, name_of_callable
from ckpt_hooks._core.modes import is_without_values, past_modes
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._function.journal import Loan, journal_of
from ckpt_hooks._function.options import name_of_function
from ckpt_hooks._operators.draws import DrawWatch

#: Rows of each half.
_MOST_ROWS = 8

#: Functions compared, and modules of methods, by number.
_compared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def compare_rows(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    cut: Sequence[torch.Tensor],
    dim: int,
    results: Callable[[Iterable[torch.Tensor], int], Any],
) -> None:
    """Raises if the results of some rows at once differ from those of two halves; looks at a function once."""
    owner = function.__self__ if isinstance(function, MethodType) else function
    rows = cut[0].shape[dim]
    half = min(rows // 2, _MOST_ROWS)
    if not half or cut[0].is_meta or is_without_values() or _compared.get(id(owner)) is owner:
        return
    # From the middle: the first labels of a sequence are ignored, more often than not.
    some = [tensor.narrow(dim, rows // 2 - half, 2 * half) for tensor in cut]

    def compared() -> tuple[str | None, Any, Any]:
        with torch.no_grad(), _as_before(function, arguments), DrawWatch() as watch:
            whole, halves = results(some, 2 * half), results(some, half)
        return watch.found, whole, halves

    drawn, whole, halves = past_modes(compared)
    pairs = zip(whole, halves, strict=True) if isinstance(whole, tuple) else [(whole, halves)]
    if not all(_are_close(one, other, cut[0]) for one, other in pairs):
        if drawn is None:
            raise Misuse.DEPENDENT_ROWS.error(kind=ValueError, name=name_of_callable(function), dim=dim, rows=half)
        warn_user(
            f"check_rows compares nothing: {name_of_callable(function)!r} draws random numbers ({drawn}), so that its rows "
            "differ in any case. Call it once without, in eval() say."
        )
    with contextlib.suppress(TypeError):  # of no weak references
        _compared[id(owner)] = owner


@contextlib.contextmanager
def _as_before(function: Callable[..., Any], arguments: Sequence[Any]) -> Iterator[None]:
    """Restores on leaving what a rerun restores: random states, and what the function reaches."""
    journal = journal_of(function, [one for one in arguments if not isinstance(one, torch.Tensor)], preserve_buffers=True)
    region = (name_of_function(function),)
    loan = Loan(journal, {}, lambda tensor, _: mutated(Why.WRITTEN_LATE, region, tensor, 0)) if journal else None
    before = _ambient.enter(_ambient.capture(preserve_rng_state=True, generators=journal.generators if journal else ()))
    caches_casts = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)  # which would have casts of weights without gradients, before 2.13
        if loan is not None:
            loan.begin()
        try:
            yield
        finally:
            if loan is not None:
                loan.end()
    finally:
        torch.set_autocast_cache_enabled(caches_casts)
        _ambient.leave(before)


def _are_close(whole: torch.Tensor, halves: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether tensors are equal up to the root of the coarsest precision there, in parts of the largest number."""
    dtypes = [one.dtype for one in (whole, x) if one.is_floating_point() or one.is_complex()]
    if torch.is_autocast_enabled(x.device.type):
        dtypes.append(torch.get_autocast_dtype(x.device.type))
    if not whole.numel() or whole.dtype not in dtypes:
        return True
    largest = whole.abs().nan_to_num().max()
    tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5 * largest
    return bool(torch.allclose(whole, halves, 0, float(tolerance), equal_nan=True))
