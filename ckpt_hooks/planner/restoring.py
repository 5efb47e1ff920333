"""Runs a step and restores everything: tensors, optimizers, attributes, random sources; also on fake tensors."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt_hooks._ambient.random import all_sources, leave
from ckpt_hooks._core.call_sites import objects_of
from ckpt_hooks._core.descriptions import describe_tensor
from ckpt_hooks._state.containers import Content, Part, entries_of
from ckpt_hooks._state.places import same
from ckpt_hooks._tensors.nested import outer_tensors_in
from ckpt_hooks._torch.pytree import tree_map_only
from ckpt_hooks.errors import CheckpointError

#: The fake mode under which steps of a dry run run.
dry_mode: ContextVar[Any] = ContextVar("dry_mode", default=None)


@contextlib.contextmanager
def as_before(model: Module) -> Iterator[None]:
    """Restores a model at the end of a ``with`` statement, also after an exception."""
    gc.collect()  # garbage that is freed in a step would lower the step's peak
    with dry_mode.get() or contextlib.nullcontext():
        before = StateBeforeStep(model, trainers_of(model))
        try:
            yield
        finally:
            before.put_back()


class StateBeforeStep:
    """A copy of everything that a step may change: a model, its optimizers, schedulers and scalers, and random sources."""

    # Holds parameters, buffers, gradients, and attributes of modules and trainers: tensors, generators, arrays, and containers
    # at any depth, such as hooks. Optimizer state that the step makes is removed. Copies lie on the host. With ``is_late``,
    # only ``copy_for`` copies parameters and optimizer state.

    def __init__(self, model: Module, trainers: Sequence[Any], *, is_late: bool = False) -> None:
        self._contents = _TensorContents()
        for parameter in model.parameters():
            self._contents.add(parameter, is_late)
        for buffer in model.buffers():
            self._contents.add(buffer)
        self._flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._gradients = [
            (leaf, leaf.grad, None if leaf.grad is None else _HostCopy(leaf.grad)) for leaf in model.parameters()
        ]
        for trainer in trainers:  # learning rates may be tensors, to which schedulers write before any optimizer steps
            for name, value in [pair for group in getattr(trainer, "param_groups", ()) for pair in group.items()]:
                if name != "params":
                    self._contents.add(value)
        for owner in (*trainers, *model.modules()):
            self._contents.add(vars(owner), is_late and isinstance(owner, Optimizer))
        self._random = [(source, source.read()) for source in all_sources()]

    def copy_for(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Copies the tensors to which an optimizer is about to write: a hook of torch, called before each step."""
        tensors = outer_tensors_in(optimizer.param_groups) + state_of(optimizer)
        if self._contents.take(tensors):  # the optimizer trains the model
            self._contents.add(vars(optimizer))  # ``add`` skips optimizers from before the step

    def put_back(self) -> None:
        """Restores everything; raises a CheckpointError if a tensor was written to without a copy."""
        with torch.no_grad():
            lost = self._contents.put_back()
            for parameter, gradient, copied in self._gradients:
                parameter.grad = gradient
                if copied is not None:
                    copied.put_back()
            for parameter, requires_grad in self._flags:
                parameter.requires_grad_(requires_grad)
        leave(self._random)
        if lost:
            raise CheckpointError(
                f"The step failed, and had written to {describe_tensor(lost[0])}, a parameter or the state of an optimizer, "
                "outside of any `optimizer.step()`: this write cannot be undone. Load saved parameters and optimizer states, "
                "and move the write out of the guarded step."
            )


class _HostCopy:
    """The content of a tensor, on the host."""

    def __init__(self, tensor: torch.Tensor, is_late: bool = False) -> None:
        self.tensor, self._version = tensor, tensor._version
        self._data: torch.Tensor | None = None
        if not is_late and dry_mode.get() is None:  # nothing is written to real tensors in a dry run
            self.take()

    def take(self) -> None:
        if self._data is None and not self.is_written:
            self._data = self.tensor.detach().to("cpu", copy=True)

    @property
    def is_written(self) -> bool:
        return self.tensor._version != self._version

    @property
    def is_lost(self) -> bool:
        return self._data is None and self.is_written

    def put_back_if_written(self) -> None:
        """Writes the content back if the version counter has changed: each write breaks graphs that saved the tensor."""
        if self.is_written:
            self.put_back()

    def put_back(self) -> None:
        """Writes the content back unless it is equal: each write breaks graphs that saved the tensor."""
        if self._data is None:
            return
        is_dense = self._data.layout is torch.strided and type(self.tensor) in (torch.Tensor, torch.nn.Parameter)
        if is_dense and not self.is_written and torch.equal(self.tensor.detach().cpu(), self._data):
            return
        # Write to the tensor itself: the ``detach()`` of a sparse tensor has its own indices.
        self.tensor.copy_(self._data)
        if self._data.layout is torch.sparse_coo:  # ``copy_`` does not copy the flag of coalesced tensors
            self.tensor._coalesced_(self._data.is_coalesced())


class _TensorContents:
    """The contents of objects, and of objects inside, each once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no identity is used again
        self._undo: list[Callable[[], object]] = []
        self._late: dict[int, _HostCopy] = {}

    def add(self, value: Any, is_late: bool = False) -> None:
        todo, is_tensor = [value], isinstance(value, torch.Tensor)
        while todo:
            value = todo.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, torch.Tensor):
                if not (value.is_meta or value.is_inference()):
                    copy = _HostCopy(value, is_late)
                    if is_late:
                        self._late[id(value)] = copy
                    self._undo.append(copy.put_back if is_tensor or is_late else copy.put_back_if_written)
            elif isinstance(value, torch.Generator):
                self._undo.append(functools.partial(value.set_state, value.get_state()))
            elif (part := entries_of(type(value))) is not None:
                content = part.read(value, 0)
                self._undo.append(functools.partial(_put_back, part, value, content))
                todo += content.values() if type(content) is dict else content
            elif (numpy := sys.modules.get("numpy")) is not None:
                if isinstance(value, numpy.ndarray):
                    self._undo.append(functools.partial(numpy.copyto, value, value.copy()))
                elif isinstance(value, numpy.random.Generator):
                    bits = value.bit_generator
                    self._undo.append(functools.partial(setattr, bits, "state", bits.state))

    def take(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Copies the tensors that were left for later, and returns whether there were any."""
        copies = [self._late[id(tensor)] for tensor in tensors if id(tensor) in self._late]
        for late in copies:
            late.take()
        return bool(copies)

    def put_back(self) -> list[torch.Tensor]:
        lost = [copy.tensor for copy in self._late.values() if copy.is_lost]
        for undo in self._undo:
            undo()
        return lost


def _put_back(part: Part, value: Any, content: Content) -> None:
    current = part.read(value, 0)
    if not same(current, content):
        part.put(value, 0, current, content)


def trainers_of(model: Module) -> list[Any]:
    """Returns the optimizers in the process that have a parameter of a model, their schedulers, and gradient scalers."""
    parameters = {id(parameter) for parameter in model.parameters()}
    owners = objects_of(Optimizer, LRScheduler, torch.amp.GradScaler)
    optimizers = [
        owner
        for owner in owners
        if isinstance(owner, Optimizer)
        and any(id(parameter) in parameters for group in getattr(owner, "param_groups", ()) for parameter in group["params"])
    ]
    ids = {id(optimizer) for optimizer in optimizers}
    schedulers = [owner for owner in owners if isinstance(owner, LRScheduler) and id(getattr(owner, "optimizer", None)) in ids]
    return [*optimizers, *schedulers, *(owner for owner in owners if isinstance(owner, torch.amp.GradScaler))]


def state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the tensors in the state of an optimizer."""
    return outer_tensors_in([*optimizer.state.values()])


def optimizer_state(model: Module) -> dict[int, tuple[str, int]]:
    """Returns the classes of a model's optimizers, and the bytes of their states, by identity."""
    states = {}
    for trainer in trainers_of(model):
        if isinstance(trainer, Optimizer):
            states[id(trainer)] = type(trainer).__name__, sum(tensor.nbytes for tensor in state_of(trainer))
    return states


@contextlib.contextmanager
def dry(model: Module) -> Iterator[None]:
    """Runs steps in a ``with`` statement on fake tensors; a model's meta tensors are on the default device there."""
    from ckpt_hooks._torch.dry import DryMode  # loads a part of torch's compiler, which takes a second

    mode = DryMode()
    undo = [mode.end]
    token = dry_mode.set(mode)
    try:
        _exchange(model, mode.like, undo)
        yield
    finally:
        dry_mode.reset(token)
        for restore in reversed(undo):
            restore()


def _exchange(model: Module, like: Callable[[torch.Tensor], Any], undo: list[Callable[[], Any]]) -> None:
    """Replaces meta tensors in a model and its optimizers, and appends functions that restore them to ``undo``."""
    fakes: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in fakes:
            replacement = like(tensor)
            replacement = Parameter(replacement, tensor.requires_grad) if isinstance(tensor, Parameter) else replacement
            vars(replacement).update(vars(tensor))
            fakes[id(tensor)] = replacement
        return fakes[id(tensor)]

    optimizers = [trainer for trainer in trainers_of(model) if isinstance(trainer, Optimizer)]
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            undo.append(functools.partial(tensors.update, {**tensors}))
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            undo.append(functools.partial(group.update, {**group}))
            group["params"] = [*map(fake, group["params"])]
        undo.append(functools.partial(vars(optimizer).update, state=optimizer.state))
        state = {fake(key): tree_map_only(torch.Tensor, fake, values) for key, values in optimizer.state.items()}
        optimizer.state = collections.defaultdict(dict, state)
