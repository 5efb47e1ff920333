"""Recorded frames: entry and exit, their handles and hooks, and the replays of each backward."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import Frame, is_drawn_anew, overlap_error, stack
from ckpt_hooks._core.holdings import Cause, Holding, Reason, Saved, holdings_in, owners_in
from ckpt_hooks._core.hooks import UNPACKS, are_of_frame, close, close_frame
from ckpt_hooks._core.misuse import explain_refusal
from ckpt_hooks._core.modes import is_without_values, users_modes
from ckpt_hooks._core.mutation import watch_fused_steps
from ckpt_hooks._core.packed import FunctionTapeHandle, KeptTensor, TapeHandle, TrackedTensor
from ckpt_hooks._core.scopes import NO_PASSES, SPLIT, Uses, graph_task_scope, group_scope
from ckpt_hooks._core.self_check import CheckedPlace
from ckpt_hooks._core.settings import current_settings
from ckpt_hooks._operators.operator_log import watch_forward
from ckpt_hooks._options import RegionOptions
from ckpt_hooks._tensors.copies import is_plain, stand_in_for
from ckpt_hooks._tensors.samples import Sampled
from ckpt_hooks._tensors.transfers import hooks_for_inputs
from ckpt_hooks._torch.autograd import Hooks, graph_exec_group, graph_task_id, push_saved_tensors_hooks, top_saved_tensors_hooks
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.modes import num_dispatch_modes
from ckpt_hooks._torch.tensors import counted_detach, is_kept_anyway, num_holders, storage_address, storage_of, version_of
from ckpt_hooks.errors import MutationError
from ckpt_hooks.policies.base import Policy
from ckpt_hooks.policies.decisions import RECOMPUTE, Decisions
from ckpt_hooks.policies.ready_made import nothing_saveable

from .explaining import ComparedValues, OperatorLines
from .recorder import Recorder
from .replay import Replay, Replayable, bring_back
from .tape import Tape
from .values import Value, is_held_twice, values_below

_has_warned = False  # whether the user was warned of a policy inside of a plain region

_number = operator.attrgetter("number")

#: Stand-ins for saved tensors from outside.
Externals = list[weakref.ref[TrackedTensor]]


class SplitReplay(Replay):
    """The tensors of a frame for the two parts of a backward; holds the frame weakly, since the frame owns this replay."""

    def __init__(self, frame: Replayable, roots: Sequence[Value], handles: Sequence[TapeHandle]) -> None:
        Replay.__init__(self, frame, [*roots, *(handle.value for handle in handles)], SPLIT)
        # Handles with uses left, by index, each with the number of its value.
        self.handles = {handle.index: (weakref.ref(handle), handle.value.number) for handle in handles}
        self.uses = Uses()

    @property
    def frame(self) -> Replayable:
        """The frame, which a handle in use keeps alive."""
        frame = self._frame()
        assert frame is not None
        return frame

    @frame.setter
    def frame(self, frame: Replayable) -> None:
        self._frame = weakref.ref(frame)

    def expects_handle(self, index: int) -> bool:
        """Whether a handle has uses left and no backward has written to its memory."""
        if self.uses.is_next_part():
            for dead in [position for position, (reference, _) in self.handles.items() if reference() is None]:
                self._release(dead, 1 if dead in self.uses.used else 2)
        if index not in self.handles:
            return False
        number = self.handles[index][1]
        tensor = self.held.get(number, self.tensors.get(number))
        return tensor is None or self.uses.is_untouched(index, tensor)

    def hand_out(self, index: int, tensor: torch.Tensor) -> None:
        is_second = index in self.uses.used
        if not self.uses.hand_out(index, tensor):
            self._release(index, 0 if is_second else 1)

    def _release(self, index: int, uses: int) -> None:
        """Drops a handle and the given number of its uses."""
        _, number = self.handles.pop(index)
        if uses:
            self.readers[number] -= uses
            if not self.readers[number]:
                del self.readers[number]
                self.tensors.pop(number, None)
                self.held.pop(number, None)


def held_in_graph(externals: Externals, seen: set[int]) -> list[Holding]:
    """Returns the tensors from outside that the graph holds itself, without a frame."""
    return [
        holding._replace(why=f"saved, {holding.why}")
        for reference in externals
        if (external := reference()) is not None
        for holding in holdings_in(external.tensor, external.cause, seen)
    ]


def take(replay: Replay, value: Value) -> torch.Tensor:
    """Returns the tensor of ``value`` from ``replay``, or from a replay of only this value if its read count is used up."""
    if not replay.expects(value):
        replay = Replay(replay.frame, (value,), None)
    if not replay.has(value):
        bring_back(replay, value)
    return replay.take(value)


def fate_of(value: Value) -> Reason:
    """Returns the fate of a handle's tensor; a view of a tensor from outside has the fate of its memory, which is held."""
    saved = value.saved
    if saved is None:
        return value.store.cause.reason if value.store.external else Reason.DROPPED
    return Reason.OFFLOADED if saved.is_on_host else saved.cause.reason


@skipped
def unpack(packed: Any) -> torch.Tensor:
    """Returns the tensor of a handle, which the replay drops after the last read (Rule 4), or a kept tensor."""
    if isinstance(packed, KeptTensor):
        return packed.tensor if packed.tensor._version == packed.version else packed.unpack()
    frame, saved = packed.frame, packed.value.saved
    tensor: torch.Tensor
    if saved is not None and not saved.is_packed:
        try:
            tensor = saved.get()
        except MutationError as error:
            if frame.lines is not None:
                frame.lines.explain_saved(error, packed)
            raise
    else:
        with frame._lock:
            replay = frame.passes.get(graph_task_id())
            number = packed.value.number
            if replay is not None and not replay.held and number in replay.tensors:
                left = replay.readers[number] - 1
                replay.readers[number] = left
                tensor = replay.tensors[number] if left else replay.tensors.pop(number)
                if frame.current is not None:
                    frame.current.hand_out(tensor)
            else:
                tensor = frame.bring_back(packed)
    if type(packed) is FunctionTapeHandle:
        tensor = frame.for_function(packed, tensor)
    if frame.watch is not None:
        frame.watch.restored(packed.index, tensor)
    return tensor


class RecordedFrame(Replayable):
    """A region around a block of code, as a context manager."""

    __slots__ = (
        "_at_end",
        "_children",
        "_compares_values",
        "_debug",
        "_decisions",
        "_has_lines",
        "_offload_from",
        "_operator_watch",
        "_place",
        "_recorder",
        "_respect_hooks",
        "compared",
        "draws_anew",
        "externals",
        "handles",
        "hooks_around",
        "is_split",
        "tape",
    )

    kind = "recorded"
    outer: RecordedFrame | None
    passes: dict[int, Any]  # replays, by the key of the scope

    def __init__(
        self,
        name: str,
        options: RegionOptions,
        *,
        place: CheckedPlace | None = None,
        around_replays: AbstractContextManager[Any] | None = None,
        at_end: Callable[[Tape], None] | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        parent = stack.innermost
        # A frame directly inside a recorded frame shares the tape. With a function frame in between it has its own tape, since
        # the function frame's rerun runs the inner frame again.
        outer = parent if type(parent) is RecordedFrame and parent.tape is not None else None
        settings = current_settings()
        Frame.__init__(self, name, parent, settings.observers, module)
        self.outer = outer
        self._children: list[weakref.ref[RecordedFrame]] = []
        self.handles: list[weakref.ref[TapeHandle]] = []
        self.externals: Externals = []  # stand-ins for saved tensors from outside
        self.bytes = self.start = 0
        self.lines = None if outer is None else outer.lines
        self.unseen: list[tuple[torch.Tensor, str]] = []
        # Whether values stay for a second backward (:mod:`ckpt_hooks._core.scopes`).
        self.is_split: bool = options.split_backward if outer is None else outer.is_split
        self._debug = options.debug if settings.debug is None else settings.debug
        self._has_lines = False  # whether the lines of operators are this frame's, and not the outer frame's
        self._compares_values, self._place = options.check.fingerprint is not None, place
        self.around_replays = around_replays
        self._at_end = at_end  # called with the tape of an outermost frame before the tape is closed
        # Compares values on request, for the self-check, or inside of a user's dispatch mode; else None.
        self.compared: ComparedValues | None = None
        # Saved-tensor hooks of the user, or of ``offload_from``, around this frame and inside of any function frame; else None.
        self.hooks_around: Hooks | None = None
        self._decisions = None if options.policy is None else Decisions(options.policy)
        self._respect_hooks = options.respect_hooks
        self.whole = options.replay_whole
        self.draws_anew, self._offload_from = not options.preserve_rng_state, options.offload_from
        self._recorder: Recorder | None = None
        self.tape: Tape | None = None if outer is None else outer.tape  # the frame's tape; None after the end

    def policy_in_words(self) -> str | None:
        return None if self._decisions is None else repr(self._decisions.policy)

    def __enter__(self) -> RecordedFrame:
        outer, tape = self.outer, self.tape
        if self.parent is not None and self._decisions is not None and not _has_warned:
            _warn_of_unheeded(self._decisions.policy, self.path[0], self.parent)
        self._operator_watch = None if self.watch is None else watch_forward(self)
        hooks, respect_hooks = top_saved_tensors_hooks(False), self._respect_hooks
        if hooks is None and self._offload_from is not None:
            hooks = self.hooks_around = hooks_for_inputs(self.path, self.watch, self._offload_from)
            respect_hooks = False  # tensors that the policy keeps stay on the device
        elif hooks is not None:
            if not are_of_frame(hooks):
                self.hooks_around = hooks
            elif outer is not None:
                self.hooks_around = outer.hooks_around
        if outer is None or tape is None:
            watch_fused_steps()
            users = users_modes() if num_dispatch_modes() and not is_without_values() else ()
            tape = self.tape = Tape(hooks, respect_hooks=respect_hooks, frame=self.parent)
            tape.users_modes = users
            self._recorder = Recorder(tape)
            self._recorder.__enter__()
            tape.recorder = self._recorder
        else:
            outer._children.append(weakref.ref(self))
        self._has_lines = self._debug and self.lines is None
        if self._has_lines:
            self.lines = OperatorLines(tape.tables)
            self.lines.enter()
        self.start, self.current = tape.tables.number, tape.current
        self._lock, self.unseen = tape.lock, tape.unseen
        pack, release = self._packing(tape)
        if self.lines is not None:
            pack = self.lines.packing(pack)
        place, around = self._place, outer if self.draws_anew else None
        while around is not None:
            if around.compared is not None:
                around.compared.give_up()
            around = around.outer
        if tape.users_modes or self._compares_values:
            self.compared = ComparedValues(tape.users_modes)
        elif place is not None and self.watch is None and place.is_due() and not (is_without_values() or is_drawn_anew(self)):
            self.compared = ComparedValues((), Sampled(place))
        if self.compared is not None:
            push_saved_tensors_hooks(self.compared.packing(pack), unpack_compared)
        else:
            push_saved_tensors_hooks(pack, unpack)  # fails where hooks are disabled; the caller rewinds the thread
        tape.path, tape.decisions, tape.draws_anew = self.path, self._decisions, self.draws_anew
        tape.start, tape.held.handles = self.start, self.handles
        tape.handles.append(self.handles)
        self.release = release
        stack.innermost = self
        if self.watch is not None:
            self.watch.tell("entered")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        tape, outer = self.tape, self.outer
        assert tape is not None
        if error is not None:
            explain_refusal(error)
        close_frame(self)
        if self.compared is not None:
            self.compared.close()
        self.tape = self.hooks_around = None
        self.complete = True
        if tape.has_refilled and self.whole is None:
            # Processes that gather parameters together have to replay alike, whatever the sizes of their batches.
            self.whole = False
        if self._has_lines and self.lines is not None:
            self.lines.exit()
        if self._recorder is not None:
            self._recorder.__exit__()
        if self._operator_watch is not None:
            self._operator_watch.__exit__()
            self._operator_watch = None
        if self._recorder is not None:
            self._recorder = tape.decisions = None
            if self._at_end is not None and error is None:
                self._at_end(tape)
            if error is None and self.watch is None and self._decisions is None and not tape.watched:
                tape.close()
            else:
                close(error, tape.close, partial(self._tell, tape, error))  # both may call the user's hooks, which may raise
            return
        if outer is not None:
            tape.path, tape.decisions, tape.draws_anew = outer.path, outer._decisions, outer.draws_anew
            tape.start, tape.held.handles = outer.start, outer.handles
        if self.watch is not None or self._decisions is not None:
            close(error, partial(self._tell, tape, error))

    def _tell(self, tape: Tape, error: BaseException | None) -> None:
        if self.watch is not None:
            self.watch.tell("exited", error)
            tape.watched = (*tape.watched, self.watch)
        if self.outer is None and error is None:
            for watch in tape.watched:
                watch.settle()
        if self._decisions is not None and error is None:
            self._decisions.finish()

    @skipped
    def _packing(self, tape: Tape) -> tuple[Callable[[torch.Tensor], TapeHandle | KeptTensor], Callable[[], None]]:
        """Returns the pack hook, and a function that makes it drop this frame: autograd keeps the hook with each kept leaf."""
        get, handles = tape.tables.known.get, self.handles
        append = handles.append
        pack_other, watch = self._pack_other if self.watch is None else self._pack_watched, self.watch
        new, reference_to, frame = TapeHandle, weakref.ref, self

        def pack(tensor: torch.Tensor) -> TapeHandle | KeptTensor:
            value = get(id(tensor))
            if value is None or storage_address(tensor) != value.store.address or watch is not None:
                return pack_other(tensor, value)
            handle = new()
            handle.frame = frame
            handle.value = value
            handle.index = len(handles)
            reference = reference_to(handle)
            append(reference)
            store = value.store
            if store.handles is None:
                store.handles = [reference]
            else:
                store.handles.append(reference)
            handle.nbytes = nbytes = tensor.nbytes
            frame.bytes += nbytes
            return handle

        def release() -> None:
            nonlocal frame, pack_other
            del frame, pack_other

        return pack, release

    def _handle_of(self, tensor: torch.Tensor, value: Value) -> TapeHandle:
        handle = TapeHandle()
        handle.frame, handle.value, handle.index = self, value, len(self.handles)
        reference = weakref.ref(handle)
        self.handles.append(reference)
        value.store.handles = [*(value.store.handles or ()), reference]
        handle.dtype, handle.nbytes = tensor.dtype, tensor.nbytes if tensor.layout is torch.strided else 0
        if not tensor.is_nested:
            handle.shape = tensor.shape
        self.bytes += handle.nbytes
        return handle

    def _pack_other(self, tensor: torch.Tensor, value: Value | None) -> TapeHandle | KeptTensor:
        """Packs a tensor that the tape does not know as an operator's result."""
        tape = self.tape
        assert tape is not None
        if value is None and is_kept_anyway(tensor):
            kept = KeptTensor()
            kept.tensor, kept.version, kept.path = tensor, tensor._version, self.path
            return kept
        if value is None or storage_of(tensor) != value.store.address:
            # A tensor without a version gets a handle. So does a non-leaf of a custom function, whose backward may write to it.
            is_value = (tape.is_of_function and tensor.requires_grad) or version_of(tensor) < 0
            store = tape.tables.store_of(tensor)
            if store.uninitialized:
                value = tape.input_of(tensor, store)  # kept itself: backward sees later writes to unfilled memory
            elif store.external and tape.hooks is None and self.hooks_around is None and not is_value:
                alias = counted_detach(tensor) if tensor.requires_grad else tensor
                external = TrackedTensor.of(alias, tensor._version, self.path)
                external.cause = store.cause
                self.externals.append(weakref.ref(external))
                return external
            else:
                value = tape.value_of(tensor, None)
        return self._handle_of(tensor, value)

    def _pack_watched(self, tensor: torch.Tensor, value: Value | None) -> TapeHandle | KeptTensor:
        watch, packed = self.watch, self._pack_other(tensor, value)
        assert watch is not None
        if not isinstance(packed, TapeHandle):
            return watch.kept(None, packed, tensor)
        op = packed.value.op
        watch.saved(packed.index, fate_of(packed.value), tensor, None if op is None else op.facts.full_name)
        watch.follow(packed, packed.index)
        return packed

    def name_tensor(self, tensor: torch.Tensor, name: str) -> None:
        """Keeps a tensor of this frame if the policy asks for its name."""
        tape = self.tape
        if tape is None or self._decisions is None:
            return
        decision = self._decisions.of_name(name)
        value = tape.tables.known.get(id(tensor))
        if decision != RECOMPUTE and value is not None and value.saved is None and not value.store.external:
            tape.keep(value, tensor, decision, Cause(Reason.NAME, f"by the name of {name!r}"))

    def saved(self) -> list[Saved]:
        return [self.describe(handle) for reference in self.handles if (handle := reference()) is not None]

    def held(self) -> list[Holding]:
        seen: set[int] = set()
        holdings = held_in_graph(self.externals, seen)
        for value in self._values():
            if value.saved is not None:
                seen.add(id(value.saved.memory))  # an alias of the tensor, not to be listed twice
                holdings += holdings_in(value.saved, value.saved.cause, seen, (Frame,))
            if value.op is not None:
                holdings += holdings_in(value.op.draw, Cause(Reason.RANDOM_STATE), seen, (Frame,))
        replays = [
            [*replay.tensors.values(), *replay.held.values(), *replay.early.values()] for replay in list(self.passes.values())
        ]
        return holdings + list(holdings_in(replays, Cause(Reason.RECOMPUTED), seen))

    def _values(self) -> list[Value]:
        """Returns the values that living handles need, in the order of their making."""
        handles = [handle for reference in self.handles if (handle := reference()) is not None]
        return sorted(values_below([handle.value for handle in handles]), key=_number)

    def owners(self) -> list[Frame]:
        packed = [value.saved for value in self._values() if value.saved is not None and value.saved.is_packed]
        return owners_in([self.outer, packed], Frame)

    def describe(self, packed: TapeHandle) -> Saved:
        value = packed.value
        made_by = None if value.op is None else value.op.facts.full_name
        shape, dtype = getattr(packed, "shape", None), getattr(packed, "dtype", None)
        return Saved(format_path(self.path), packed.index, fate_of(value), shape, dtype, packed.nbytes, made_by)

    def _living_children(self) -> list[RecordedFrame]:
        return [child for reference in self._children if (child := reference()) is not None]

    def replay_for(self, key: int) -> Replay:
        """Returns the replay of a scope; if there is none, makes replays for this frame and for frames inside."""
        replay: Replay | None = self.passes.get(key)
        if replay is not None:
            return replay
        group, scope = graph_exec_group(), None
        if key != SPLIT:
            scope = graph_task_scope(key) if group is None else group_scope(group)
        order, todo = [], [self]
        while todo:
            frame = todo.pop()
            if key not in frame.passes:
                order.append(frame)
                todo += frame._living_children()
        for frame in reversed(order):
            # Without handles of kept tensors, which a replay would hold until their last request.
            handles = [
                handle
                for reference in frame.handles
                if (handle := reference()) is not None and (handle.value.saved is None or handle.value.saved.is_packed)
            ]
            roots = [handle.value for handle in handles]
            for child in frame._living_children():
                roots += [value for reference in child.passes[key].crossing if (value := reference()) is not None]
            if scope is None:
                frame.passes = {SPLIT: SplitReplay(frame, roots, handles)}
            else:
                frame.keep_pass(Replay(frame, roots, key), scope)
        opened: Replay = self.passes[key]
        return opened

    def bring_back(self, handle: TapeHandle) -> torch.Tensor:
        """Returns the tensor of a handle; the caller holds the tape's lock."""
        group = graph_exec_group()
        key = graph_task_id() if group is None else group_scope(group).key
        if key == -1:  # outside of a backward: nothing tells when to drop values
            return self.alone(handle.value)
        if self.is_split:
            return self._bring_back_in_parts(handle)
        replay = self.replay_for(key)
        if group is not None and handle.index in replay.taken:
            raise overlap_error(self.path, handle.index)
        tensor = take(replay, handle.value)
        if group is not None:
            replay.taken.add(handle.index)
        return tensor

    def _bring_back_in_parts(self, handle: TapeHandle) -> torch.Tensor:
        """Returns the tensor of a handle, for the first or the second of two backwards."""
        replay = self.replay_for(SPLIT)
        assert isinstance(replay, SplitReplay)
        if not replay.expects_handle(handle.index):
            for frame in self._frames_on_tape():  # this is a third backward
                frame.passes = NO_PASSES
            replay = self.replay_for(SPLIT)
            assert isinstance(replay, SplitReplay)
        tensor = take(replay, handle.value)
        replay.hand_out(handle.index, tensor)
        return tensor

    def _frames_on_tape(self) -> Iterator[RecordedFrame]:
        root = self
        while root.outer is not None:
            root = root.outer
        todo = [root]
        while todo:
            frame = todo.pop()
            yield frame
            todo += frame._living_children()

    def for_function(self, handle: TapeHandle, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor for the backward of a custom function: a copy if a replay or a policy still needs the memory."""
        saved = handle.value.saved
        if not is_plain(tensor):  # no kernel can write to its memory
            return tensor
        if saved is not None and not saved.is_packed:
            in_memory = sum(reference() is not None for reference in handle.value.store.held or ())
            is_needed = in_memory > 1 or is_held_twice(weakref.ref(handle.value))
        else:
            is_needed = num_holders(tensor) > 1 or self._has_memory_of(tensor)
        if not is_needed:
            return tensor
        # Replays of a backward in inference mode make inference tensors, which have no version.
        return tensor.detach().clone() if tensor.is_inference() else stand_in_for(tensor)

    def _has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a running replay of the tape has a tensor in the memory of ``tensor``."""
        address = storage_of(tensor)
        for frame in self._frames_on_tape():
            for replay in list(frame.passes.values()):  # replays of other threads come and go
                if any(storage_of(other) == address for other in (*replay.tensors.values(), *replay.held.values())):
                    return True
        return False

    def alone(self, value: Value) -> torch.Tensor:
        """Returns the tensor of a value, by a replay for this call."""
        return take(Replay(self, (value,), None), value)

    def sources_of(self, replay: Replay, values: Iterable[Value]) -> list[tuple[Replay, Value]]:
        outer = self.outer
        assert outer is not None
        if replay.key is None:
            spare = Replay(outer, values, None)
            return [(spare, value) for value in values]
        outer_replay = outer.replay_for(replay.key)
        return [(outer_replay if outer_replay.expects(value) else Replay(outer, (value,), None), value) for value in values]


def _warn_of_unheeded(policy: Policy, name: str, around: Frame | None) -> None:
    """Warns, once, of a policy inside of a plain region, whose rerun computes kept tensors again."""
    global _has_warned
    while around is not None and around.kind != "function":
        around = around.parent
    if around is not None and policy is not nothing_saveable:
        _has_warned = True
        warn_user(
            f"The policy {policy!r} of region {name!r} spares nothing: region {around.path[0]!r} around it is a plain region, "
            "whose recompute runs everything again. Make the outer region recorded, by `recorded=True` or `with "
            "checkpoint_region():`."
        )


@skipped
def unpack_compared(packed: Any) -> torch.Tensor:
    tensor = unpack(packed)
    if isinstance(packed, TapeHandle):
        frame = packed.frame
        assert type(frame) is RecordedFrame
        assert frame.compared is not None
        frame.compared.compare(packed, tensor)
    return tensor


UNPACKS.update({unpack: False, unpack_compared: False})
