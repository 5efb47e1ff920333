"""The recording of a call of a custom autograd function: arguments, operators, results, and written memory.

Kernels launched by pointer write unseen, so all functions follow the same rule. A call counts as a write to the arguments that
require grad, are no leaves, and were made in the innermost region: a replay then runs the function before later reads, which
costs nothing if nothing was written. Memory from outside of the region, and arguments without gradients, are compared before
and after the call. A replay must not repeat a write to memory from outside, or other effects, so then the results are kept.

The alternative not taken: to watch the first call of each function for calls into foreign modules (``sys.setprofile``), and to
record operators if there are none. It fails for a kernel behind a branch that only a later call takes.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Collection, Sequence
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor

from ckpt_hooks._ambient import random
from ckpt_hooks._ambient.devices import find_devices, is_capturing
from ckpt_hooks._ambient.random import TRACKED, is_same_state
from ckpt_hooks._ambient.switches import AUTOCAST, FUNCTION_MODES
from ckpt_hooks._core.holdings import Cause, Reason
from ckpt_hooks._core.modes import count_writes
from ckpt_hooks._core.packed import FunctionTapeHandle, TapeHandle
from ckpt_hooks._operators.draws import NotedStates, draw_noting, drops_nothing
from ckpt_hooks._operators.facts import OpFacts, Written
from ckpt_hooks._state.containers import PLAIN_VALUES, Capture, TensorAt
from ckpt_hooks._tensors.copies import PLAIN_OR_FAKE, Image, copy_from, differs, image_of, is_dense
from ckpt_hooks._tensors.held_tensors import HeldOnHost
from ckpt_hooks._tensors.nested import outer_tensors_in
from ckpt_hooks._torch.autograd import graph_task_id, pop_saved_tensors_hooks, push_saved_tensors_hooks, top_saved_tensors_hooks
from ckpt_hooks._torch.functions import APPLY_CODE
from ckpt_hooks._torch.modes import FAKE
from ckpt_hooks._torch.tensors import is_freed, is_kept_anyway, storage_address, storage_of
from ckpt_hooks.policies.decisions import RECOMPUTE, SAVE

from . import writes
from .function_rerun import FunctionFacts, is_without_state, memory_of, parts_of
from .tape import Tape, decide
from .values import ANEW, Op, Store, Value, counter_in, counter_of, new_store, new_value

#: Bytes up to which arguments from outside without a history (weights, tables) are compared: a comparison takes 0.2 ms, and
#: kernels do not write to larger weights.
MOST_COMPARED = 1 << 20


_tensor_at = functools.cache(TensorAt)


def taken_apart(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], list[torch.Tensor], tuple[bool, ...], list[Any], str | None]:
    tensors: list[torch.Tensor] = []
    needs: list[bool] = []
    arguments: list[Any] = []
    capture: Capture | None = None
    try:
        for argument in args:
            if isinstance(argument, torch.Tensor):
                arguments.append(_tensor_at(len(tensors)))
                needs.append(argument.requires_grad)
                tensors.append(argument)
                continue
            needs.append(False)
            if type(argument) not in PLAIN_VALUES:
                capture = capture or Capture(tensors)
                argument = capture.value(argument, "")
            arguments.append(argument)
        if kwargs:
            capture = capture or Capture(tensors)
            needs += [isinstance(argument, torch.Tensor) and argument.requires_grad for argument in kwargs.values()]
            kwargs = {name: capture.value(argument, "") for name, argument in kwargs.items()}
    except TypeError:  # raised by :class:`Capture` for an iterator
        tensors += [argument for argument in args[len(arguments) :] if isinstance(argument, torch.Tensor)]
        return [], {}, tensors, (), [], "takes an iterator, which can be read only once"
    objects = []
    if capture is not None:
        capture.finish()
        objects = [captured for captured in capture.objects if not _is_plain(captured)]
    return arguments, kwargs, tensors, tuple(needs), objects, None


def is_compared(tensor: torch.Tensor, store: Store) -> bool:
    """Whether an argument is compared: it has contents, and is no large weight or table."""
    if type(tensor) is FAKE or not is_dense(tensor) or tensor.is_meta or not tensor.numel() or is_freed(tensor):
        return False
    is_weight = store.external and (not tensor.requires_grad or is_kept_anyway(tensor))
    return not is_weight or tensor.nbytes <= MOST_COMPARED


def _is_plain(value: Any) -> bool:
    """Whether an argument is safe to hold for a rerun: a value without parts, or a plain function or class."""
    # An object with parts may lead to the graph that holds this call: a cycle that the garbage collector does not see.
    if isinstance(value, torch.Generator):
        return False
    if isinstance(value, types.FunctionType):
        return is_without_state(value)
    return isinstance(value, (type, types.BuiltinFunctionType)) or not gc.is_tracked(value)


def read_sources() -> random.RandomStates:
    """Returns the states of random sources except the CPU's generator, whose draws are noted one by one."""
    return None, random.read_devices(), tuple((source, source.read()) for source in random.TRACKED)


def has_moved(before: random.RandomStates, after: random.RandomStates) -> bool:
    """Whether a random source other than the CPU's has moved."""
    return before[1] is not after[1] or any(
        not is_same_state(earlier, later) for (_, earlier), (_, later) in zip(before[2], after[2], strict=True)
    )


_LIFT_FRESH = torch.ops.aten.lift_fresh.default


_NO_KWARGS: dict[str, Any] = {}
_written_at = functools.cache(functools.partial(Written, name="", counted=False, overwritten=False))


def _pack_saved(pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Packs a tensor that a custom function saved: a ``pack`` of a call on another tape recognizes this caller."""
    return pack(tensor)


# Code that calls a pack hook for a tensor that the function itself saved, and not an operator in the function.
_CALLERS = (APPLY_CODE, _pack_saved.__code__)


def _packing(call: FunctionCall, pack: Callable[[Tensor], Any]) -> tuple[Callable[[Tensor], Any], Callable[[], None]]:
    """Returns a pack hook for a call, and a function that makes the hook drop the call: autograd keeps the hook."""

    def pack_in_call(tensor: Tensor) -> Any:
        if sys._getframe(1).f_code not in _CALLERS:  # an operator in the function saves
            return pack(tensor)
        return call.pack(tensor, pack)

    def release() -> None:
        nonlocal call, pack
        del call, pack

    return pack_in_call, release


class FunctionCall:
    reason: str | None = None  # the reason to keep the results; None where a replay may run the function again
    _is_settled = _is_capturing = False
    _num_saved = 0
    _sources: random.RandomStates | None = None

    def __init__(self, tape: Tape, function: Any, args: Any, kwargs: Any) -> None:
        self._tape, self._task = tape, graph_task_id()
        facts = self._facts = FunctionFacts(function)
        self._op = Op()
        self._draws: list[Any] = []
        self._states = NotedStates()  # of this call only, since its rerun draws in the order of forward
        self._born: set[int] = set()  # addresses of storages made in the function
        self._stores: dict[int | None, Store] = {}  # storages of arguments, by address
        self._written: dict[int, Store] = {}  # storages that count as written to, by identity
        self._lent: dict[int, int] = {}  # by identity of the storage: the place of an argument that a rerun writes to
        self._looked: list[tuple[Tensor, Store, Image]] = []  # arguments to compare
        self._decisions: dict[int, int] = {}  # the policy's decisions on results of operators inside, by address
        self._made: list[Value] = []
        # Whether the policy keeps all results, including results of kernels.
        policy = None if tape.decisions is None or self._task != tape.task else tape.decisions.policy
        self._keeps = policy is not None and policy.for_function(function)
        facts.args, facts.kwargs, self._tensors, facts.needs_input_grad, facts.objects, reason = taken_apart(args, kwargs)
        if facts.objects:
            parts = parts_of(facts.objects)
            if parts is None:
                reason = "takes an object that it may change"
            else:
                facts.parts, facts.memory = parts, memory_of(parts)
                self._tensors += [part for part in parts if isinstance(part, Tensor)]
        if reason is not None:
            self.keep(reason)
        facts.casts = AUTOCAST.capture()
        facts.modes = FUNCTION_MODES.capture()
        facts.context = copy_context()
        self._look_at_arguments()
        if TRACKED or (find_devices() and not self._is_capturing):
            self._sources = read_sources()

    def keep(self, reason: str) -> None:
        if self.reason is None:
            self.reason = f"from {self._facts.name}, which {reason}"

    def run_operator(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, record: Callable[..., Any]) -> Any:
        born, stores = self._born, self._stores
        if (
            facts.is_fast
            and not kwargs
            and self.reason is None
            and self._tape.decisions is None
            and not torch.is_grad_enabled()
        ):
            try:
                for position in facts.tensors[len(args)]:  # ``_look_at`` written out: saves a microsecond an operator
                    address = storage_address(args[position])
                    if address not in stores and address not in born:
                        self._look_at(func, facts, args, kwargs)
            except (NotImplementedError, TypeError):  # no storage, or no tensor
                self._look_at(func, facts, args, kwargs)
            out, decision = facts.call(*args), RECOMPUTE
        else:
            out, decision = self._run_any(func, facts, args, kwargs, record)
        if facts.is_view:
            return out
        for tensor in (out,) if type(out) is Tensor else outer_tensors_in(out):
            made = storage_of(tensor)
            if made and made not in stores:
                born.add(made)
                if decision != RECOMPUTE:
                    self._decisions[made] = decision
                elif self._decisions and (not facts.written or facts.replaces_storage):  # a new storage at a reused address
                    self._decisions.pop(made, None)
        return out

    def _run_any(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, record: Callable[..., Any]) -> tuple[Any, int]:
        """Runs an operator of any kind; returns its results, and the policy's decision."""
        tape = self._tape
        if self.reason is None:
            self._look_at(func, facts, args, kwargs)
        if facts.is_opaque or ((facts.written or facts.is_inplace_view) and self._is_foreign(facts, args, kwargs)):
            return record(func, facts, args, kwargs), RECOMPUTE
        if not facts.is_random or self._task != graph_task_id() or drops_nothing(func, args, kwargs):
            out = facts.call(*args, **kwargs)
        elif tape.draws_anew:
            out = facts.call(*args, **kwargs)
            self._op.draw = ANEW
        else:
            out, state = draw_noting(func, args, kwargs, self._states)
            self._draws.append(state)
        if facts.written:
            count_writes(func, args)
        return out, RECOMPUTE if tape.decisions is None or facts.is_view else decide(tape, facts, args, kwargs, out)

    def _look_at(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> None:
        """Looks for a reason to keep the results."""
        if facts.is_opaque or facts.is_collective or facts.has_effect:
            self.keep(f"runs {facts.full_name}")
        elif torch.is_grad_enabled():
            self.keep("runs a backward" if self._task != graph_task_id() else "records a graph of its own")
        elif func is _LIFT_FRESH:
            self._born.add(storage_of(args[0]) or 0)  # the operator returns its argument
        else:
            for position in facts.tensors[len(args)]:
                self._look_at_read(args[position])
            if facts.lists or (kwargs and not facts.keywords.isdisjoint(kwargs)):
                for tensor in outer_tensors_in(([args[at] for at in facts.lists if at < len(args)], kwargs)):
                    self._look_at_read(tensor)

    def _look_at_read(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            address = storage_of(tensor)
            if address not in self._born and address not in self._stores and address is not None:
                self.keep("reads a tensor that is neither an argument nor made by an operator")

    def _is_foreign(self, facts: OpFacts, args: Any, kwargs: Any) -> bool:
        """Whether a write goes beyond memory that the function or the innermost region made; notes writes to arguments."""
        targets = [args[0]] if facts.is_inplace_view else [tensor for tensor, _ in writes.targets_of(facts, args, kwargs)]
        for target in targets:
            address = storage_of(target)
            store = self._stores.get(address)
            if store is None:
                if address in self._born:
                    continue
                self.keep("writes to a tensor that is neither an argument nor made by an operator")
            elif facts.is_inplace_view or facts.replaces_storage:
                self.keep("gives an argument another shape")
            elif self._is_inside(store):
                if id(store) not in self._written:
                    writes.copy_held(self._tape, [store])
                    self._written[id(store)] = store
                continue
            else:
                self._lend(store, is_seen=True)
            return True
        return False

    def _lend(self, store: Store, *, is_seen: bool) -> None:
        """Lets reruns repeat a write to an outside storage, from forward's contents, if possible; else keeps the results."""
        if id(store) in self._lent:
            return
        looked = [(tensor, image) for tensor, other, image in self._looked if other is store]
        places = [place for place, tensor in enumerate(self._tensors) if storage_of(tensor) == store.address]
        # A rerun gets forward's content in a copy of an argument, or in place in a tensor of an object. Not for two arguments
        # in one storage, which would share a copy, nor with grad: the write makes such a tensor a result (``mark_dirty``).
        if store.external and not store.birth and len(looked) == len(places) == 1 and not looked[0][0].requires_grad:
            differing = is_seen and differs(*looked[0])  # True if a kernel wrote before: a copy made now is too late
            if isinstance(differing, Tensor):
                self._tape.unseen.append((differing, self._facts.name))
            if differing is not True:
                self._lent[id(store)] = places[0]
                return
        self.keep("writes to memory from outside of the region")

    def _is_inside(self, store: Store) -> bool:
        """Whether the innermost region made a storage, so that its replay may write there."""
        return not store.external and store.birth > self._tape.start

    def _look_at_arguments(self) -> None:
        """Puts the arguments on the tape, and notes the contents that will be compared."""
        tape, facts, op, stores = self._tape, self._facts, self._op, self._stores
        get, start, written = tape.tables.known.get, tape.start, self._written
        values, grads, others = [], [], []
        versions: list[int | None] = []
        for tensor in self._tensors:
            value, address = get(id(tensor)), storage_of(tensor)
            if type(tensor) not in PLAIN_OR_FAKE or address is None:
                self.keep("has a tensor of another class among its arguments")
            if value is None or address != value.store.address:
                value = tape.value_of(tensor, None)
            store = stores[address] = value.store
            values.append(value)
            grad = tensor.requires_grad
            grads.append(grad)
            try:
                versions.append(tensor._version)
            except RuntimeError:
                self.keep("has an inference tensor among its arguments")
                versions.append(None)
            if type(tensor) is FAKE:
                facts.fake_mode = tensor.fake_mode  # type: ignore[attr-defined]
            elif not tensor.is_cpu and not tensor.is_meta and is_capturing(tensor.device.type):
                self._is_capturing = True
            if store.external and store.birth:
                # The region made this memory, which now counts as outside. A comparison of unfilled memory may miss a write.
                self.keep("got memory made in the region that operators had not filled, or that was kept before")
                written[id(store)] = store
            elif grad and not store.external and store.birth > start:
                written[id(store)] = store
                self._look_at_held(store)
            else:
                others.append((tensor, store))
        self._versions, facts.grads = versions, grads
        op.facts, op.args, op.kwargs, op.present = facts, values, _NO_KWARGS, tuple(range(len(values)))
        op.call = op.draw = None
        if self._is_capturing:
            self._take_as_written(others)
        else:
            if self.reason is not None:  # no replay runs the call, so a write counts only if a comparison shows it
                for tensor, value in zip(self._tensors, values, strict=True):
                    if tensor.is_cpu and not value.store.external and written.pop(id(value.store), None) is not None:
                        others.append((tensor, value.store))
            for tensor, store in others:
                if id(store) not in written and is_compared(tensor, store):
                    self._looked.append((tensor, store, image_of(tensor)))
                    if store.held is not None:
                        self._look_at_others(tensor, store)
        for store in written.values():
            if store.held is not None:
                writes.copy_held(tape, (store,))

    def _take_as_written(self, others: list[tuple[Tensor, Store]]) -> None:
        """Counts arguments as written to while a graph is captured, when a comparison cannot wait for the device."""
        for tensor, store in others:
            if tensor.requires_grad and not is_kept_anyway(tensor):
                self.keep("got memory from outside of the region while a graph was captured")
                self._written[id(store)] = store

    def run(self, call: Callable[[], Any]) -> Any:
        hooks, release = top_saved_tensors_hooks(False), None
        try:
            if hooks is not None:
                pack, release = _packing(self, hooks[0])
                push_saved_tensors_hooks(pack, hooks[1])
            try:
                out = call()
            finally:
                if hooks is not None:
                    pop_saved_tensors_hooks()
            self._finish(out)
        except BaseException:
            if not self._is_settled:  # the function may have written to arguments
                self.keep("raised")
                self._settle()
            raise
        finally:
            if release is not None:
                release()
        return out

    def pack(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> Any:
        if not self._is_settled:
            self._settle()
        self._note(tensor, True, self._num_saved)
        self._num_saved += 1
        tape = self._tape
        tape.is_of_function = True
        try:
            packed = _pack_saved(pack, tensor)
        finally:
            tape.is_of_function = False
        if type(packed) is TapeHandle:
            packed.__class__ = FunctionTapeHandle
        return packed

    def _look_at_others(self, tensor: Tensor, store: Store) -> None:
        """Notes the contents of other kept tensors in the storage, to which a kernel may write as well."""
        for reference in store.held or ():
            value = reference()
            held = None if value is None else value.saved
            if type(held) is HeldOnHost:
                held.copy({})  # a kernel would write while the copy to the host reads
            saved = None if held is None else held.tensor
            if saved is not None and not writes.are_one_place(tensor, saved) and is_compared(saved, store):
                self._looked.append((saved, store, image_of(saved)))

    def _look_at_held(self, store: Store) -> None:
        """Keeps the results of a write to memory that a policy kept after an earlier write: no replay could repeat both."""
        if store.written and any(holder() is not None for holder in store.held or ()):
            self.keep("writes to memory which a policy kept and which was written to before")

    def _put_copies(self, store: Store) -> None:
        if store.held is not None:
            copies = [(tensor, copy_from(image, tensor)) for tensor, looked, image in self._looked if looked is store]
            writes.put_copies(store, copies, self._facts.name, self._tape.path)

    def _finish(self, out: Any) -> None:
        if not self._is_settled:
            self._settle()
        for place, tensor in enumerate(out if isinstance(out, tuple) else (out,)):
            if isinstance(tensor, Tensor):
                self._note(tensor, False, place)
        if self._decisions or self._keeps or not self._made:
            self._tape.cut(self._op, self._made)

    def _settle(self) -> None:
        """Determines the memory that the function wrote to, after its forward."""
        self._is_settled = True
        tape, op, facts, written = self._tape, self._op, self._facts, self._written
        bumped = []
        for tensor, version, value in zip(self._tensors, self._versions, op.args, strict=True):
            if version is not None and version != tensor._version:
                bumped.append(counter_of(tape.tables, tensor))
                written[id(value.store)] = value.store
        for tensor, store, image in self._looked:
            if id(store) not in written:
                differing = differs(tensor, image)
                if isinstance(differing, Tensor):
                    tape.unseen.append((differing, facts.name))
                elif differing:
                    written[id(store)] = store
                    if not store.external:
                        self._look_at_held(store)
        foreign = {key: store for key, store in written.items() if not self._is_inside(store)}
        for store in foreign.values():
            self._lend(store, is_seen=False)
        facts.lent = [*self._lent.values()]
        if facts.objects and self.reason is None and not facts.are_as_noted():
            self.keep("changes an object among its arguments")
        if self.reason is not None:
            self._let_go(written.values(), bumped)
            return
        if foreign:
            self._let_go(foreign.values(), bumped)
            written = {key: store for key, store in written.items() if key not in foreign}
        op.surroundings = tape.surroundings
        tape.tables.number = op.number = tape.tables.number + 1
        if self._draws and any(state is not None for state in self._draws):
            op.draw = tuple(self._draws)
        if self._sources is not None and has_moved(self._sources, read_sources()):
            facts.sources = self._sources
        if written:
            facts.written = tuple(
                [_written_at(position) for position, value in enumerate(op.args) if id(value.store) in written]
            )
            for store in written.values():
                self._put_copies(store)
                self._made += writes.after_inside(tape, op, store, bumped, SAVE if self._keeps else RECOMPUTE)

    def _let_go(self, stores: Collection[Store], bumped: list[object]) -> None:
        """Takes written memory off the tape, as after an operator with unknown effects."""
        tape, name = self._tape, self._facts.name
        quiet = writes.look_at_handles(tape, stores, bumped, name, self._tensors)
        for store in stores:
            self._put_copies(store)
            if self.reason is not None:
                tape.tables.make_external(store, self.reason)
        writes.after_external(tape, stores, quiet)

    def _note(self, tensor: Tensor, is_saved: bool, place: int) -> None:
        """Puts a result on the tape, unless it is there."""
        tape, tables = self._tape, self._tape.tables
        address, is_born = storage_of(tensor), False
        if address in self._born and self.reason is None and type(tensor) in PLAIN_OR_FAKE:
            known, is_born = tables.known.get(id(tensor)), True
        else:
            known = tables.value_now(tensor)
        if known is not None and known.store.address == (address or 0):
            return
        store = self._stores.get(address)
        is_lent = store is not None and id(store) in self._lent
        if not is_born and (self.reason is not None or store is None or is_lent or type(tensor) not in PLAIN_OR_FAKE):
            on_tape = tables.stores.get(address or 0)
            if on_tape is None or on_tape.external or not on_tape.is_alive():  # else the tape has values in this memory
                reason = self.reason or f"from {self._facts.name}, in memory that no operator in the function made"
                tape.note_external(tensor, reason)
            return
        tables.number = number = tables.number + 1
        if store is None:
            assert address is not None
            store = self._stores[address] = tables.stores[address] = new_store(address, number)
        value = new_value(number, store, counter_in(tables, store, tensor) if store.members else store, self._op)
        tables.register(tensor, value)
        self._facts.results.append((number, is_saved, place, tensor.shape, tensor.dtype))
        self._made.append(value)
        decision = SAVE if self._keeps else self._decisions.get(address, RECOMPUTE) if address in self._born else RECOMPUTE
        if decision != RECOMPUTE:
            tape.keep(value, tensor, decision, Cause(Reason.POLICY, f"as a result of {self._facts.name}"))
