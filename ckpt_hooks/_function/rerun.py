"""Rerunning a region: its function is called again, and is stopped, if work is left, when every wanted tensor was saved.

Each undo step runs once more if interrupted by an exception, such as Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import Context, copy_context
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ckpt_hooks import _ambient
from ckpt_hooks._ambient.named_random_sources import hold_sources, shared_streams_lock
from ckpt_hooks._ambient.streams import default_generators_lock
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.hooks import HandBack, StopRecompute, mark_thread, rewind, undo
from ckpt_hooks._core.modes import modes_in_words, pause_modes, resume_modes, reusable, users_modes
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._operators.draws import DrawWatch, OwnDraws, are_other_threads_alive, have_several_drawn
from ckpt_hooks._torch.autograd import pop_saved_tensors_hooks, push_saved_tensors_hooks, set_grad_enabled
from ckpt_hooks._torch.modes import num_dispatch_modes, resume_transforms, suspend_transforms
from ckpt_hooks.errors import DeterminismError, MutationError

from .arguments import HandedOut, Hooks, Restored, put_hooks_back
from .captured_call import CapturedCall
from .collector import Collector
from .compare import result_of
from .contents import WatchReads
from .explain import blame, name_of_tensor, note_failure, raise_unread, raise_without_history
from .handles import HandleFrame
from .journal import Loan
from .notes import Note

_NOTHING = nullcontext()  # to enter
_UNCHANGED: list[tuple[torch.Tensor, int]] = []


class Rerun:
    """One rerun of a region, under a watch of its random draws if asked for."""

    __slots__ = (
        "_borrows",
        "_call",
        "_frame",
        "_handed_out",
        "_hooks",
        "_loan",
        "_mark",
        "_next_hook",
        "_paused",
        "_restored",
        "_transforms",
        "_wanted",
        "_watch",
        "collector",
    )

    def __init__(
        self,
        frame: HandleFrame,
        call: CapturedCall,
        wanted: Collection[int] | None,
        *,
        watch: DrawWatch | None = None,
    ) -> None:
        self._watch = watch
        self._frame, self._call, self._wanted = frame, call, wanted
        # A rerun in the middle of forward must not do what forward has not done yet.
        early_stop = call.options.early_stop or not frame.complete
        may_return = watch is None  # a watch of draws does not reach beyond the last value
        self.collector = Collector(
            frame, call.function, early_stop=early_stop, may_return=may_return, in_contexts=call.contexts is not None
        )
        self._mark = mark_thread()
        self._borrows = False
        self._paused: Any = None
        self._transforms: Any = None
        self._next_hook = RemovableHandle.next_id
        self._handed_out: list[HandedOut] = []
        self._hooks: Hooks = ()
        self._restored: Restored | None = None
        self._loan: Loan | None = None  # of what the function reaches

    def run(self, *, compares: bool = True) -> list[torch.Tensor]:
        """Calls the function again; returns the values, or none of them if these are not to be compared with forward."""
        frame, collector, outer = self._frame, self.collector, self._frame.collector
        frame.collector = collector
        place = None if frame.current is None else frame.current.enter()
        try:
            try:
                self._enter()
                self._call_in_ambient()
            except StopRecompute:
                pass
            except Exception as error:
                if self._is_at_fault(error):
                    raise
            finally:
                frame.recomputing = outer is not None
                self._exit()
            return self._compare() if compares else []
        except BaseException as error:
            modes = self._call.modes
            if modes is not None and isinstance(error, DeterminismError) and error.region == self._region():
                error.args = (f"{error}{modes_in_words(modes, users_modes())}",)
            rewind(self._mark, error)
            raise
        finally:
            if self._borrows:
                self._borrows = False
                default_generators_lock.release()
            frame.collector, self._loan = outer, None  # which knows this
            collector.let_go()
            if frame.current is not None:
                undo(frame.current.leave, place)

    def _region(self) -> tuple[str, ...]:
        return format_path(self._frame.path)

    def _enter(self) -> None:
        """Makes the thread as if no frame were active but this one, the parent of the frames inside (Rule 3)."""
        frame, arguments = self._frame, self._call.arguments
        if num_dispatch_modes():
            self._paused = pause_modes()
        stack.innermost = frame
        frame.recomputing = True
        self._transforms = suspend_transforms()
        set_grad_enabled(True)
        self._restored = arguments.restore(self._region, self._handed_out, is_open=not frame.complete)
        self._hooks = arguments.hooks(self._handed_out)

    def _exit(self) -> None:
        if self._paused:
            resume_modes(self._paused)
        _, _, stack.innermost, grad_enabled = self._mark
        set_grad_enabled(grad_enabled)
        if self._transforms is not None:
            resume_transforms(self._transforms)
        if self._hooks or RemovableHandle.next_id != self._next_hook:  # one counter for all hooks of the process
            put_hooks_back(self._hooks, self._call.arguments.hooks(self._handed_out))
        if self._handed_out:
            self._call.arguments.look_at(self._handed_out)
        if self._restored is not None:
            self._call.arguments.put_memory_back(self._restored)

    def _is_at_fault(self, error: Exception) -> bool:
        """Whether an exception of the rerun is an error: not if it came when every value was there (Rule 8)."""
        # Where there is more to say of it, this raises an error of the region in its place.
        done = self.collector.was_done_before(error)
        if isinstance(error, (DeterminismError, MutationError)):
            # The region's own error came before the stop. Other errors are of inner regions, whose forward the stop cut short.
            own = error.region == self._region()
            if own and isinstance(error, DeterminismError):
                self._explain(error)
            return own or not done
        if self._restored is not None and not done and self._frame.complete:
            if self._loan is not None and self._loan.has_gone:
                raise_unread(error, self._region())
            raise_without_history(error, self._region())
            note_failure(error, self._region())
        return not done

    def _explain(self, found: DeterminismError) -> None:
        if self._call.explain is not None:
            raise self._call.explain(found) from found

    def _compare(self) -> list[torch.Tensor]:
        try:
            return result_of(self.collector, self._call.options.check)
        except DeterminismError as found:  # not the errors of outer regions, which restore the arguments
            blame(found, self._frame, is_debugged=self._call.explain is not None)
            self._explain(found)
            raise

    def _call_in_ambient(self) -> None:
        """Calls the function under the random streams, autocast and switches of forward."""
        ambient, state = self._call.ambient, self._call.state
        assert self._restored is not None
        # One recompute at a time sets the default generators back, where threads do not train on several devices. Others draw
        # from generators of their own: who waits for a lock under which user code runs may wait for ever.
        is_apart = are_other_threads_alive() and have_several_drawn()
        self._borrows = self.collector.watches_draws = not is_apart and default_generators_lock.acquire(False)
        try:
            if state is not None:
                # Waits for other loans come last: restoring arguments takes the locks of other frames.
                self._loan = Loan(state, self._restored.stand_ins, self._mutated)
                self._loan.begin()
            if not self._borrows or self._watch is not None or ambient.has_streams:
                self._call_with_more()
                return
            before = _ambient.enter(ambient)
            try:
                self._call_function()
            finally:
                undo(_ambient.leave, before)
        finally:
            if self._loan is not None:
                undo(self._loan.end)

    def _call_with_more(self) -> None:
        """Calls the function with explicit streams, or beside another recompute with the generators."""
        ambient = self._call.ambient
        with ExitStack() as undone:
            if ambient.has_streams:
                undone.enter_context(shared_streams_lock)
            undone.callback(undo, _ambient.leave, _ambient.enter(ambient, default_generators=self._borrows))
            if ambient.has_streams:
                undone.enter_context(hold_sources(stream for stream, _ in ambient.streams[2]))
            if not self._borrows:
                undone.enter_context(OwnDraws(ambient.streams))
            if self._watch is not None:
                undone.enter_context(self._watch)
            self._call_function()

    def _call_function(self) -> None:
        """Calls the function with arguments as forward found them."""
        call, collector, loan = self._call, self.collector, self._loan
        restored = self._restored
        assert restored is not None
        changed, lost = _UNCHANGED, restored.lost
        in_context = bool(call.variables) or call.contexts is not None or copy_context()
        if loan is not None:
            if loan.names:
                raise mutated(Why.PARAMETER_GONE, self._region(), detail=loan.names[0])
            lost = [*lost, *loan.lost] if lost else loan.lost
            if self._frame.complete:
                changed = [*loan.journal.changed(loan), *lost, *loan.changed]
        elif self._frame.complete:
            changed = lost
        args, kwargs = call.arguments.build(restored.tensors, loan)
        if restored.lent or (loan is not None and loan.lent):
            collector.lent = {**restored.lent, **({} if loan is None else loan.lent)}
        hook = collector.hook(self._wanted) if loan is None else collector.hook(self._wanted, loan.storages)
        if changed or num_dispatch_modes():
            hook = collector.noting_versions(hook)
        if lost:
            hook = collector.doubting(hook, lost, self._mutated)
        push_saved_tensors_hooks(hook, HandBack(collector.values, self._frame.path))
        try:
            if changed:
                with WatchReads(changed, collector, self._mutated):
                    _call_in_context(call, loan, args, kwargs)
            elif in_context:
                _call_in_context(call, loan, args, kwargs)
            else:
                call.function(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()

    def _mutated(self, tensor: torch.Tensor, version: int) -> MutationError:
        call = self._call
        why = Why.COPIED_NEXT if call.state is not None and call.state.note_written(tensor) else Why.REACHED
        name = call.arguments.path_of(tensor) or name_of_tensor(tensor, call.function)
        return mutated(why, self._region(), tensor, version, name=name)


def _call_in_context(call: CapturedCall, loan: Loan | None, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Calls a function with forward's context variables, in context managers of the region's own."""
    # A context of its own, since one cannot be entered twice at once, and variables set in a rerun belong to the rerun. A
    # collector (a list, say, of the hidden states of all layers) has what forward found, and does not get a rerun's results.
    context = Context()
    for variable, value, _ in call.variables:
        context.run(variable.set, loan.value(value) if loan is not None and type(value) is Note else value)

    def run() -> None:
        with _NOTHING if call.contexts is None else reusable(call.contexts[1]):
            call.function(*args, **kwargs)

    context.run(run)
