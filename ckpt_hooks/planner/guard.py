"""Runs steps under a plan; if memory runs out, undoes the step and runs it again under a tighter plan."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Self

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.misuse import OfThisProcess, check_is
from ckpt_hooks._torch.profiling import is_profiling
from ckpt_hooks.errors import BudgetTooSmallError, CheckpointError
from ckpt_hooks.modules import AppliedCheckpointing
from ckpt_hooks.report.ledger import MemoryLedger, memory_ledger
from ckpt_hooks.report.ledger.data import maker_in_words
from ckpt_hooks.report.printing import format_bytes

from .ranks import Ranks
from .restoring import StateBeforeStep, trainers_of

T = TypeVar("T")
_logger = logging.getLogger("ckpt_hooks")


class Guard(OfThisProcess):
    """Runs training steps under a plan, and reruns a step under a tighter plan if memory runs out. Made by :meth:`Plan.guard`.

    Attributes:
        plan: The :class:`Plan` in use.
        log: A line for each change of plan.
    """

    def __init__(self, plan: Any, ranks: Ranks, model: Module, limit: int | None) -> None:
        self.plan, self.log = plan, list[str]()
        self._model, self._limit = model, limit
        self._applied: AppliedCheckpointing | None = None
        self._trainers: list[Any] = []
        self._ranks = ranks

    def __enter__(self) -> Self:
        self._applied = self.plan.apply(self._model)
        self._trainers = trainers_of(self._model)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._applied is not None:
            self._applied.undo()
            self._applied = None

    def __call__(self, step: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Runs a step, again under tighter plans while memory runs out.

        Args:
            step: Runs one training step. What it takes from an iterator itself is gone when it runs again: pass the batch.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What the step returns.

        Raises:
            torch.OutOfMemoryError: If memory runs out under the least plan, with a note of a ledger on the largest causes.
            BudgetTooSmallError: If the least plan is above the limit.
            CheckpointError: If a step that failed had written to parameters, or to the state of an optimizer, outside of any
                ``optimizer.step()``; or if another rank failed.
        """
        check_is(step, Callable, "step", "a function to run", "Write `guard(step, batch)`.")
        if self._applied is None:
            raise RuntimeError(
                "The guard is not entered. Write `with plan.guard() as guard:`, and `guard(step, batch)` inside."
            )
        with self._ranks.together():
            return self._run(step, args, kwargs)

    def _run(self, step: Callable[..., T], args: Any, kwargs: Any) -> T:
        has_ledger = self._limit is not None
        while True:
            before = StateBeforeStep(self._model, self._trainers, is_late=True)
            ledger = memory_ledger() if has_ledger else contextlib.nullcontext()
            try:
                with register_optimizer_step_pre_hook(before.copy_for), ledger as measured:
                    result = step(*args, **kwargs)
                peak = self._ranks.most(0 if measured is None else measured.peak.nbytes)  # all ranks meet here
            except torch.OutOfMemoryError as error:
                before.put_back()
                # With other ranks the step cannot run again: they may wait in a collective until their group ends.
                tighter = self._tighter() if self._ranks.is_alone else None
                if tighter is None and (has_ledger or is_profiling() or not self._ranks.is_alone):
                    raise
                traceback.clear_frames(error.__traceback__)  # frames hold tensors of the step
                words = "memory ran out"
            except Exception:
                before.put_back()
                raise
            except BaseException:
                try:
                    before.put_back()
                except CheckpointError as lost:  # the program expects the first error, such as KeyboardInterrupt
                    warn_user(str(lost))
                raise
            else:
                if measured is None or self._limit is None or peak <= self._limit:
                    return result
                before.put_back()
                del result
                words = f"the step took {format_bytes(peak)}, above the limit of {format_bytes(self._limit)}"
                if (tighter := self._tighter()) is None:
                    raise self._above(measured, self._limit, words)
            gc.collect()
            if tighter is None:
                has_ledger = True  # the least plan failed: run once more with a ledger, for a note on what holds memory
            else:
                self._go_on_with(tighter, words)

    def _above(self, ledger: MemoryLedger, limit: int, words: str) -> BudgetTooSmallError:
        peak = ledger.peak
        there = f"in {maker_in_words(peak.origin)}" if peak.origin is not None else f"in {peak.phase}"
        return BudgetTooSmallError(
            f"The tightest plan does not fit: {words}, most of it {there}. Raise the limit, or pass a smaller batch.",
            budget=limit,
            minimum=peak.nbytes,
            bottleneck=None,
        )

    def _tighter(self) -> Any:
        """Returns the next plan of the front below the present plan; None if the present plan is the least."""
        plans = self.plan, *self.plan.others
        tighter = [plan._tighter() for plan in plans]
        if not any(tighter):
            return None
        first, *others = (below or plan for below, plan in zip(tighter, plans, strict=True))
        return dataclasses.replace(first, others=others)

    def _go_on_with(self, plan: Any, words: str) -> None:
        self.__exit__()
        self.plan = plan
        self._applied = plan.apply(self._model)
        again = f"{plan.recomputed:.1%} of forward runs again"
        self.log.append(f"{words}: the step runs once more, under a plan of {format_bytes(plan.predicted_peak)}, where {again}")
        _logger.warning(self.log[-1])
