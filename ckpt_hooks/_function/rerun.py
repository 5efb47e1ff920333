"""Reruns a region: calls its function again, and stops the call when all wanted tensors have been saved.

Each undo step runs again if an exception, such as Ctrl-C, interrupts it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

import torch

from ckpt_hooks import _ambient
from ckpt_hooks._ambient.random import (
    are_other_threads_alive,
    default_generators_lock,
    devices_between,
    have_several_drawn,
    hold_sources,
    moves_by_itself,
    position_of_generators,
    shared_sources_lock,
)
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.hooks import HandBack, StopRecompute, mark_thread, rewind, undo
from ckpt_hooks._core.modes import modes_in_words, pause_modes, resume_modes, reusable, users_modes
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._state.journal import JournalLoan
from ckpt_hooks._state.notes import Note
from ckpt_hooks._torch.autograd import pop_saved_tensors_hooks, push_saved_tensors_hooks, set_grad_enabled
from ckpt_hooks._torch.modes import (
    is_any_transform_active,
    is_mapped,
    num_dispatch_modes,
    resume_transforms,
    suspend_transforms,
)
from ckpt_hooks.errors import DeterminismError, MutationError

from . import words
from .arguments import HandedOut
from .collector import Collector, PackHook
from .compare import result_of
from .rerun_modes import CheckedRerun, WatchReads
from .words import blame, draws_error, explain_failure, warn_of_drawing_thread

if TYPE_CHECKING:
    from ckpt_hooks._operators.draws import DrawWatch

_NOTHING = nullcontext()  # entered where a rerun needs no context manager

#: Tensors written to since forward, with their versions in forward.
ChangedTensors = Sequence[tuple[torch.Tensor, int]]
_UNCHANGED: ChangedTensors = ()


def rerun(frame: Any, wanted: Collection[int] | None, *, probe: DrawWatch | None = None) -> list[torch.Tensor]:
    """Calls the function of a frame again; returns values by handle, up to the last wanted handle (None: all living)."""
    # MISSING stands for an unwanted tensor, or for a tensor modified later in the rerun, which a rerun for it alone brings
    # back. The caller holds the frame's lock. A rerun with a probe watches random draws, and is not compared with forward. No
    # ``ExitStack``: it would keep an exception, and with it the region's inputs, in a cycle.
    watch = _draw_watch() if probe is None and words.other_threads_draw and are_other_threads_alive() else probe
    arguments, mark, outer = frame.arguments, mark_thread(), frame.collector
    collector = frame.collector = Collector(frame, wanted)
    handed_out: list[HandedOut] = []
    tensors: Sequence[torch.Tensor | None] | None = None
    loan: JournalLoan | None = None  # puts back forward's values in all that the function reaches
    borrows, paused, transforms = False, None, None
    place = None if frame.current is None else frame.current.enter()
    try:
        try:
            # Enter: this frame becomes the innermost, the parent of frames inside, as in forward (Rule 3).
            if num_dispatch_modes():
                paused = pause_modes()
            stack.innermost, frame.recomputing = frame, True
            transforms = suspend_transforms() if is_mapped() or is_any_transform_active() else None
            set_grad_enabled(True)
            tensors, stand_ins = arguments.restore(frame, handed_out)
            # Only one recompute at a time sets the default generators, and none if threads train on a device each. Other
            # recomputes draw from their own generators, without a wait: user code runs under the lock, so a wait may deadlock.
            is_apart = are_other_threads_alive() and have_several_drawn()
            borrows = not is_apart and default_generators_lock.acquire(False)
            try:
                if frame.state is not None:
                    # The loan begins after restoring arguments, which takes locks of other frames: a thread that waits for a
                    # lock while it has a loan could deadlock with a thread that waits for the loan.
                    loan = JournalLoan(frame.state, stand_ins, collector.mutated)
                    loan.begin()
                leave_ambient = _enter_ambient(frame.ambient, watch, borrows=borrows)
                try:
                    # Call, with arguments as forward found them.
                    changed = lost = _UNCHANGED
                    if loan is not None:
                        if loan.names:
                            raise mutated(Why.PARAMETER_GONE, format_path(frame.path), detail=loan.names[0])
                        lost = loan.lost
                        if frame.complete:
                            changed = [*loan.journal.changed(loan), *lost, *loan.changed]
                    args, kwargs = arguments.build(tensors, loan)
                    hook = collector.hook(loan, may_return=watch is None, watches_draws=borrows)
                    if changed or lost or frame.sampled is not None or num_dispatch_modes():
                        hook = collector.watching(hook, lost)
                    is_under_mode = frame.sampled is not None and frame.sampled.under_mode
                    checked = CheckedRerun(frame, loan, tensors) if is_under_mode else _NOTHING
                    _call(frame, loan, args, kwargs, hook, changed, checked)
                finally:
                    undo(leave_ambient)
            finally:
                if loan is not None:
                    undo(loan.end)
        except StopRecompute:
            pass
        except Exception as error:
            if _is_at_fault(error, frame, is_called=tensors is not None):
                raise
        finally:
            # Leave.
            frame.recomputing = outer is not None
            if paused:
                resume_modes(paused)
            _, _, stack.innermost, grad_enabled = mark
            set_grad_enabled(grad_enabled)
            if transforms is not None:
                resume_transforms(transforms)
            for handle in collector.registered:
                handle.remove()
            if handed_out:
                arguments.look_at(handed_out)
        # Compare.
        values = result_of(collector, frame.options.check) if probe is None else []
    except BaseException as error:
        rewind(mark, error)
        if isinstance(error, DeterminismError) and error.region == format_path(frame.path):
            blame(error, frame)
            if frame.modes is not None:
                error.args = (f"{error}{modes_in_words(frame.modes, users_modes())}",)
            if frame.explain is not None:
                raise frame.explain(error) from error
        raise
    finally:
        if borrows:
            default_generators_lock.release()
        frame.collector = outer
        collector.let_go()
        if frame.current is not None:
            undo(frame.current.leave, place)
    if collector.moved_otherwise and probe is None:
        _look_into_draws(frame, wanted, collector.moved_otherwise, watch)
    return values


def _enter_ambient(ambient: _ambient.Ambient, watch: DrawWatch | None, *, borrows: bool) -> Callable[[], object]:
    if borrows and watch is None and not ambient.has_sources:
        return functools.partial(_ambient.leave, _ambient.enter(ambient))
    from ckpt_hooks._operators.draws import OwnDraws

    with ExitStack() as undone:  # for tracked sources, or while another recompute has the default generators
        if ambient.has_sources:
            undone.enter_context(shared_sources_lock)
        undone.callback(undo, _ambient.leave, _ambient.enter(ambient, default_generators=borrows))
        if ambient.has_sources:
            undone.enter_context(hold_sources(source for source, _ in ambient.random[2]))
        if not borrows:
            undone.enter_context(OwnDraws(ambient.random))
        if watch is not None:
            undone.enter_context(watch)
        return undone.pop_all().close


def _call(
    frame: Any,
    loan: JournalLoan | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    hook: PackHook,
    changed: ChangedTensors,
    checked: AbstractContextManager[Any],
) -> None:
    """Calls the function with a pack hook, forward's context variables and the region's context managers."""
    collector = frame.collector
    push_saved_tensors_hooks(hook, HandBack(collector.values, frame.path))
    try:
        if not (changed or checked is not _NOTHING or frame.variables or frame.contexts is not None or copy_context()):
            frame.function(*args, **kwargs)
            return
        # The rerun gets a new context: variables that it sets end with it, and a list of hidden states in a variable gets no
        # results of the rerun.
        context = Context()
        for variable, value, _ in frame.variables:
            context.run(variable.set, loan.value(value) if loan is not None and type(value) is Note else value)

        def run() -> None:
            with (
                WatchReads(changed, collector) if changed else _NOTHING,
                _NOTHING if frame.contexts is None else reusable(frame.contexts[1]),
                checked,
            ):
                frame.function(*args, **kwargs)

        context.run(run)
    finally:
        pop_saved_tensors_hooks()


def _is_at_fault(error: Exception, frame: Any, *, is_called: bool) -> bool:
    """Whether an exception of the rerun is an error: not if all values were there already (Rule 8)."""
    done, region = frame.collector.done, format_path(frame.path)
    if isinstance(error, (DeterminismError, MutationError)):
        # An error of this region always counts. An error of an inner region after the stop does not: its forward was cut short.
        return error.region == region or not done
    if is_called and not done and frame.complete:
        explain_failure(error, region)
    return not done


def _look_into_draws(frame: Any, wanted: Collection[int] | None, moved: set[torch.device], watch: DrawWatch | None) -> None:
    """Raises unless another thread, not this function, has moved the generators of some devices."""
    region, is_proven, group = format_path(frame.path), watch is not None, torch.distributed
    if watch is None:
        # One more rerun on this rank alone would run the region's collectives without the other ranks.
        if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            raise draws_error(
                region, " It may be a false alarm if another thread drew: in a process group nothing tells who did."
            )
        watch = _draw_watch()
        rerun(frame, wanted, probe=watch)
    if watch.unknown is not None or moved & watch.devices:
        raise draws_error(region, f" In the region, {watch.unknown or f'{watch.first_draw} draws'}.")
    # The first rerun itself may have drawn, to fill a cache that the second rerun, with the probe, only read.
    positions, where = [position for _, position in frame.positions], position_of_generators()
    in_forward: set[torch.device] = set().union(*(devices_between(positions[0], position, where) for position in positions))
    if not (is_proven or moved <= in_forward or moves_by_itself(moved)):
        raise draws_error(region)
    warn_of_drawing_thread()


def _draw_watch() -> DrawWatch:
    from ckpt_hooks._operators.draws import DrawWatch

    return DrawWatch()
