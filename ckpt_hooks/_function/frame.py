"""Function frames: regions that are calls of a function, brought back by another call (:mod:`.rerun`).

Autograd keeps both hooks with each tensor that passes through them. So the unpack hook is a module-level function, and the pack
hook a closure that drops its frame when forward ends: a frame must not outlive its handles (Rule 9).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from itertools import count
from sys import getrefcount
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ckpt_hooks import _ambient
from ckpt_hooks._ambient.devices import capture as capture_current
from ckpt_hooks._ambient.random import Position, position_of_generators, seed_masks_anew
from ckpt_hooks._core.descriptions import RegionPath, format_path, region_in_words
from ckpt_hooks._core.frame import Frame, Label, RegionMark, is_drawn_anew, overlap_error, places_of, stack
from ckpt_hooks._core.holdings import Cause, Holding, Reason, Saved, holdings_in, nbytes_of, owners_in
from ckpt_hooks._core.hooks import UNPACKS, are_of_frame, close, close_frame
from ckpt_hooks._core.misuse import Misuse, explain_refusal, module_of, name_of_function
from ckpt_hooks._core.modes import is_without_values, only_quiet_modes, pause_modes, resume_modes, users_modes
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._core.packed import FIRST_NUMBER, KeptTensor, TrackedTensor, WatchedCallHandle
from ckpt_hooks._core.scopes import MISSING, SPLIT, Uses, graph_task_scope, group_scope
from ckpt_hooks._core.self_check import CheckedPlace, place_of
from ckpt_hooks._core.settings import DEFAULTS, Settings, self_check
from ckpt_hooks._function.contexts import ContextPair, suppressed_error, telling_operators, under_modes
from ckpt_hooks._options import DEFAULT_OPTIONS, NOTHING, RegionOptions, check_of
from ckpt_hooks._state.journal import Journal, journal_of
from ckpt_hooks._state.notes import Note
from ckpt_hooks._state.trees import Tree
from ckpt_hooks._state.walk import variables_in
from ckpt_hooks._torch.autograd import (
    graph_exec_group,
    graph_task_id,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    sequence_number,
    top_saved_tensors_hooks,
)
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.functions import divert_scripted, tell_hooks
from ckpt_hooks._torch.modes import num_dispatch_modes
from ckpt_hooks._torch.tensors import detach_past_modes
from ckpt_hooks.errors import DeterminismError, InternalError

from .arguments import Arguments
from .collector import ends_small
from .rerun import rerun
from .words import is_of_ctc_loss, name_of_tensor, uninitialized

#: The options of the latest frame sampled by the self-check, and a copy with a check of values, which many frames share.
_latest_sampled: tuple[RegionOptions | None, RegionOptions] = None, DEFAULT_OPTIONS

# The result of ``getrefcount`` for a number that only ``frame.numbers`` holds. It is higher while a handle holds the number.
_UNHELD = next(map(getrefcount, [FIRST_NUMBER + 1]))


# ------------------------------------------------------------------------------------------------------------------- passes


class Pass:
    __slots__ = ("taken", "uses", "values")

    def __init__(self, values: Any, uses: Uses | None = None) -> None:
        # An entry for each handle in the order of saving: the tensor, or MISSING. A dictionary in a pass for a single handle.
        self.values = values
        self.uses = uses  # in a backward in two parts: which values a part has used
        self.taken: set[int] = set()


@skipped
def unpack(packed: Any) -> torch.Tensor:
    """Returns a kept tensor, or a handle's value, which the frame then drops (Rule 4)."""
    if type(packed) is not tuple:
        if type(packed) is KeptTensor and packed.tensor._version == packed.version:
            return packed.tensor
        return packed.unpack()  # type: ignore[no-any-return]
    frame: FunctionFrame
    frame, index = packed
    index -= FIRST_NUMBER
    opened = frame.passes.get(graph_task_id())
    if opened is None:
        opened = frame.open_pass(index)
    values = opened.values
    try:
        value: torch.Tensor = values[index]
    except IndexError:  # the handle was packed after the recompute
        value = MISSING
    if value is MISSING:
        value = frame.reopen_pass(opened, index)
    else:
        values[index] = MISSING
        opened.taken.add(index)
    if frame.current is not None:
        frame.current.hand_out(value)
    return value


UNPACKS[unpack] = True


# -------------------------------------------------------------------------------------------------------------------- frame


class FunctionFrame(Frame):
    """A region whose forward is a call of a function; a context manager, in which the caller makes the call."""

    __slots__ = (
        "_finish",
        "_first_node",
        "_keeps_all",
        "ambient",
        "arguments",
        "collector",
        "contexts",
        "ends_small",
        "explain",
        "facts",
        "fingerprints",
        "function",
        "marks",
        "modes",
        "num_nodes",
        "numbers",
        "options",
        "positions",
        "sampled",
        "state",
        "variables",
        "without_grad",
    )

    kind = "function"
    unpack = staticmethod(unpack)
    passes: dict[int, Pass]

    # Set when forward begins.
    ambient: _ambient.Ambient
    variables: Sequence[tuple[ContextVar[Any], Any, Any]]

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
        contexts: ContextPair | None,
        settings: Settings,
    ) -> None:
        # Arguments in a partial become arguments of the region, so that their tensors are saved, not held.
        while type(function) is functools.partial:
            args, kwargs = function.args + args, {**function.keywords, **kwargs}
            function = function.func
        if settings is not DEFAULTS and settings.early_stop is not None:
            options = options.replaced(early_stop=settings.early_stop)
        parent, observers = stack.innermost, settings.observers
        name = options.name or name_of_function(function)
        Frame.__init__(self, name, parent, observers, module_of(function) if observers else None)
        self.function, self.options, self.contexts = function, options, contexts
        self.explain: Callable[[DeterminismError], DeterminismError] | None = None  # adds words to an error of a rerun
        self.modes: list[str] | None = None  # names of the user's dispatch modes around forward, if values are compared
        self.state: Journal | None = None
        self.sampled: Any = None  # set in the passes that the self-check compares
        self.collector: Any = None  # set while a rerun runs
        # Where inner regions began in forward, and how many tensors they saved here; most regions share the empty tuple.
        self.marks: tuple[()] | list[RegionMark] = ()
        # How many nodes of autograd's graph the function made on this thread (-1 until it returns), and whether its last
        # operators ran on small tensors.
        self.num_nodes, self.ends_small = -1, False
        # A number for each packed tensor, in order. Only this list and a living handle hold the number, so its reference count
        # tells whether the handle lives. A kept tensor has no handle.
        self.numbers: list[int] = []
        # Metadata of each packed tensor, compared on recompute; of kept tensors, the metadata of MISSING.
        self.facts: list[Any] = []
        # Positions of the random generators: at the start, with the number -1, and when the generators have moved, with the
        # index of the tensor packed next. None if a rerun draws anew.
        self.positions: list[tuple[int, Position]] | None = None
        self.fingerprints: Sequence[Any] = ()  # of values; empty if values are not compared
        self.without_grad: list[int] = []  # the indices of packed tensors that require no grad
        self._keeps_all = False
        self._finish: Callable[[], None] | None = None  # called when forward has ended
        if self.watch is not None:  # before the region takes memory, which the watch measures
            self.watch.tell("entered")
        inside = None if parent is None else (parent, self.path)
        try:
            if options.offload_from is not None and top_saved_tensors_hooks(False) is None:
                from ckpt_hooks._tensors.transfers import hooks_for_inputs

                push_saved_tensors_hooks(*hooks_for_inputs(self.path, self.watch, options.offload_from))
                try:
                    self.arguments = Arguments(args, kwargs)
                finally:
                    pop_saved_tensors_hooks()
            else:
                self.arguments = Arguments(args, kwargs, inside=inside)
        except BaseException as error:
            self._tell_exited(error)
            raise
        _watch_calls()

    def __enter__(self) -> FunctionFrame:
        paused = pause_modes() if num_dispatch_modes() else None
        try:
            if self.options.check.fingerprint is not None or (paused is not None and not only_quiet_modes()):
                self._compare_values()
            context, preserve_rng_state = copy_context(), self.options.preserve_rng_state
            self.variables, others = variables_in(context) if context else ((), ())
            is_needed = any(type(value) is Note for _, value, _ in self.variables)  # a rerun's loan makes their values
            objects = (*self.arguments.objects, *others)
            state = journal_of(self.function, objects, preserve_buffers=self.options.preserve_buffers, is_needed=is_needed)
            if state is False:  # a lazy module has not made its parameters yet
                if self.contexts is not None:
                    raise uninitialized(format_path(self.path))
                self._keeps_all = True  # in this forward, whose tensors autograd saves as without a region
                return self
            self.state, generators = state, () if state is None else state.generators
            self.ambient = _ambient.capture(preserve_rng_state=preserve_rng_state, generators=generators)
            self.current = capture_current()
            if preserve_rng_state:
                if self.options.check.is_sampled and self.watch is None and self_check.level:
                    place = place_of(
                        self.function, state.trees[0].history.places if state is not None and state.trees else None
                    )
                    if place.is_due() and not is_drawn_anew(self.parent):
                        self._sample(place)
                self.positions = []
                if state is not None and (recurrent := [layer for tree in state.trees for layer in tree.recurrent]):
                    seed_masks_anew(recurrent)
            self._open()
            self._first_node = sequence_number()
        except BaseException as error:
            close(error, functools.partial(self._tell_exited, error))
            raise
        finally:
            if paused:
                resume_modes(paused)
        if paused is not None:
            self.contexts = under_modes(self.contexts)
        if self.watch is not None and self.watch.wants_operators:
            self.contexts = telling_operators(self.contexts, self.parent)
        try:
            if self.contexts is not None:
                self.contexts[0].__enter__()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def _compare_values(self) -> None:
        """Decides whether reruns compare values with forward: on request, and under the user's dispatch modes."""
        # A rerun does not enter the user's modes, since a mode that counts would count twice. Without them results may differ.
        check, modes = self.options.check, users_modes()
        if is_without_values():  # while torch traces, tensors have no values
            check = dataclasses.replace(check, fingerprint=None, is_sampled=False)
        elif modes and check.fingerprint is None and check is not NOTHING:
            check = check_of("values")
        if check is not self.options.check:
            self.options = self.options.replaced(check=check)
        self.modes = None if check.fingerprint is None else modes

    def _sample(self, place: CheckedPlace) -> None:
        """Has the self-check compare the values of this pass."""
        from ckpt_hooks._tensors.samples import Sampled, sample_of

        global _latest_sampled
        self.sampled = Sampled(place)
        if self.options is not _latest_sampled[0]:
            check = dataclasses.replace(self.options.check, fingerprint=sample_of)
            _latest_sampled = self.options, self.options.replaced(check=check)
        self.options = _latest_sampled[1]

    @skipped
    def _open(self) -> None:
        frame, count_next, facts_of, positions = self, count(FIRST_NUMBER).__next__, self.options.check.facts, self.positions
        where = position_of_generators(watched=positions is not None)
        latest, position = facts_of(MISSING), where[0]
        if positions is not None:
            positions.append((-1, (position, where[1])))

        # Defaults, since ``release`` can drop them: each variable of the closure is one more object that lives until backward.
        def pack(
            tensor: torch.Tensor,
            next_number: Any = count_next,
            append: Any = self.numbers.append,
            facts: Any = facts_of,
            note: Any = self.facts.append,
            missing: Any = latest,
            where: Any = where,
            positions: Any = positions,
            without_grad: list[int] = self.without_grad,
            path: RegionPath = self.path,
            new_kept: type[KeptTensor] = KeptTensor,
        ) -> tuple[Any, int] | KeptTensor:
            nonlocal latest, position
            number = next_number()
            append(number)
            if position != where[0]:
                position = where[0]
                positions.append((number - FIRST_NUMBER, (position, where[1])))
            if tensor.is_leaf:  # as is every tensor that requires no grad
                if tensor.requires_grad:
                    # Kept, since the graph holds the leaf anyway. A *view* of a leaf is not kept: if a framework gives the
                    # parameter another storage after forward (``param.data = ...``), the view would hold the former storage.
                    note(missing)
                    kept = new_kept()
                    kept.tensor, kept.version, kept.path = tensor, tensor._version, path
                    return kept
                without_grad.append(number - FIRST_NUMBER)
            try:
                metadata = facts(tensor)
            except RuntimeError:  # a nested tensor has no shape, and so is kept
                note(missing)
                return KeptTensor.of(tensor.detach(), tensor._version, path)
            if metadata != latest:  # successive tensors often have equal metadata, and share a tuple
                latest = metadata
            note(latest)
            return frame, number

        def release() -> None:
            nonlocal frame
            del frame
            pack.__defaults__ = None

        fingerprint = self.options.check.fingerprint
        if fingerprint is None and self.watch is None:
            push_saved_tensors_hooks(pack, unpack)
        else:
            push_saved_tensors_hooks(*self._watched(pack, fingerprint))
        stack.innermost = self
        self.release = release

    @skipped
    def _watched(
        self, pack: Callable[[torch.Tensor], tuple[Any, int] | KeptTensor], fingerprint: Callable[[torch.Tensor], Any] | None
    ) -> tuple[Callable[[torch.Tensor], tuple[Any, int] | KeptTensor], Callable[[Any], torch.Tensor]]:
        note, watch, numbers = None, self.watch, self.numbers
        if fingerprint is not None:
            from ckpt_hooks._tensors.determinism import Fingerprints

            # Forward may write to tensors in these storages after an operator saved them. If it does, they are not compared.
            contents = None if self.state is None else self.state.contents
            fingerprints = Fingerprints(fingerprint, () if contents is None else contents.storages())
            self.fingerprints, self._finish, note = fingerprints.taken, fingerprints.close, fingerprints.note

        def pack_watched(tensor: torch.Tensor) -> tuple[Any, int] | KeptTensor:
            packed = pack(tensor)
            if note is not None:
                note(tensor, kept=isinstance(packed, KeptTensor))
            if watch is None:
                return packed
            position = len(numbers) - 1
            if isinstance(packed, tuple):
                watch.saved(position, Reason.DROPPED, tensor)
                return WatchedCallHandle(packed)
            return watch.kept(position, packed, tensor)

        return pack_watched, unpack

    def returns(self, result: Any) -> None:
        """Notes how forward ended, to tell in a rerun whether little is left to run."""
        if not self._keeps_all:
            self.num_nodes = sequence_number() - self._first_node
            self.ends_small = ends_small(result, self.facts)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._keeps_all:
            self._tell_exited(error)
            return
        suppressed, parent = False, self.parent  # closing the frame drops its parent
        if self.contexts is not None:
            try:
                suppressed = bool(self.contexts[0].__exit__(kind, error, traceback))
            except BaseException as another:
                self._close(another)
                raise
        inner = stack.innermost
        if inner is not None and inner is not self and error is None:
            left_open = Misuse.LEFT_OPEN.error_of(self.path, inner=region_in_words(format_path(inner.path)))
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
        if stack.innermost is self:  # otherwise the caller rewinds the thread, which closes this frame
            close_frame(self)
        steps = [functools.partial(self._settle, failed=error is not None)]
        if self.watch is not None:
            steps.append(functools.partial(self._tell_exited, error))
        close(error, *steps)

    def _settle(self, *, failed: bool) -> None:
        self.arguments.close()
        written = None if self.state is None else self.state.close(failed=failed)
        if self._finish is not None:
            self._finish()
        if written is not None and not failed and any(self.alive()):
            name = name_of_tensor(written[0], self.function)
            raise mutated(Why.WRITTEN_LATE, format_path(self.path), *written, name=name)

    def _tell_exited(self, error: BaseException | None) -> None:
        if self.watch is not None:
            self.watch.tell("exited", error)

    def note_inside(self, labels: Sequence[Label | None], path: RegionPath) -> Sequence[int]:
        collector = self.collector
        every: Sequence[int] = range(len(labels))
        if collector is None:
            self.marks = self.marks or []
            self.marks.append((len(self.numbers), len(labels), labels, path))
            return every
        number, position = len(collector.marks), len(collector.values)
        expected = self.marks[number] if number < len(self.marks) else None
        places = places_of(expected[2], labels) if expected is not None and expected[0] == position else None
        places = every if places is None else places  # an empty list means that no tensor is wanted
        labels = [labels[place] for place in places]
        collector.marks.append((position, len(labels), labels, path))
        return places

    # ------------------------------------------------------------------------------------------------------------- backward

    @property
    def draws_anew(self) -> bool:  # type: ignore[override]
        return not self.options.preserve_rng_state

    def open_pass(self, index: int) -> Pass:
        """Returns this frame's pass in the scope of this thread; recomputes if there is none yet (Rule 3)."""
        group = graph_exec_group()
        key = graph_task_id() if group is None else group_scope(group).key
        with self._lock:
            if key == -1:  # outside of backward nothing tells when to drop values, so only this value is brought back
                return Pass(self._rerun((index,)))
            if self.options.split_backward and graph_task_id() != -1:
                return self._open_split_pass(index)
            opened = self.passes.get(key)  # a group's pass, or a pass that another engine thread has just made (Rule 11)
            if opened is None:
                opened = Pass(self._rerun(None))
                self.keep_pass(opened, graph_task_scope(key) if group is None else group_scope(group))
            return opened

    def _rerun(self, wanted: Any) -> Any:
        try:
            return rerun(self, wanted) if self.watch is None else self.observed(rerun, self, wanted)
        except DeterminismError as error:
            if self.sampled is None or not self.sampled.under_mode or not is_of_ctc_loss(self, error.index):
                raise
        # Under any mode ``ctc_loss`` also saves its lengths, as tensors. A rerun without the self-check's mode is compared.
        self.sampled.under_mode, self.sampled.may_be_unfilled = False, True
        return rerun(self, wanted)

    def _open_split_pass(self, index: int) -> Pass:
        """Returns a pass with the value of a single handle, where a backward runs in two parts."""
        split: Any = self.passes.get(SPLIT)
        value: torch.Tensor = MISSING
        if split is not None:
            if split.uses.is_next_part():  # true once in each part, when values of dead handles can go
                split.values = [tensor if lives else MISSING for tensor, lives in zip(split.values, self.alive(), strict=False)]
            value = split.values[index] if index < len(split.values) else MISSING
        if value is MISSING or not split.uses.is_untouched(index, value):  # a backward may have written to the value
            split = Pass(self._rerun(None), Uses())
            self.passes = {SPLIT: split}
            value = split.values[index]
            if value is MISSING:  # modified later in the recompute: a recompute for this value alone ends before that
                return Pass(self._rerun((index,)))
        if not split.uses.hand_out(index, value):
            split.values[index] = MISSING
        return Pass({index: value})

    def reopen_pass(self, opened: Pass, index: int) -> torch.Tensor:
        """Recomputes a single value, missing in a pass since the value was taken before, or packed after the recompute."""
        with self._lock:
            if index in opened.taken and graph_exec_group() is not None:
                raise overlap_error(self.path, index)
            value: torch.Tensor = self._rerun((index,))[index]
            opened.taken.add(index)
            if value is MISSING:
                raise InternalError(
                    f"a recompute of {region_in_words(format_path(self.path))} did not bring back tensor {index}. This is a "
                    "bug in ckpt_hooks. Please report it with the program.",
                    region=format_path(self.path),
                )
            return value

    def alive(self) -> list[bool]:
        return list(map(_UNHELD.__lt__, map(getrefcount, self.numbers)))

    # -------------------------------------------------------------------------------------------------------------- reports

    def saved(self) -> list[Saved]:
        return [self._describe(index) for index, alive in enumerate(self.alive()) if alive]

    def describe(self, packed: Any) -> Saved:
        return self._describe(packed[1] - FIRST_NUMBER)

    def _describe(self, index: int) -> Saved:
        metadata = self.facts[index]
        if not isinstance(metadata, tuple):  # without a check, only the version is noted
            return Saved(format_path(self.path), index, Reason.DROPPED, None, None, None)
        shape, dtype = metadata[:2]
        return Saved(format_path(self.path), index, Reason.DROPPED, shape, dtype, nbytes_of(shape, dtype))

    def held(self) -> list[Holding]:
        seen: set[int] = set()
        parts = (
            (Reason.INPUT, self.arguments),
            (Reason.STATE, self.state),
            (Reason.RANDOM_STATE, self.ambient),
            (Reason.RECOMPUTED, [opened.values for opened in self.passes.values()]),
        )
        return [holding for reason, part in parts for holding in holdings_in(part, Cause(reason), seen, (Frame, Tree))]

    def owners(self) -> list[Frame]:
        return owners_in(self.arguments, Frame, (Tree,))


# --------------------------------------------------------------------------------------------------------------- TorchScript

# Tensors saved by TorchScript are kept, not recomputed: TorchScript profiles the first calls of a function, and saves other
# tensors in these calls than in later calls, such as reruns
# (https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/OVERVIEW.md#profiling-programs).

_CAUSE = Cause(Reason.NOT_REPLAYED, "saved by TorchScript")


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    # A node that holds its own output would never be freed. Autograd restores the history when it unpacks.
    return tensor if tensor.is_leaf and tensor.requires_grad else detach_past_modes(tensor)


@skipped
def _keeping(frame: Frame) -> Callable[[torch.Tensor], KeptTensor]:
    path, watch = frame.path, frame.watch  # not the frame, which would live as long as the graph

    def keep(tensor: torch.Tensor) -> KeptTensor:
        kept = TrackedTensor.of(_without_graph(tensor), tensor._version, path)
        kept.cause = _CAUSE
        return kept if watch is None else watch.kept(None, kept, tensor)

    return keep


@skipped
def _run_scripted(call: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    frame: Any = stack.innermost
    hooks = top_saved_tensors_hooks(False) if torch.is_grad_enabled() else None
    if frame is None or frame.kind != "function" or hooks is None or not are_of_frame(hooks):
        return call(function, *args, **kwargs)
    if frame.recomputing:
        push_saved_tensors_hooks(_without_graph, hooks[1])
    else:
        push_saved_tensors_hooks(_keeping(frame), unpack)
    try:
        return call(function, *args, **kwargs)
    finally:
        pop_saved_tensors_hooks()


def _note_hook(handle: RemovableHandle) -> None:
    frame: Any = stack.innermost
    while frame is not None:  # the nearest enclosing frame that is rerunning removes the hook
        collector = getattr(frame, "collector", None)
        if collector is not None:
            collector.registered.append(handle)
            return
        frame = frame.parent


@functools.cache
def _watch_calls() -> None:
    divert_scripted(_run_scripted)
    tell_hooks(_note_hook)
