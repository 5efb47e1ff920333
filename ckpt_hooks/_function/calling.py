"""Calling a region's function again, with the surroundings and state of forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from contextvars import Context, copy_context
from typing import Any

import torch

from ckpt_hooks import _ambient
from ckpt_hooks._ambient.draws import RecordDraws
from ckpt_hooks._ambient.tracking import hold, let_go, shared_streams_lock
from ckpt_hooks._core.hooks import HandBack
from ckpt_hooks._torch import num_dispatch_modes, pop_saved_tensors_hooks, push_saved_tensors_hooks
from ckpt_hooks.errors import MutationError

from .arguments import Restored
from .collector import Collector
from .contexts import ContextPair, Selects, reusable
from .explain import late_write_error, mutation_error, name_of
from .failures import ExplainingFrame
from .scripted import ScriptedCalls
from .state.loans import Loan, Names, lend, take_back
from .state.notes import Lent
from .state.parameters import WatchReads
from .state.parts import is_atom
from .state.reached_state import ReachedState, Rewound
from .state.walk import Walk

__all__ = ["CallingFrame"]


class CallingFrame(ExplainingFrame):
    """A function frame which calls the function again.

    Each undo step runs once more if interrupted by an exception, such as Ctrl-C.
    """

    __slots__ = (
        "_ambient",
        "_context",
        "_contexts",
        "_draws",
        "_function",
        "_names",
        "_selection",
        "_state",
        "scripted",
    )

    _ambient: _ambient.Ambient
    _context: Context | None
    _contexts: ContextPair | None
    _draws: RecordDraws | None
    _function: Callable[..., Any]
    _selection: Selects | None
    _names: Names | None
    _state: ReachedState | None
    scripted: ScriptedCalls | None

    @property
    def is_selective(self) -> bool:
        """Whether a policy decides about operators."""
        return self._selection is not None

    def _call_in_ambient(self, collector: Collector, wanted: Collection[int] | None, call: Restored) -> None:
        """Calls the function with flags, the CPU's generator and the state of at most one module put back."""
        undo = _ambient.enter(self._ambient)
        try:
            if self._state is None:
                self._call_under(collector, wanted, call)
            else:
                self._call_rewound(self._state, collector, wanted, call)
        finally:
            try:
                _ambient.leave(undo)
            except BaseException:
                _ambient.leave(undo)
                raise

    def _call_with_more(self, collector: Collector, wanted: Collection[int] | None, call: Restored, *, borrows: bool) -> None:
        """Calls the function with additional state put back, such as streams, or the state of several modules."""
        ambient, state = self._ambient, self._state
        with ExitStack() as undone:
            # Locks come last of all waits: restoring arguments takes the locks of other frames.
            if ambient.has_streams:
                undone.enter_context(shared_streams_lock)
            for plan in () if state is None else sorted(state.plans, key=id):
                undone.enter_context(plan.lock)
            undone.callback(_ambient.leave, _ambient.enter(ambient, default_generators=borrows))
            if ambient.has_streams:
                undone.callback(let_go, hold(stream for stream, _ in ambient.streams[2]))
            if not borrows:
                undone.enter_context(_ambient.replay_draws(ambient, None if self._draws is None else self._draws.states))
            if state is None:
                self._call_under(collector, wanted, call)
            else:
                self._call_rewound(state, collector, wanted, call)

    def _call_rewound(self, state: ReachedState, collector: Collector, wanted: Collection[int] | None, call: Restored) -> None:
        """Calls the function with the reached state as forward found it."""
        rewound = Rewound(state, self._mutated, call[1])
        if self._names is not None:  # for a list that an attribute shares with a variable to be found
            rewound.lent.meet([value for value, _ in self._names.roots])
        collector.lent.append((rewound.lent, state.changes))
        try:
            self._call_under(collector, wanted, call, rewound.put_back())
        finally:
            try:
                rewound.restore()
            except BaseException:
                rewound.restore()
                raise

    def _call_under(
        self,
        collector: Collector,
        wanted: Collection[int] | None,
        call: Restored,
        exchanged: frozenset[int | None] = frozenset(),
    ) -> None:
        changed = self._state.changed() if self._state is not None and self.complete else []
        in_context = self._context is not None or self._contexts is not None or copy_context()
        lent = None if self._names is None else lend(self._names, call[1])
        try:
            if type(lent) is Loan and self._names is not None:
                collector.lent.append((lent.lent, self._names.changes))
            args, kwargs = self._arguments.build(call[0], collector.lent)
            if self.complete:
                changed += [one for contents, _ in collector.lent for one in contents.changed]
            hook = collector.hook(wanted, exchanged)
            if changed or (self._selection is None and num_dispatch_modes()):
                hook = collector.noting_versions(hook)
            push_saved_tensors_hooks(hook, HandBack(collector.values, self.path))
            try:
                if changed:
                    with WatchReads(changed, collector, self._mutated):
                        self._call_in_context(args, kwargs)
                elif not in_context:
                    self._function(*args, **kwargs)
                else:
                    self._call_in_context(args, kwargs)
                collector.end()
            finally:
                pop_saved_tensors_hooks()
        finally:
            if lent is not None:
                try:
                    take_back(lent)
                except BaseException:
                    take_back(lent)
                    raise

    def _call_in_context(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._context is None:
            Context().run(self._call, args, kwargs)
            return
        # A collector of forward's (a list, say, of the hidden states of all layers) has its results already.
        walk, lent = Walk(), Lent({})
        for value in self._context.values():
            if not is_atom(value):  # each use of torch.compile leaves numbers and empty tuples
                walk.look(value)
        for value, noted in walk.roots:
            noted.holds(value, lent)
        try:
            # A copy, since a context cannot be entered twice at once, and variables set in a rerun belong to the rerun.
            self._context.copy().run(self._call, args, kwargs)
        finally:
            lent.restore(None)

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._contexts is None:
            self._function(*args, **kwargs)
        else:
            with reusable(self._contexts[1]):
                self._function(*args, **kwargs)

    def _late_write(self, tensor: torch.Tensor, version: int) -> MutationError:
        return late_write_error(name_of(tensor, self._function), tensor, version, self._region())

    def _mutated(self, tensor: torch.Tensor, version: int) -> MutationError:
        will_copy = self._state is not None and self._state.note_written(tensor)
        return mutation_error(name_of(tensor, self._function), tensor, version, self._region(), will_copy=will_copy)
