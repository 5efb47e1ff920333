"""Recorded frames: entry and exit, their handles and their hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ckpt_hooks._core.frame import mutated_leaf, stack
from ckpt_hooks._core.holdings import Cause, Kept, Reason, TrackedKept
from ckpt_hooks._core.hooks import UNPACKS, are_of_frame, close, close_frame
from ckpt_hooks._core.misuse import explain_refusal
from ckpt_hooks._core.modes import is_without_values, users_modes
from ckpt_hooks._core.settings import current_settings
from ckpt_hooks._operators.operator_events import watch_forward
from ckpt_hooks._tensors.held_tensors import watch_fused_steps
from ckpt_hooks._tensors.offloaded import hooks_for_inputs
from ckpt_hooks._torch.autograd import Hooks, graph_task_id, push_saved_tensors_hooks, top_saved_tensors_hooks
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.modes import num_dispatch_modes
from ckpt_hooks._torch.tensors import counted_detach, is_kept_anyway, storage_address, storage_of
from ckpt_hooks.errors import MutationError
from ckpt_hooks.policies.base import Policy
from ckpt_hooks.policies.decisions import RECOMPUTE, Decisions

from .comparing import ComparedValues
from .debug_source_lines import Lines
from .recorder import Recorder
from .replayed import FunctionHandle, Handle, ReplayedFrame, fate_of
from .tape import Tape
from .values import Value


class RecordedFrame(ReplayedFrame):
    """A region around a block of code, as a context manager."""

    __slots__ = (
        "_debug",
        "_decisions",
        "_draws_anew",
        "_offload_from",
        "_operator_watch",
        "_recorder",
        "_respect_hooks",
        "compared",
        "hooks_around",
        "tape",
    )

    outer: RecordedFrame | None

    def __init__(
        self,
        name: str,
        policy: Policy | None = None,
        *,
        respect_hooks: bool = True,
        preserve_rng_state: bool = True,
        replay_whole: bool | None = None,
        split_backward: bool = False,
        offload_from: int | None = None,
    ) -> None:
        """Makes a frame inside the innermost frame of this thread."""
        parent = stack.innermost
        # A frame directly inside another shares its tape; a function frame in between has to rerun the inner frame on its own.
        outer = parent if type(parent) is RecordedFrame and parent.tape is not None else None
        settings = current_settings()
        ReplayedFrame.__init__(self, name, parent, settings.observers, outer)
        self._debug = settings.debug
        # Compares the frame's values, if a dispatch mode of the user's is around the outermost region; else None.
        self.compared: ComparedValues | None = None
        # Saved-tensor hooks of others around, within the innermost function frame; None after the end.
        self.hooks_around: Hooks | None = None
        self._decisions = None if policy is None else Decisions(policy)
        self._respect_hooks = respect_hooks
        self.whole = replay_whole
        if split_backward and outer is None:
            self.is_split = True
        self._draws_anew, self._offload_from = not preserve_rng_state, offload_from
        self._recorder: Recorder | None = None
        self.tape: Tape | None = None if outer is None else outer.tape  # the frame's tape; None after the end

    def policy_in_words(self) -> str | None:
        """Returns the policy in words; see :meth:`Frame.policy_in_words`."""
        return None if self._decisions is None else repr(self._decisions.policy)

    def __enter__(self) -> RecordedFrame:
        outer, tape = self.outer, self.tape
        self._operator_watch = None if self.watch is None else watch_forward(self)
        hooks, respect_hooks = top_saved_tensors_hooks(False), self._respect_hooks
        if hooks is None and self._offload_from is not None:
            hooks = self.hooks_around = hooks_for_inputs(self.path, self.watch, self._offload_from)
            respect_hooks = False  # outputs kept by the policy stay
        elif hooks is not None:
            if not are_of_frame(hooks):
                self.hooks_around = hooks
            elif outer is not None:
                self.hooks_around = outer.hooks_around
        if outer is None or tape is None:
            watch_fused_steps()
            users = users_modes() if num_dispatch_modes() and not is_without_values() else ()
            tape = self.tape = Tape(hooks, respect_hooks=respect_hooks, is_in_frame=self.parent is not None)
            tape.users_modes = users
            self._recorder = Recorder(tape)
            self._recorder.__enter__()
            tape.recorder = self._recorder
            if self._debug:
                self.lines = Lines(tape.tables)
                self.lines.enter()
        else:
            outer._children.append(weakref.ref(self))
        # Devices and streams as the outermost region began; None where no accelerator was in use.
        self.start, self.current = tape.tables.number, tape.current
        self._lock, self.unseen = tape.lock, tape.unseen
        pack, release = self._packing(tape)
        if self.lines is not None:
            pack = self.lines.packing(pack)
        if tape.users_modes:
            compared = self.compared = ComparedValues(tape.users_modes)
            push_saved_tensors_hooks(compared.packing(pack), unpack_compared)
        else:
            push_saved_tensors_hooks(pack, unpack)  # fails where hooks are disabled; the caller rewinds the thread
        tape.path, tape.decisions, tape.draws_anew = self.path, self._decisions, self._draws_anew
        tape.start = self.start
        self.release = release
        stack.innermost = self
        if self.watch is not None:
            self.watch.entered()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        tape, outer, parent = self.tape, self.outer, self.parent
        assert tape is not None
        if error is not None:
            explain_refusal(error)
        close_frame(self)
        if self.compared is not None:
            self.compared.close()
        self.tape = self.hooks_around = None
        self.complete = True
        if tape.has_refilled and self.whole is None:
            # Processes which gather parameters together have to agree, whatever the sizes of their batches.
            self.whole = False
        if self._recorder is not None:
            if self.lines is not None:
                self.lines.exit()
            self._recorder.__exit__()
        if self._operator_watch is not None:
            self._operator_watch.__exit__()
            self._operator_watch = None
        if self._recorder is not None:
            self._recorder = tape.decisions = None
            if parent is not None and tape.hooks is not None and are_of_frame(tape.hooks):
                parent.note_inside(len(tape.held), self.path)
            if error is None and self.watch is None and self._decisions is None and not tape.watched:
                tape.close()
            else:
                close(error, tape.close, partial(self._tell, tape, error))  # hooks of the user's, and of a rerun around
            return
        if outer is not None:
            tape.path, tape.decisions, tape.draws_anew = outer.path, outer._decisions, outer._draws_anew
            tape.start = outer.start
        if self.watch is not None or self._decisions is not None:
            close(error, partial(self._tell, tape, error))

    def _tell(self, tape: Tape, error: BaseException | None) -> None:
        if self.watch is not None:
            self.watch.exited(error)
            tape.watched = (*tape.watched, self.watch)
        if self.outer is None and error is None:
            for watch in tape.watched:
                watch.settle()
        if self._decisions is not None and error is None:
            self._decisions.finish()

    @skipped
    def _packing(self, tape: Tape) -> tuple[Callable[[torch.Tensor], Handle | Kept], Callable[[], None]]:
        """Returns the pack hook, and a function to drop this frame from the hook, which autograd keeps with each kept leaf."""
        get, handles = tape.tables.known.get, self.handles
        append = handles.append
        pack_other, watch = self._pack_other if self.watch is None else self._pack_watched, self.watch
        new, reference_to, frame = Handle, weakref.ref, self

        def pack(tensor: torch.Tensor) -> Handle | Kept:
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

    def _handle_of(self, tensor: torch.Tensor, value: Value) -> Handle:
        handle = Handle()
        handle.frame, handle.value, handle.index = self, value, len(self.handles)
        reference = weakref.ref(handle)
        self.handles.append(reference)
        value.store.handles = [*(value.store.handles or ()), reference]
        handle.dtype, handle.nbytes = tensor.dtype, tensor.nbytes if tensor.layout is torch.strided else 0
        if not tensor.is_nested:
            handle.shape = tensor.shape
        self.bytes += handle.nbytes
        return handle

    def _pack_other(self, tensor: torch.Tensor, value: Value | None) -> Handle | Kept:
        """Packs a tensor which the tape does not know as the result of an operator."""
        tape = self.tape
        assert tape is not None
        if value is None and is_kept_anyway(tensor):
            return [tensor, tensor._version, self.path]
        if value is None or storage_of(tensor) != value.store.address:
            of_function = tape.is_of_function and tensor.requires_grad  # not a weight or table, which no backward writes to
            store = tape.tables.store_of(tensor)
            if store.uninitialized:
                value = tape.input_of(tensor, store)  # as it is after the writes
            elif store.external and tape.hooks is None and self.hooks_around is None and not of_function:
                kept = counted_detach(tensor) if tensor.requires_grad else tensor
                external = TrackedKept((kept, tensor._version, self.path))
                external.cause = store.cause
                self.externals.append(weakref.ref(external))
                return external
            else:
                value = tape.value_of(tensor, None)
        return self._handle_of(tensor, value)

    def _pack_watched(self, tensor: torch.Tensor, value: Value | None) -> Handle | Kept:
        """Packs a tensor, and tells observers."""
        watch, packed = self.watch, self._pack_other(tensor, value)
        assert watch is not None
        if not isinstance(packed, Handle):
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
            tape.held.keep(value, tensor, decision, tape.path, Cause(Reason.NAME, f"by the name of {name!r}"))


@skipped
def unpack(packed: Any) -> torch.Tensor:
    """Returns the tensor of a handle; the replay drops the tensor after the last read (Rule 4)."""
    is_of_function = type(packed) is FunctionHandle
    if type(packed) is not Handle and not is_of_function:
        leaf: torch.Tensor = packed[0]
        if leaf._version != packed[1]:
            error = mutated_leaf(packed)
            if hasattr(packed, "needed_by"):
                packed.needed_by(error)
            try:
                raise error
            finally:
                del error  # its traceback has this call, which would keep it alive in turn
        return leaf
    handle: Handle = packed
    frame, saved = handle.frame, handle.value.saved
    if saved is not None and not saved.is_packed:
        try:
            tensor = saved.get()
        except MutationError as error:
            if frame.lines is not None:
                frame.lines.explain_saved(error, handle)
            raise
    else:
        with frame._lock:
            replay = frame.passes.get(graph_task_id())
            number = handle.value.number
            if replay is not None and not replay.held and number in replay.tensors:
                left = replay.readers[number] - 1
                replay.readers[number] = left
                tensor = replay.tensors[number] if left else replay.tensors.pop(number)
                if replay.made is not None:
                    replay.made.hand_out(tensor)
            else:
                tensor = frame.bring_back(handle)
    if is_of_function:
        tensor = frame.own(handle, tensor)
    if frame.watch is not None:
        frame.watch.restored(handle.index, tensor)
    return tensor


@skipped
def unpack_compared(packed: Any) -> torch.Tensor:
    """Returns the tensor of a handle as :func:`unpack` does, after a comparison with the saved tensor."""
    tensor = unpack(packed)
    if isinstance(packed, Handle):
        frame = packed.frame
        assert type(frame) is RecordedFrame
        assert frame.compared is not None
        frame.compared.compare(packed, tensor)
    return tensor


UNPACKS += [unpack, unpack_compared]
