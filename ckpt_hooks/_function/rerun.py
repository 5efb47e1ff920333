"""Rerunning a region: its function is called again, and is stopped, if work is left, when every wanted tensor was saved.

Each undo step runs once more if interrupted by an exception, such as Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import Context, copy_context
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ckpt_hooks import _ambient
from ckpt_hooks._ambient.positions import are_other_threads_alive, have_several_drawn
from ckpt_hooks._ambient.streams import default_generators_lock
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.hooks import HandBack, StopRecompute, mark_thread, rewind, undo
from ckpt_hooks._core.modes import modes_in_words, pause_modes, resume_modes, reusable, users_modes
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._torch.autograd import pop_saved_tensors_hooks, push_saved_tensors_hooks, set_grad_enabled
from ckpt_hooks._torch.modes import num_dispatch_modes, resume_transforms, suspend_transforms
from ckpt_hooks.errors import DeterminismError, MutationError

from .arguments import HandedOut, Hooks, Restored, put_hooks_back
from .collector import Collector
from .compare import result_of
from .contents import WatchReads
from .journal import Loan
from .notes import Note
from .words import blame, note_failure, raise_unread, raise_without_history

_NOTHING = nullcontext()  # to enter
_UNCHANGED: list[tuple[torch.Tensor, int]] = []


def rerun(
    frame: Any, wanted: Collection[int] | None, watch: AbstractContextManager[Any] | None, *, compares: bool = True
) -> tuple[list[torch.Tensor], set[torch.device]]:
    """Calls the function of a frame again, under a watch of its random draws if asked for.

    Returns the values, none of them if these are not to be compared with forward; and the devices whose random streams have
    moved otherwise than in forward, maybe by another thread.
    """
    arguments, mark, outer, next_hook = frame.arguments, mark_thread(), frame.collector, RemovableHandle.next_id
    collector = frame.collector = Collector(frame, wanted, may_return=watch is None)
    handed_out: list[HandedOut] = []
    hooks: Hooks = ()
    restored: Restored | None = None
    loan: Loan | None = None  # of what the function reaches
    borrows, paused, transforms = False, None, None
    place = None if frame.current is None else frame.current.enter()
    try:
        try:
            # The thread is as if no frame were active but this one, the parent of the frames inside (Rule 3).
            if num_dispatch_modes():
                paused = pause_modes()
            stack.innermost, frame.recomputing = frame, True
            transforms = suspend_transforms()
            set_grad_enabled(True)
            restored = arguments.restore(frame, handed_out)
            hooks = arguments.hooks(handed_out)
            # One recompute at a time sets the default generators back, where threads do not train on several devices. Others
            # draw from generators of their own: who waits for a lock under which user code runs may wait for ever.
            is_apart = are_other_threads_alive() and have_several_drawn()
            borrows = collector.watches_draws = not is_apart and default_generators_lock.acquire(False)
            try:
                if frame.state is not None:
                    # Waits for other loans come last: restoring arguments takes the locks of other frames.
                    loan = Loan(frame.state, restored.stand_ins, collector.mutated)
                    loan.begin()
                _call_in_ambient(frame, restored, loan, watch, borrows=borrows)
            finally:
                if loan is not None:
                    undo(loan.end)
        except StopRecompute:
            pass
        except Exception as error:
            if _is_at_fault(error, frame, loan, is_called=restored is not None):
                raise
        finally:
            frame.recomputing = outer is not None
            if paused:
                resume_modes(paused)
            _, _, stack.innermost, grad_enabled = mark
            set_grad_enabled(grad_enabled)
            if transforms is not None:
                resume_transforms(transforms)
            if hooks or RemovableHandle.next_id != next_hook:  # one counter for all hooks of the process
                put_hooks_back(hooks, arguments.hooks(handed_out))
            if handed_out:
                arguments.look_at(handed_out)
            if restored is not None:
                arguments.put_memory_back(restored)
        return _compared(frame) if compares else [], collector.moved_otherwise
    except BaseException as error:
        if frame.modes is not None and isinstance(error, DeterminismError) and error.region == format_path(frame.path):
            error.args = (f"{error}{modes_in_words(frame.modes, users_modes())}",)
        rewind(mark, error)
        raise
    finally:
        if borrows:
            default_generators_lock.release()
        frame.collector = outer
        collector.let_go()
        if frame.current is not None:
            undo(frame.current.leave, place)


def _call_in_ambient(
    frame: Any, restored: Restored, loan: Loan | None, watch: AbstractContextManager[Any] | None, *, borrows: bool
) -> None:
    """Calls the function under the random streams, autocast and switches of forward."""
    ambient = frame.ambient
    if borrows and watch is None and not ambient.has_streams:
        before = _ambient.enter(ambient)
        try:
            _call(frame, restored, loan)
        finally:
            undo(_ambient.leave, before)
        return
    from ckpt_hooks._ambient.named_random_sources import hold_sources, shared_streams_lock
    from ckpt_hooks._operators.draws import OwnDraws

    with ExitStack() as undone:  # with explicit streams, or beside another recompute with the generators
        if ambient.has_streams:
            undone.enter_context(shared_streams_lock)
        undone.callback(undo, _ambient.leave, _ambient.enter(ambient, default_generators=borrows))
        if ambient.has_streams:
            undone.enter_context(hold_sources(stream for stream, _ in ambient.streams[2]))
        if not borrows:
            undone.enter_context(OwnDraws(ambient.streams))
        if watch is not None:
            undone.enter_context(watch)
        _call(frame, restored, loan)


def _call(frame: Any, restored: Restored, loan: Loan | None) -> None:
    """Calls the function with arguments as forward found them."""
    collector = frame.collector
    changed, lost, exchanged = _UNCHANGED, restored.lost, frozenset[Any]()
    if loan is not None:
        if loan.names:
            raise mutated(Why.PARAMETER_GONE, format_path(frame.path), detail=loan.names[0])
        lost, exchanged = [*lost, *loan.lost], loan.storages
        if frame.complete:
            changed = [*loan.journal.changed(loan), *lost, *loan.changed]
    elif frame.complete:
        changed = lost
    args, kwargs = frame.arguments.build(restored.tensors, loan)
    if restored.lent or (loan is not None and loan.lent):
        collector.lent = {**restored.lent, **({} if loan is None else loan.lent)}
    hook = collector.hook(exchanged)
    if changed or num_dispatch_modes():
        hook = collector.noting_versions(hook)
    if lost:
        hook = collector.doubting(hook, lost)
    push_saved_tensors_hooks(hook, HandBack(collector.values, frame.path))
    try:
        if changed:
            with WatchReads(changed, collector):
                _call_in_context(frame, loan, args, kwargs)
        elif frame.variables or frame.contexts is not None or copy_context():
            _call_in_context(frame, loan, args, kwargs)
        else:
            frame.function(*args, **kwargs)
    finally:
        pop_saved_tensors_hooks()


def _call_in_context(frame: Any, loan: Loan | None, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Calls a function with forward's context variables, in context managers of the region's own."""
    # A context of its own, since one cannot be entered twice at once, and variables set in a rerun belong to the rerun. A
    # collector (a list, say, of the hidden states of all layers) has what forward found, and does not get a rerun's results.
    context = Context()
    for variable, value, _ in frame.variables:
        context.run(variable.set, loan.value(value) if loan is not None and type(value) is Note else value)

    def run() -> None:
        with _NOTHING if frame.contexts is None else reusable(frame.contexts[1]):
            frame.function(*args, **kwargs)

    context.run(run)


def _is_at_fault(error: Exception, frame: Any, loan: Loan | None, *, is_called: bool) -> bool:
    """Whether an exception of the rerun is an error: not if it came when every value was there (Rule 8)."""
    # Where there is more to say of it, this raises an error of the region in its place.
    done, region = frame.collector.was_done_before(error), format_path(frame.path)
    if isinstance(error, (DeterminismError, MutationError)):
        # The region's own error came before the stop. Other errors are of inner regions, whose forward the stop cut short.
        own = error.region == region
        if own and isinstance(error, DeterminismError):
            _explain(error, frame)
        return own or not done
    if is_called and not done and frame.complete:
        if loan is not None and loan.has_gone:
            raise_unread(error, region)
        raise_without_history(error, region)
        note_failure(error, region)
    return not done


def _explain(found: DeterminismError, frame: Any) -> None:
    if frame.explain is not None:
        raise frame.explain(found) from found


def _compared(frame: Any) -> list[torch.Tensor]:
    try:
        return result_of(frame.collector, frame.options.check)
    except DeterminismError as found:  # not the errors of outer regions, which restore the arguments
        blame(found, frame, is_debugged=frame.explain is not None)
        _explain(found, frame)
        raise
