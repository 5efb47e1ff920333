"""Function frames: a region which is a call of a function, brought back by another call of the function.

A rerun sees the surroundings of its forward: the captured arguments, the captured ambient state, no outer frame, gradients
enabled. The tensors saved meanwhile, and the end of the rerun, are the business of :mod:`.collector`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextvars import copy_context
from types import FunctionType
from typing import Any

import torch

from ckpt_hooks import _ambient
from ckpt_hooks._ambient.current import Current
from ckpt_hooks._ambient.current import capture as capture_current
from ckpt_hooks._ambient.draws import RecordDraws
from ckpt_hooks._ambient.recurrent import seed_masks_anew
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.holdings import Holding, holdings_in, owners_in
from ckpt_hooks._core.hooks import close_frame
from ckpt_hooks._core.modes import pause_modes, resume_modes
from ckpt_hooks._core.saved import Fate
from ckpt_hooks._core.settings import DEFAULTS, Settings, current_settings
from ckpt_hooks._core.stack import stack
from ckpt_hooks._core.threads import is_concurrent
from ckpt_hooks._tensors.offloaded_inputs import hooks_for_inputs
from ckpt_hooks._torch import (
    num_dispatch_modes,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

from .arguments import Arguments
from .boundaries import NO_MARKS
from .contexts import ContextPair, selection_of, suppressed_error, telling_operators, under_modes
from .explain import uninitialized
from .handles import HandleFrame
from .options import DEFAULT_OPTIONS, RegionOptions, name_of_function
from .packing import open_frame
from .rerun import RerunFrame
from .scripted import watch_scripted
from .state.loans import Names, names_of
from .state.module_plan import ModulePlan, idle_plan
from .state.reached_state import ReachedState, state_of, state_of_idle
from .state.walk import NOTHING, entry_of, walk_from
from .suspects import compared

__all__ = ["FunctionFrame"]

_NO_GENERATORS: Sequence[torch.Generator] = ()
_NO_LAYERS: Sequence[Any] = ()


class FunctionFrame(RerunFrame):
    """A region whose forward is one call of a function; a context manager around that call.

    The call itself is the caller's, with the same function and arguments that the frame was given: hooks that run before and
    after a module's forward can enter and leave the frame.

    Example:
        >>> import torch
        >>> from ckpt_hooks._function.frame import FunctionFrame
        >>> x = torch.ones(2, requires_grad=True)
        >>> with FunctionFrame(torch.sin, (x,), {}):
        ...     y = torch.sin(x)
    """

    __slots__ = ("_finish", "_keeps_all")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions = DEFAULT_OPTIONS,
        contexts: ContextPair | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Captures a call and saves its tensors.

        Args:
            function: The region's function.
            args: The positional arguments.
            kwargs: The keyword arguments.
            options: The options of recomputes.
            contexts: Entered around forward, and around each rerun.
            settings: The settings in force, if the caller has them already.
        """
        # The contents of a partial are arguments as well: taken out, they are saved as arguments, and not kept alive twice.
        while type(function) is functools.partial:
            args, kwargs = function.args + args, {**function.keywords, **kwargs}
            function = function.func
        name = options.name or name_of_function(function)
        if settings is None:
            settings = current_settings()
        if settings is not DEFAULTS and settings.early_stop is not None:
            options = dataclasses.replace(options, early_stop=settings.early_stop)
        parent = stack.innermost
        owner = getattr(function, "__self__", function) if settings.observers else None
        HandleFrame.__init__(self, name, parent, settings.observers, owner if isinstance(owner, torch.nn.Module) else None)
        self._function = function
        if options.offload_inputs and top_saved_tensors_hooks(False) is None:
            push_saved_tensors_hooks(*hooks_for_inputs(self.path, self.watch))
            try:
                self._arguments = Arguments(args, kwargs)
            finally:
                pop_saved_tensors_hooks()
        else:
            self._arguments = Arguments(args, kwargs, inside=None if parent is None else (parent, self.path))
        self._marks, self.collector = NO_MARKS, None
        self._options = options
        self._contexts = contexts
        self._selection = None if contexts is None else selection_of(contexts[0])
        self.scripted = None
        self._state: ReachedState | None = None
        self._draws: RecordDraws | None = None
        self._keeps_all = False
        self.current: Current | None = None
        self.explain = None
        watch_scripted()

    def __enter__(self) -> FunctionFrame:
        paused = pause_modes() if num_dispatch_modes() else None
        try:
            if self._options.check.fingerprint is not None or (paused is not None and len(paused) != num_dispatch_modes()):
                self._options, self._compared = compared(self._options)
            function, options = self._function, self._options
            generators, recurrent = _NO_GENERATORS, _NO_LAYERS
            # Usually the function is a module looked at before, or a function of tensors.
            objects = self._arguments.objects
            plan = None if objects or type(function) is FunctionType else idle_plan(function)
            if plan is not None:
                self._state = state_of_idle(plan, preserve_buffers=options.preserve_buffers)
                recurrent = plan.recurrent
                self._names = None
            else:
                walk = walk_from(function, objects)
                if walk is NOTHING:
                    entry = entry_of(function)
                    self._names = None if entry is None else Names((entry,), ())
                else:
                    self._state = state_of(walk, preserve_buffers=options.preserve_buffers)
                    if self._state is None:
                        if self._contexts is not None:
                            raise uninitialized(self._region())
                        self._keeps_all = True  # this once
                        return self
                    generators = self._state.generators
                    recurrent = [layer for plan in self._state.plans for layer in plan.recurrent]
                    self._names = names_of(walk)
            self._ambient = _ambient.capture(preserve_rng_state=options.preserve_rng_state, generators=generators)
            self.current = capture_current()
            if recurrent and options.preserve_rng_state:
                seed_masks_anew(recurrent)
            self._context = copy_context() or None
            concurrent = is_concurrent(self.thread)
            left_out = () if options.check.fingerprint is None or self._state is None else self._state.storages()
            if options.preserve_rng_state:
                self.positions = {}
            if self._selection is not None:
                hooks = top_saved_tensors_hooks(False)
                self._selection.attach(self.numbers, self.path, hooks, respect_hooks=options.respect_hooks)
            self._finish = open_frame(self, options.check.facts, options.check.fingerprint, left_out)
            if concurrent and options.preserve_rng_state:
                self._draws = RecordDraws()
                self._draws.__enter__()
        finally:
            if paused:
                resume_modes(paused)
        if paused is not None:
            self._contexts = under_modes(self._contexts)
        if self.watch is not None and self.watch.wants_operators:
            self._contexts = telling_operators(self._contexts, self.parent)
        try:
            if self.watch is not None:
                self.watch.entered()
            if self._contexts is not None:
                self._contexts[0].__enter__()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def note_saved(self, index: int, tensor: torch.Tensor) -> None:
        """Notes the operator whose kept output a saved tensor is, if any; see :meth:`HandleFrame.note_saved`."""
        if self._selection is not None:
            self._selection.note_saved(index, tensor)

    def fate_at(self, index: int) -> Fate:
        """Returns the fate of a saved tensor; the policy's part is known where observers watch."""
        return Fate.DROPPED if self._selection is None else self._selection.fate_at(index)

    def held(self) -> list[Holding]:
        """Returns the tensors kept alive by this frame; see :meth:`Frame.held`."""
        seen: set[int] = set()
        parts = (
            ("argument", self._arguments),
            ("state that the function reaches", (self._state, None if self._names is None else self._names.contents())),
            ("random state", (self._ambient, self._draws)),
            ("kept by the policy", self._selection),
            ("recomputed", [opened.values for opened in self.passes.values()]),
        )
        return [found for reason, part in parts for found in holdings_in(part, reason, seen, (Frame, ModulePlan))]

    def owners(self) -> list[Frame]:
        """Returns the frames around whose tensors are arguments, or pass through their hooks; see :meth:`Frame.owners`."""
        return owners_in((self._arguments, self._selection), Frame, (ModulePlan,))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._keeps_all:
            return
        suppressed: bool | None = False
        parent = self.parent  # gone when the frame is closed
        if self._contexts is not None:
            try:
                suppressed = self._contexts[0].__exit__(kind, error, traceback)
            except BaseException as another:
                self._close(another)
                raise
        self._close(error)
        if error is None:
            self.complete = True
            if self._selection is not None:
                self._selection.close(parent, early_stop=self._options.early_stop)
            if self.watch is not None:
                self.watch.settle()
        elif suppressed:
            raise suppressed_error(error) from error

    def _close(self, error: BaseException | None) -> None:
        paused = pause_modes()
        try:
            close_frame(self)
            self._arguments.close()
            if self._draws is not None:
                self._draws.__exit__(None, None, None)
            if self._names is not None:
                self._names.settle()
            written = None if self._state is None else self._state.close(failed=error is not None)
            if self._finish is not None:
                self._finish()
            late = self._late_write(*written) if written is not None and error is None and any(self.alive()) else None
            if self.watch is not None:
                self.watch.exited(late or error)
            if late is not None:
                raise late
        finally:
            resume_modes(paused)
