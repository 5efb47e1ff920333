"""A custom function while its forward runs: the operators in it, of which a tape records none.

The operators tell what the function may have written to, which memory is its own, which numbers it drew, and whether it does
something that no replay should do again. A policy is asked about them as about any others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.modes import count_writes
from ckpt_hooks._operators.draws import draw_noting, drops_nothing
from ckpt_hooks._operators.facts import OpFacts
from ckpt_hooks._tensors.containers import instances_in
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.tensors import storage_address, storage_of
from ckpt_hooks.policies.decisions import RECOMPUTE

from . import writes
from .calls import decide
from .function_ops import FunctionFacts
from .tape import Tape
from .values import ANEW, Op, Store

_Tensor = torch.Tensor
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class RunningFunction:
    """The forward of one call."""

    reason: str | None = None  # the reason to keep the results; None where a replay may run the function again

    def __init__(self, tape: Tape, facts: FunctionFacts) -> None:
        self._tape, self._facts, self._task = tape, facts, graph_task_id()
        self._op = Op()
        self._draws: list[Any] = []
        self._born: set[int] = set()  # addresses of storages made in the function
        self._stores: dict[int | None, Store] = {}  # storages of arguments, by address
        self._written: dict[int, Store] = {}  # storages taken as written to, by identity
        self._decisions: dict[int, int] = {}  # of the policy, on results of operators inside, by address

    def keep(self, reason: str) -> None:
        """Has the results kept, unless they are already."""
        if self.reason is None:
            self.reason = f"from {self._facts.name}, which {reason}"

    def run_operator(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, record: Callable[..., Any]) -> Any:
        """Runs an operator of the function."""
        born, stores = self._born, self._stores
        if (
            facts.is_fast
            and not kwargs
            and self.reason is None
            and self._tape.decisions is None
            and not torch.is_grad_enabled()
        ):
            try:
                for position in facts.tensors[len(args)]:  # as in ``_look_at``, written out: a microsecond an operator
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
        for tensor in (out,) if type(out) is _Tensor else instances_in(out, _Tensor):
            address = storage_of(tensor) or 0
            if address and address not in stores:
                born.add(address)
                if decision != RECOMPUTE:
                    self._decisions[address] = decision
                elif self._decisions and (not facts.written or facts.replaces_storage):  # the address was of another storage
                    self._decisions.pop(address, None)
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
            out, state = draw_noting(func, args, kwargs)
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
            self._born.add(storage_of(args[0]) or 0)  # which the operator returns
        else:
            for position in facts.tensors[len(args)]:
                self._look_at_read(args[position])
            if facts.lists or (kwargs and not facts.keywords.isdisjoint(kwargs)):
                for tensor in instances_in(([args[at] for at in facts.lists if at < len(args)], kwargs), _Tensor):
                    self._look_at_read(tensor)

    def _look_at_read(self, tensor: Any) -> None:
        if isinstance(tensor, _Tensor):
            address = storage_of(tensor)
            if address not in self._born and address not in self._stores and address is not None:
                self.keep("reads a tensor which is not among its arguments, or which no operator made")

    def _is_foreign(self, facts: OpFacts, args: Any, kwargs: Any) -> bool:
        """Whether an operator writes to anything besides memory of the function's own; notes a write to an argument."""
        targets = [args[0]] if facts.is_inplace_view else [tensor for tensor, _ in writes.targets_of(facts, args, kwargs)]
        for target in targets:
            address = storage_of(target)
            store = self._stores.get(address)
            if store is None:
                if address in self._born:
                    continue
                self.keep("writes to a tensor which is not among its arguments")
            elif facts.is_inplace_view or facts.replaces_storage:
                self.keep("gives an argument another shape")
            elif not self._is_inside(store):
                self.keep("writes to memory from outside of the region")
            else:
                if id(store) not in self._written:
                    writes.copy_held(self._tape, [store])
                    self._written[id(store)] = store
                continue
            return True
        return False

    def _is_inside(self, store: Store) -> bool:
        """Whether the innermost region made a memory: a replay of the region alone may write there."""
        return not store.external and store.birth > self._tape.start
