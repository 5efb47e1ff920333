"""Rerunning a region: its function is called again, and ends when every wanted tensor was saved."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext, suppress

import torch
from torch.utils.hooks import RemovableHandle

from ckpt_hooks._ambient.current import run_on
from ckpt_hooks._ambient.rng import default_generators_lock
from ckpt_hooks._core.interrupts import bring_back, mark_thread
from ckpt_hooks._core.modes import is_without_values, pause_modes, resume_modes
from ckpt_hooks._core.scopes import is_last_backward
from ckpt_hooks._core.stack import stack
from ckpt_hooks._core.threads import is_concurrent
from ckpt_hooks._torch import (
    graph_task_id,
    num_dispatch_modes,
    resume_transforms,
    set_grad_enabled,
    suspend_transforms,
)
from ckpt_hooks.errors import DeterminismError, MutationError

from .arguments import HandedOut, Hooks, Restored
from .calling import CallingFrame
from .collector import Collector, StopRecompute
from .compare import result_of
from .contexts import ContextPair, both, without_selection
from .explain import blame
from .handles import HandleFrame, Pass
from .options import RegionOptions
from .rerouted import RoutingWatch
from .split import open_split_pass
from .suspects import Compared

__all__ = ["RerunFrame"]


class RerunFrame(CallingFrame):
    """A function frame which prepares, watches and undoes a rerun."""

    __slots__ = ("_compared", "_options")

    _compared: Compared
    _options: RegionOptions

    def open_pass(self, index: int) -> Pass:
        """Returns the pass with the value of a handle; see :meth:`HandleFrame.open_pass`."""
        if not self._options.split_backward or graph_task_id() == -1:
            return HandleFrame.open_pass(self, index)
        with self._lock:
            return open_split_pass(self, index)

    def recompute(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        """Reruns the function; see :meth:`HandleFrame.recompute`."""
        return run_on(self.current, self._recompute_here, wanted)

    def _recompute_here(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        """Reruns the function on the current devices and streams."""
        try:
            return self._rerun(wanted) if self._selection is None else self._selection.recompute(lambda: self._rerun(wanted))
        except DeterminismError as error:
            if error.region == self._region() and error.index >= 0 and self.complete and not is_without_values():
                self._look_for_routing(error, wanted)
            raise

    def _look_for_routing(self, error: DeterminismError, wanted: Collection[int] | None) -> None:
        """Reruns the function once more, and adds to an error the operators by which it may have taken other routes."""
        selection, contexts = self._selection, self._contexts
        kept = () if selection is None else selection.kept_operators()
        watch = RoutingWatch(lambda: 0 if self.collector is None else len(self.collector.values), kept)
        watching: ContextPair = nullcontext(), watch
        self._selection = None
        self._contexts = watching if contexts is None else both((contexts[0], without_selection(contexts[1])), watching)
        try:
            with suppress(Exception):
                self._rerun(wanted)
        finally:
            self._selection, self._contexts = selection, contexts
        watch.explain(error, error.index if selection is None else None)

    def _rerun(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        # A rerun in the middle of forward must not do what forward has not done yet.
        early_stop = self._options.early_stop or not self.complete
        collector = Collector(self, self._function, early_stop=early_stop, selective=self._contexts is not None)
        mark = mark_thread()
        outer, self.collector = self.collector, collector
        try:
            if self._options.check.fingerprint is None:
                return self._recompute(collector, wanted)
            return self._compared.recompute(lambda: self._recompute(collector, wanted), self._region())
        except BaseException as error:
            bring_back(mark, error)
            raise
        finally:
            self.collector = outer
            collector.let_go()

    def _recompute(self, collector: Collector, wanted: Collection[int] | None) -> list[torch.Tensor]:
        # One recompute at a time may borrow the default generators, and only if no other thread draws from them.
        borrows = self._draws is None and not is_concurrent(self.thread) and default_generators_lock.acquire(False)
        collector.watches_draws = borrows
        # As if no frame were active but this one, which is the parent of the frames inside (Rule 3).
        paused = pause_modes() if num_dispatch_modes() else None
        outer, stack.innermost = stack.innermost, self
        reentered, self.recomputing = self.recomputing, True
        grad_enabled, transforms, next_hook = torch.is_grad_enabled(), None, RemovableHandle.next_id
        handed_out: list[HandedOut] = []
        call: Restored | None = None
        hooks: Hooks = ()
        try:
            transforms = suspend_transforms()
            set_grad_enabled(True)
            call = self._arguments.restore(self._region, handed_out, is_open=not self.complete)
            hooks = self._arguments.hooks(handed_out)
            if self._selection is not None:
                last = wanted is None and is_last_backward()
                self._selection.prepare(collector.values, last=last, has_stopped=lambda: collector.stopped)
            state = self._state
            if not borrows or self._ambient.has_streams or (state is not None and len(state.plans) != 1):
                self._call_with_more(collector, wanted, call, borrows=borrows)
            elif state is None:
                self._call_in_ambient(collector, wanted, call)
            else:
                with state.plans[0].lock:
                    self._call_in_ambient(collector, wanted, call)
        except StopRecompute:
            pass
        except (DeterminismError, MutationError) as error:
            # The region's own error came before the stop. Other errors are of inner regions, whose forward the stop cut short.
            own = error.region == self._region()
            if own and isinstance(error, DeterminismError):
                self._explain(error)
            if own or not collector.stopped:
                raise
        except Exception as error:
            if not collector.stopped:
                if self._selection is not None and call is not None:
                    self._selection.check(len(collector.values) - 1, self._explain, error)
                if call is not None:
                    self._explain_failure(error, len(collector.values), selective=self._selection is not None)
                raise
            # The function swallowed the stop and failed later on. Every value is there (Rule 8).
        finally:
            if borrows:
                default_generators_lock.release()
            if paused:
                resume_modes(paused)
            if self._selection is not None:
                self._selection.settle()
            set_grad_enabled(grad_enabled)
            self.recomputing = reentered
            stack.innermost = outer
            if transforms is not None:
                resume_transforms(transforms)
            if hooks or RemovableHandle.next_id != next_hook:  # one counter for all hooks of the process
                self._arguments.put_hooks_back(hooks, handed_out)
            if handed_out:
                self._arguments.look_at(handed_out)
        try:
            values = result_of(collector, self._options.check, self._marks)
        except DeterminismError as found:  # not the errors of outer regions, which restore the arguments
            required = () if self._state is None else self._state.parameters.required_grad(self._state.plans)
            blame(found, self, self._function, required)
            self._explain(found)
            raise
        if self._selection is not None:
            self._selection.check(collector.last, self._explain)
        return values
