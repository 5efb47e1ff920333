"""Function frames: a region which is a call of a function, brought back by another call of the function (:mod:`.rerun`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ckpt_hooks._ambient.current import capture as capture_current
from ckpt_hooks._ambient.positions import where_streams_are
from ckpt_hooks._core.descriptions import RegionPath, format_path, region_in_words
from ckpt_hooks._core.frame import Frame, Label, places_of, stack
from ckpt_hooks._core.holdings import Cause, Holding, Reason, holdings_in, owners_in
from ckpt_hooks._core.hooks import close, close_frame
from ckpt_hooks._core.misuse import Misuse, explain_refusal
from ckpt_hooks._core.modes import only_quiet_modes, pause_modes, resume_modes
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._core.settings import DEFAULTS, Settings, current_settings
from ckpt_hooks._operators.draws import DrawWatch, devices_between, moves_by_itself
from ckpt_hooks._tensors.offloaded import hooks_for_inputs
from ckpt_hooks._torch.autograd import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    sequence_number,
    top_saved_tensors_hooks,
)
from ckpt_hooks._torch.modes import num_dispatch_modes

from .arguments import Arguments
from .callables import module_of, name_of_function
from .captured_call import CapturedCall
from .collector import ends_small
from .contexts import ContextPair, suppressed_error, telling_operators, under_modes
from .explain import draws_error, is_beside_drawing_thread, name_of_tensor, uninitialized, warn_of_drawing_thread
from .handles import HandleFrame
from .options import DEFAULT_OPTIONS, RegionOptions
from .packing import open_frame
from .rerun import Rerun
from .scripted import watch_scripted
from .trees import Tree


class FunctionFrame(HandleFrame):
    """A region whose forward is one call of a function; a context manager around the call."""

    # The call itself is the caller's, with the function and arguments of the frame: hooks that run before and after a module's
    # forward can enter and leave the frame.

    __slots__ = ("_finish", "_first_node", "_keeps_all", "call")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions = DEFAULT_OPTIONS,
        contexts: ContextPair | None = None,
        settings: Settings | None = None,
    ) -> None:
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
        HandleFrame.__init__(self, name, parent, settings.observers, module_of(function) if settings.observers else None)
        if self.watch is not None:  # before any memory is taken
            self.watch.entered()
        try:
            if options.offload_from is not None and top_saved_tensors_hooks(False) is None:
                push_saved_tensors_hooks(*hooks_for_inputs(self.path, self.watch, options.offload_from))
                try:
                    arguments = Arguments(args, kwargs)
                finally:
                    pop_saved_tensors_hooks()
            else:
                arguments = Arguments(args, kwargs, inside=None if parent is None else (parent, self.path))
        except BaseException as error:
            self._tell_exited(error)
            raise
        self.call = CapturedCall(function, arguments, options, contexts)
        self.is_split = options.split_backward
        self._keeps_all = False
        watch_scripted()

    def __enter__(self) -> FunctionFrame:
        call = self.call
        paused = pause_modes() if num_dispatch_modes() else None
        try:
            if call.options.check.fingerprint is not None or (paused is not None and not only_quiet_modes()):
                call.compare_values()
            if not call.capture():
                if call.contexts is not None:
                    raise uninitialized(format_path(self.path))
                self._keeps_all = True  # this once
                return self
            self.current = capture_current()
            options = call.options
            left_out = () if options.check.fingerprint is None or call.state is None else call.state.storages()
            if options.preserve_rng_state:
                self.positions = {}
            self._finish = open_frame(self, options.check.facts, options.check.fingerprint, left_out)
            self._first_node = sequence_number()
        except BaseException as error:
            close(error, functools.partial(self._tell_exited, error))
            raise
        finally:
            if paused:
                resume_modes(paused)
        if paused is not None:
            call.contexts = under_modes(call.contexts)
        if self.watch is not None and self.watch.wants_operators:
            call.contexts = telling_operators(call.contexts, self.parent)
        try:
            if call.contexts is not None:
                call.contexts[0].__enter__()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def returns(self, result: Any) -> None:
        """Notes how much the function has done, by which a rerun knows whether it is as good as through."""
        if not self._keeps_all:
            self.num_nodes = sequence_number() - self._first_node
            self.ends_small = ends_small(result, self.facts)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._keeps_all:
            self._tell_exited(error)
            return
        call, suppressed = self.call, False
        parent = self.parent  # gone when the frame is closed
        if call.contexts is not None:
            try:
                suppressed = bool(call.contexts[0].__exit__(kind, error, traceback))
            except BaseException as another:
                self._close(another)
                raise
        inner = stack.innermost
        if inner is not None and inner is not self and error is None:
            left_open = Misuse.LEFT_OPEN.error_of(self.path, inner=region_in_words(inner.path))
            self._close(left_open)
            raise left_open
        self._close(error)
        if parent is not None and parent.late is not None:
            close(error, parent.late)
        if error is None:
            self.complete = True
            if self.watch is not None:
                self.watch.settle()
        else:
            explain_refusal(error)
            if suppressed:
                raise suppressed_error(error) from error

    def _close(self, error: BaseException | None) -> None:
        if stack.innermost is self:  # else the caller rewinds the thread
            close_frame(self)
        try:
            if error is None:
                self._settle(failed=False)
            else:
                close(error, functools.partial(self._settle, failed=True))
        except BaseException as found:
            close(found, functools.partial(self._tell_exited, found))
            raise
        if self.watch is not None:
            close(error, functools.partial(self._tell_exited, error))

    def _settle(self, *, failed: bool) -> None:
        written = self.call.settle(failed=failed)
        if self._finish is not None:
            self._finish()
        if written is not None and not failed and any(self.alive()):
            name = name_of_tensor(written[0], self.call.function)
            raise mutated(Why.WRITTEN_LATE, format_path(self.path), *written, name=name)

    def _tell_exited(self, error: BaseException | None) -> None:
        if self.watch is not None:
            self.watch.exited(error)

    def note_inside(self, labels: Sequence[Label | None], path: RegionPath) -> Sequence[int]:
        collector = self.collector
        places: Sequence[int] = range(len(labels))
        if collector is None:
            self.marks.append((len(self.numbers), len(labels), labels, path))
            return places
        number, position = len(collector.marks), len(collector.values)
        expected = self.marks[number] if number < len(self.marks) else None
        if expected is not None and expected[0] == position:
            places = places_of(expected[2], labels) or places
        labels = [labels[place] for place in places]
        collector.marks.append((position, len(labels), labels, path))
        return places

    def recompute(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        rerun = functools.partial(self._rerun, wanted)
        if self.watch is not None:
            rerun = functools.partial(self.observed, rerun)
        return rerun()

    def _rerun(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        watch = DrawWatch() if is_beside_drawing_thread() else None
        rerun = Rerun(self, self.call, wanted, watch=watch)
        values = rerun.run()
        if rerun.collector.moved_otherwise:
            self._check_draws(rerun.collector.moved_otherwise, watch, wanted)
        return values

    def _check_draws(self, moved: set[torch.device], watch: DrawWatch | None, wanted: Collection[int] | None) -> None:
        """Raises unless another thread has moved the streams of some devices, from which this function does not draw."""
        region, is_proven, group = format_path(self.path), watch is not None, torch.distributed
        if watch is None:
            # One more rerun on this rank alone would run the region's collectives without the other ranks.
            if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
                raise draws_error(region, " In a process group it cannot be found out whether another thread has drawn.")
            watch = DrawWatch()
            Rerun(self, self.call, wanted, watch=watch).run(compares=False)
        if watch.unknown is not None or moved & watch.devices:
            raise draws_error(region, f" The region runs {watch.unknown or watch.found}.")
        # The rerun in question may have drawn what a later one finds (a table that was gone from its cache).
        if not (is_proven or moved <= self._moved_in_forward() or moves_by_itself(moved)):
            raise draws_error(region)
        warn_of_drawing_thread()

    def _moved_in_forward(self) -> set[torch.device]:
        positions = self.positions or {}
        begin, where = positions.get(-1), where_streams_are()
        return set().union(*(devices_between(begin, position, where) for position in positions.values()))

    def held(self) -> list[Holding]:
        call = self.call
        seen: set[int] = set()
        parts = (
            (Reason.INPUT, call.arguments),
            (Reason.STATE, call.state),
            (Reason.RANDOM_STATE, call.ambient),
            (Reason.RECOMPUTED, [opened.values for opened in self.passes.values()]),
        )
        return [found for reason, part in parts for found in holdings_in(part, Cause(reason), seen, (Frame, Tree))]

    def owners(self) -> list[Frame]:
        return owners_in(self.call.arguments, Frame, (Tree,))
