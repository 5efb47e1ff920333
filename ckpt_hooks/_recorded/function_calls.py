"""The recording of one call of a custom autograd function: its arguments, its results, and what it wrote to.

Kernels launched by pointer write unseen, so each call follows one rule, whatever the function is made of. It is taken to write
to its arguments which require grad, are no leaves, and were made in the innermost region: a replay then runs it before anybody
reads these again, which costs nothing where nothing was written. Memory from outside of the region, and arguments without
gradients, are compared before and after. A write to memory from outside could not be repeated, so the results are kept
instead; so are results of a function which does what no replay should do again.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch

from ckpt_hooks._ambient import autocast, function_modes, rng
from ckpt_hooks._ambient.draws import drops_nothing
from ckpt_hooks._ambient.streams import find_devices, is_capturing, is_same_state
from ckpt_hooks._ambient.tracking import TRACKED
from ckpt_hooks._core.modes import count_writes
from ckpt_hooks._core.threads import is_concurrent
from ckpt_hooks._operators.facts import OpFacts, Written
from ckpt_hooks._operators.noted_draws import draw_noting
from ckpt_hooks._tensors.containers import Capture
from ckpt_hooks._tensors.copies import PLAIN_OR_FAKE, copy_of, differs, is_dense, same_bits
from ckpt_hooks._tensors.walk import instances_in
from ckpt_hooks._torch import (
    FAKE,
    graph_task_id,
    is_any_autocast_enabled,
    is_freed,
    is_kept_anyway,
    num_function_modes,
    storage_of,
)
from ckpt_hooks._torch.functions import APPLY_CODE
from ckpt_hooks.policies.decisions import RECOMPUTE

from . import writes
from .aliases import counter_in, counter_of
from .calls import decide
from .function_ops import FunctionFacts
from .replayed import FunctionHandle, Handle
from .tape import Tape
from .values import ANEW, Op, Store, Value, cut, new_store, new_value

__all__ = ["FunctionCall"]

_Tensor = torch.Tensor
_LIFT_FRESH = torch.ops.aten.lift_fresh.default

#: The size in bytes up to which weights, tables and other arguments from outside which have no history are compared: a copy and a
#: comparison of so many bytes take a tenth of a millisecond. Kernels do not write to weights.
MOST_COMPARED = 1 << 20


class FunctionCall:
    """One call of a custom function in a region.

    Attributes:
        reason: The reason to keep the results; None where a replay may run the function again.
    """

    def __init__(self, tape: Tape, function: Any, args: Any, kwargs: Any) -> None:
        """Looks at the arguments, before the call.

        Args:
            tape: The tape of the region.
            function: The function's class.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        self._tape, self._task = tape, graph_task_id()
        self.reason: str | None = None
        capture = Capture()
        arguments = tuple([capture.value(one, "") for one in args]), {key: capture.value(kwargs[key], "") for key in kwargs}
        capture.finish()
        self._tensors = capture.tensors
        self._facts = facts = FunctionFacts(function, arguments, self._tensors)
        facts.needs_input_grad = tuple([isinstance(one, _Tensor) and one.requires_grad for one in (*args, *kwargs.values())])
        facts.casts = autocast.capture() if is_any_autocast_enabled() else None
        facts.modes = function_modes.capture() if num_function_modes() else None
        facts.context = copy_context()
        facts.fake_mode = next((tensor.fake_mode for tensor in self._tensors if type(tensor) is FAKE), None)
        if not all(map(is_dense, self._tensors)) or any(tensor.is_inference() for tensor in self._tensors):
            self._keep("has a tensor of another class among its arguments")
        elif not all(map(_is_plain, capture.objects)):
            self._keep("has an object among its arguments, which it may change")
        self._op = Op()
        self._draws: list[Any] = []
        self._is_settled = False
        self._num_saved = 0
        self._made: list[Value] = []
        self._born: set[int | None] = set()  # addresses of storages made in the function
        self._stores: dict[int | None, Store] = {}  # storages of arguments, by address
        self._written: dict[int, Store] = {}
        self._looked: list[tuple[_Tensor, Store, _Tensor]] = []  # arguments to compare, their storages, and copies
        self._kept: dict[int | None, int] = {}  # decisions of the policy on results of operators inside, by address
        self._look_at_arguments()
        self._streams = rng.capture() if TRACKED or (find_devices() and not self._is_capturing) else None

    def _keep(self, reason: str) -> None:
        """Has the results kept, unless they are already."""
        if self.reason is None:
            self.reason = f"from {self._facts.name}, which {reason}"

    def _is_inside(self, store: Store) -> bool:
        """Whether memory was made in the innermost region, so that a replay of the region alone may write to it."""
        return not store.external and store.birth > self._tape.start

    def _look_at_arguments(self) -> None:
        """Puts the arguments on the tape, and copies those to be compared."""
        tape, op, get = self._tape, self._op, self._tape.tables.known.get
        values = []
        for tensor in self._tensors:
            value = get(id(tensor))
            if value is None or storage_of(tensor) != value.store.address:
                value = tape.value_of(tensor, None)
            values.append(value)
            self._stores[storage_of(tensor)] = value.store
        self._versions = [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]
        types_of_devices = {tensor.device.type for tensor in self._tensors}
        self._is_capturing = any(kind not in ("cpu", "meta") and is_capturing(kind) for kind in types_of_devices)
        op.facts, op.args, op.kwargs, op.present = self._facts, [*values], {}, tuple(range(len(values)))
        op.is_plain, op.draw = False, None
        for tensor, value in zip(self._tensors, values, strict=True):
            store, has_history = value.store, tensor.requires_grad and not is_kept_anyway(tensor)
            if has_history and self._is_capturing and not self._is_inside(store):
                self._keep("got memory from outside of the region while a graph is captured, where nothing can be compared")
            if has_history and (self._is_capturing or (self._is_inside(store) and (self.reason is None or not tensor.is_cpu))):
                self._written[id(store)] = store
        for tensor, value in zip(self._tensors, values, strict=True):
            if id(value.store) not in self._written and self._is_compared(tensor, value.store):
                self._looked.append((tensor, value.store, copy_of(tensor)))
        for store in self._written.values():
            if store.written and any(holder() is not None for holder in store.held or ()):
                self._keep("writes to memory which a policy kept and which was written to before")
        writes.copy_held(tape, self._written.values())

    def _is_compared(self, tensor: _Tensor, store: Store) -> bool:
        if self._is_capturing or not is_dense(tensor) or type(tensor) is FAKE or tensor.is_meta or is_freed(tensor):
            return False
        is_weight = store.external and (not tensor.requires_grad or is_kept_anyway(tensor))
        return tensor.numel() > 0 and not tensor.is_inference() and not (is_weight and tensor.nbytes > MOST_COMPARED)

    # While the function runs

    def run_operator(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, record: Callable[..., Any]) -> Any:
        """Runs an operator of the function.

        Args:
            func: The operator.
            facts: Its facts.
            args: Positional arguments.
            kwargs: Keyword arguments.
            record: Runs and records an operator as one outside of functions.
        """
        tape, born = self._tape, self._born
        if self.reason is None:
            self._look_at(func, facts, args, kwargs)
        if facts.is_opaque or ((facts.written or facts.is_inplace_view) and self._is_foreign(facts, args, kwargs)):
            return record(func, facts, args, kwargs)
        if not facts.is_random or self._task != graph_task_id() or drops_nothing(func, args, kwargs):
            out = facts.call(*args, **kwargs)
        elif tape.draws_anew:
            out = facts.call(*args, **kwargs)
            self._op.draw = ANEW
        else:
            out, state = draw_noting(func, args, kwargs, shared=is_concurrent(tape.thread))
            self._draws.append(state)
        if facts.written:
            count_writes(func, args)
        made = (out,) if type(out) is _Tensor else instances_in(out, _Tensor)
        decision = RECOMPUTE
        if tape.decisions is not None and not facts.is_view:
            decision = decide(tape, facts, args, kwargs, out)
        for tensor in made:
            address = storage_of(tensor)
            if not facts.is_view and address not in self._stores:
                born.add(address)
                if decision != RECOMPUTE:
                    self._kept[address] = decision
                elif not facts.written:
                    self._kept.pop(address, None)
        return out

    def _look_at(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> None:
        """Looks for a reason to keep the results."""
        if facts.is_opaque or facts.is_collective or facts.has_effect:
            self._keep(f"runs {facts.full_name}")
        elif self._task != graph_task_id():
            self._keep("runs a backward")
        elif torch.is_grad_enabled():
            self._keep("records a graph of its own")
        elif func is _LIFT_FRESH:
            self._born.add(storage_of(args[0]))
        else:
            for position in facts.tensors[len(args)]:
                tensor = args[position]
                if isinstance(tensor, _Tensor):
                    self._look_at_read(tensor)
            if facts.lists or kwargs:
                lists = [args[position] for position in facts.lists if position < len(args)]
                for tensor in instances_in((lists, kwargs), _Tensor):
                    self._look_at_read(tensor)

    def _look_at_read(self, tensor: _Tensor) -> None:
        address = storage_of(tensor)
        if address not in self._born and address not in self._stores and address is not None:
            self._keep("reads a tensor which is not among its arguments, or which no operator made")

    def _is_foreign(self, facts: OpFacts, args: Any, kwargs: Any) -> bool:
        """Whether an operator writes to anything besides memory of the function's own; notes a write to an argument."""
        targets = [args[0]] if facts.is_inplace_view else [tensor for tensor, _ in writes.targets_of(facts, args, kwargs)]
        for target in targets:
            address = storage_of(target)
            store = self._stores.get(address)
            if store is None:
                if address in self._born:
                    continue
                self._keep("writes to a tensor which is not among its arguments")
            elif facts.is_inplace_view or facts.replaces_storage:
                self._keep("gives an argument another shape")
            elif not self._is_inside(store):
                self._keep("writes to memory from outside of the region")
            else:
                if id(store) not in self._written:
                    writes.copy_held(self._tape, [store])
                    self._written[id(store)] = store
                continue
            return True
        return False

    # When it has run

    def packing(self, pack: Callable[[_Tensor], Any]) -> tuple[Callable[[_Tensor], Any], Callable[[], None]]:
        """Returns a pack hook for the call, and a function to empty it, since autograd keeps it with each saved tensor.

        Args:
            pack: The active pack hook.
        """
        call: FunctionCall | None = self

        def pack_own(tensor: _Tensor) -> Any:
            if call is None or sys._getframe(1).f_code is not APPLY_CODE:  # of an operator in the function
                return pack(tensor)
            return call._pack(tensor, pack)

        def release() -> None:
            nonlocal call, pack
            call = None
            del pack

        return pack_own, release

    def _pack(self, tensor: _Tensor, pack: Callable[[_Tensor], Any]) -> Any:
        """Packs a tensor which the function saved."""
        tape = self._tape
        self._settle()
        self._note(tensor, (True, self._num_saved))
        self._num_saved += 1
        tape.is_of_function = True
        try:
            packed = pack(tensor)
        finally:
            tape.is_of_function = False
        if type(packed) is Handle:
            packed.__class__ = FunctionHandle
        return packed

    def finish(self, out: Any) -> None:
        """Puts the results on the tape."""
        self._settle()
        for place, tensor in enumerate(out if isinstance(out, tuple) else (out,)):
            if isinstance(tensor, _Tensor):
                self._note(tensor, (False, place))
        if self.reason is None:
            cut(self._op, self._made)

    def fail(self) -> None:
        """Ends a call which raised, and may have written to some of its arguments."""
        self._keep("raised")
        self._settle()

    def _settle(self) -> None:
        """Finds what the function wrote to, once its forward has run."""
        if self._is_settled:
            return
        self._is_settled = True
        tape, op, facts = self._tape, self._op, self._facts
        bumped = []
        for tensor, version, value in zip(self._tensors, self._versions, op.args, strict=True):
            if not tensor.is_inference() and tensor._version != version:
                bumped.append(counter_of(tape.tables, tensor))
                self._written[id(value.store)] = value.store
        for tensor, store, copy in self._looked:
            if tensor.is_cpu:
                if not same_bits(tensor, copy):
                    self._written[id(store)] = store
            elif id(store) not in self._written:
                tape.unseen.append((differs(tensor, copy), facts.name))
        if any(not self._is_inside(store) for store in self._written.values()):
            self._keep("writes to memory from outside of the region")
        if self.reason is not None:
            self._let_go(bumped)
            return
        op.surroundings = tape.surroundings
        tape.tables.number = op.number = tape.tables.number + 1
        if any(state is not None for state in self._draws):
            op.draw = tuple(self._draws)
        if self._streams is not None and not is_concurrent(tape.thread) and _has_moved(self._streams, rng.capture()):
            facts.streams = (None, *self._streams[1:])
        facts.written = tuple(
            Written(position, "", counted=False, overwritten=False)
            for position, value in enumerate(op.args)
            if id(value.store) in self._written
        )
        for store in self._written.values():
            self._made += writes.after_inside(tape, op, store, bumped, RECOMPUTE)

    def _let_go(self, bumped: list[object]) -> None:
        """Takes written memory off the tape, as after an operator with unknown effects."""
        tape, stores = self._tape, self._written.values()
        assert self.reason is not None
        quiet = writes.look_at_handles(tape, stores, bumped, self._facts.full_name, self._tensors)
        for store in stores:
            copies = [(tensor, copy) for tensor, looked, copy in self._looked if looked is store]
            writes.put_copies(store, copies, self._facts.full_name, tape.path)
            tape.tables.make_external(store, self.reason)
        writes.after_external(tape, stores, quiet)

    def _note(self, tensor: _Tensor, slot: tuple[bool, int]) -> None:
        """Puts a result on the tape, unless it is there."""
        tape, tables, address = self._tape, self._tape.tables, storage_of(tensor)
        known = tables.value_now(tensor)
        if known is not None and known.store.address == (address or 0):
            return
        store = None if address is None else tables.stores.get(address)
        if store is not None and not store.is_alive():
            store = None
        if self.reason is not None:
            if store is None or store.external:  # other memory on the tape has other faces there
                tape.note_external(tensor, self.reason)
            return
        if type(tensor) not in PLAIN_OR_FAKE or address is None or (address not in self._born and address not in self._stores):
            tape.note_external(tensor, f"from {self._facts.name}, in memory which no operator of it made")
            return
        tables.number = number = tables.number + 1
        if store is None:
            store = tables.stores[address] = new_store(address, number)
        value = new_value(number, store, counter_in(tables, store, tensor) if store.members else store, self._op)
        tables.register(tensor, value)
        self._facts.note(number, slot, tensor)
        self._made.append(value)
        decision = self._kept.get(address, RECOMPUTE)
        if decision != RECOMPUTE and address in self._born:
            tape.held.keep(value, tensor, decision, tape.path, f"kept by the policy, as a result of {self._facts.name}")


def _is_plain(value: Any) -> bool:
    """Whether an argument is safe to hold for a rerun: a value without parts, or a function or class which is there anyway.

    An object with parts may lead to the graph, by ways which the garbage collector cannot see.
    """
    if isinstance(value, torch.Generator):
        return False
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    return isinstance(value, (type, types.BuiltinFunctionType)) or not gc.is_tracked(value)


def _has_moved(before: rng.Snapshot, after: rng.Snapshot) -> bool:
    """Whether a random stream other than the CPU's has moved."""
    return before[1] is not after[1] or any(
        not is_same_state(state, now) for (_, state), (_, now) in zip(before[2], after[2], strict=True)
    )
