"""Steps on fake tensors, which take no memory, as rows like the profiler's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckpt_hooks._ambient.streams import CPU
from ckpt_hooks._core.tensor_numbers import dry_births
from ckpt_hooks._torch.autograd import current_node, node_number, sequence_number
from ckpt_hooks._torch.dry import DryMode
from ckpt_hooks.report.entries import NOWHERE, Origin
from ckpt_hooks.report.ledger.rows import LINE, Mark, Marks, Row, source

from .restoring import trainers_of
from .temporaries import temporary_of


class _Recording(Marks):
    """What runs in a block, as rows from fake tensors."""

    def __init__(self, mode: DryMode) -> None:
        super().__init__()
        self.marks, self._mode = self, mode
        self._rows: list[Row] = []
        self._differentiable: set[int] = set()
        self._line: str | None = None
        self._optimizer: str | None = None
        self._number, self._node, self._total = 0, -1, 0
        self._hooks: list[Any] = []
        self._read = CPU.read

    def range_of(self, event: str, *args: Any) -> Any:
        if event == LINE:
            return self._at_line(*args)
        mark = Mark(event, args, sequence_number())
        self._rows.append(Row(len(self._rows), self._place(), mark))
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _at_line(self, line: str) -> Iterator[None]:
        around, self._line = self._line, line
        try:
            yield
        finally:
            self._line = around

    def __enter__(self) -> None:
        self._mode.tell = self._changed

        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._optimizer = f"{type(optimizer).__name__}.step"

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._optimizer = None

        def read() -> torch.Tensor:
            state: torch.Tensor = self._read()
            self._mode.begin(state)
            return state

        CPU.read = read
        self._hooks = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
        self._mode.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._mode.__exit__(*exc_info)
        self._mode.tell, CPU.read = None, self._read
        for hook in self._hooks:
            hook.remove()

    def rows(self) -> tuple[list[Row], set[int]]:
        """Returns the rows of the block that has ended, and the runs of operators which made a node of autograd."""
        return self._rows, self._differentiable

    def _place(self) -> Origin:
        node = current_node()
        return NOWHERE._replace(
            node=None if node is None else node.name().rpartition("::")[2], optimizer=self._optimizer, line=self._line
        )

    def _changed(self, address: int, nbytes: int, device: torch.device) -> None:
        self._total += nbytes
        node = current_node()
        if node is not None and 0 <= (number := node_number(node)) < 2**62:  # an accumulation of a gradient has none
            self._node = number
        run = self._mode.run
        if run.made_node:
            self._differentiable.add(run.number)
        place = self._place()._replace(operator=run.name)
        self._rows.append(
            Row(len(self._rows), place, None, address, nbytes, device, self._total, run.number, self._node if node else -1)
        )


@contextlib.contextmanager
def dry(model: Module) -> Iterator[None]:
    """Makes steps in a block run on fake tensors; afterwards all is as before."""
    mode = DryMode(temporary_of)
    before = source.set(lambda: _Recording(mode)), dry_births.set(mode.begin)
    try:
        with _with_memory(model, mode):
            yield
    finally:
        mode.put_back()
        dry_births.reset(before[1])
        source.reset(before[0])


@contextlib.contextmanager
def _with_memory(model: Module, mode: DryMode) -> Iterator[None]:
    """Exchanges parameters and buffers of the meta device, for which autograd wants gradients on that device."""
    fakes: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_meta:
            fake, is_parameter = mode.fake(tensor), isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    tables: list[dict[str, Any]] = [table for one in model.modules() for table in (one._parameters, one._buffers)]
    before = [({**table}, table) for table in tables]
    optimizers = [one for one in trainers_of(model) if isinstance(one, Optimizer)] if fakes else []
    groups = [(group, group["params"]) for one in optimizers for group in one.param_groups]
    try:
        for table in tables:
            table.update((name, fakes[id(one)]) for name, one in table.items() if id(one) in fakes)
        for group, params in groups:
            group["params"] = [fakes.get(id(one), one) for one in params]
        yield
    finally:
        for entries, table in before:
            table.update(entries)
        for group, params in groups:
            group["params"] = params
