"""Words for errors: the name of a tensor, and the operator which saved the tensor. Never on a path without an error."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

from ckpt_hooks._core.descriptions import RegionPath
from ckpt_hooks._torch.autograd import current_node
from ckpt_hooks._torch.tensors import storage_of
from ckpt_hooks.errors import CheckpointError, DeterminismError

from .handles import FIRST, HandleFrame
from .state.reached_values import walk_from

__all__ = ["SEE_MORE", "blame", "draws_error", "grad_fn_of", "name_of_tensor", "node_of", "uninitialized"]


def draws_error(region: tuple[str, ...]) -> DeterminismError:
    """Returns the error for a rerun which drew other random numbers than forward did."""
    return DeterminismError(
        f"region {'/'.join(region)!r}: the recompute has drawn other random numbers than forward had drawn by then, so a "
        "dropout mask, say, is another one. Usual causes: a random table which forward made and keeps (functools.lru_cache, a "
        "global dict); another thread that draws. Make the table before the region.",
        region=region,
        index=-1,
        expected="the random numbers of forward",
        found="others",
    )


def name_of_tensor(tensor: torch.Tensor, function: Any, default: str = "a tensor that the function reaches") -> str:
    """Returns the name of a tensor, or of a view of it, in a function's code: a variable, a parameter, a buffer."""
    named, storage = list(_named_tensors(function)), storage_of(tensor)
    found = [name for name, value in named if value is tensor]
    found += [name for name, value in named if storage is not None and storage_of(value) == storage]
    return next(iter(found), default)


def _named_tensors(function: Any) -> Iterator[tuple[str, torch.Tensor]]:
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, closure or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if isinstance(value, torch.Tensor):
                yield f"the variable {name!r}", value
            elif isinstance(value, (list, tuple)):
                for index, entry in enumerate(value):
                    if isinstance(entry, torch.Tensor):
                        yield f"the entry {name}[{index}]", entry
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, torch.Tensor):
                yield f"the global {name!r}", value
    for module in walk_from(function).modules:
        kind = type(module).__name__
        for name, value in module.named_parameters(remove_duplicate=False):
            yield f"the parameter {name!r} of {kind}", value
        for name, value in module.named_buffers(remove_duplicate=False):
            yield f"the buffer {name!r} of {kind}", value
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"the attribute {name!r} of {kind}", value


def _nodes() -> Iterator[Any]:
    """Yields the nodes of the graph below this thread's running node, the running node first."""
    todo, seen = [current_node()], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [below for below, _ in node.next_functions]


def _packed_by(node: Any) -> Iterator[Any]:
    """Yields the results of pack hooks saved by a node."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(node, name)
            except (AttributeError, RuntimeError):  # freed already
                continue
            for one in saved if isinstance(saved, (list, tuple)) else (saved,):
                try:
                    yield one.data
                except (AttributeError, RuntimeError):
                    continue


def node_of(frame: HandleFrame, index: int) -> Any:
    """Returns the autograd node which saved a tensor; None if the node is not below this thread's running node.

    Args:
        frame: The region, recomputed on the thread of the backward that asked for the recompute.
        index: The number of the tensor.
    """
    for node in _nodes():
        for packed in _packed_by(node):
            if isinstance(packed, tuple) and len(packed) == 2 and packed[0] is frame and packed[1] == FIRST + index:
                return node
    return None


def grad_fn_of(frame: HandleFrame, index: int) -> str | None:
    """Returns the name of the autograd node which saved a tensor; see :func:`node_of`."""
    node = node_of(frame, index)
    return None if node is None else str(node.name())


def changed_requires_grad(
    error: DeterminismError,
    path: RegionPath,
    function: Any,
    required: Collection[int],
) -> str:
    """Returns sentences on leaves that required grad in the forward of a region, and do not now, or the other way round.

    Only those are named that explain the error: more of them save more tensors, and fewer save fewer.

    Args:
        error: What was found.
        path: The region.
        function: The function.
        required: Those tensors that are known to have required grad when forward began, by the ``id`` of each.
    """
    frozen: dict[int, torch.Tensor] = {}
    known = set(required)
    for node in _nodes():
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            known.add(id(leaf))
            if not leaf.requires_grad:
                frozen[id(leaf)] = leaf
        for packed in _packed_by(node):
            if (
                isinstance(packed, list)
                and len(packed) == 3
                and packed[2] == path
                and not (packed[0].requires_grad or packed[0].is_nested)
            ):
                frozen[id(packed[0])] = packed[0]
    lines = [
        f"In forward, {name_of_tensor(leaf, function, 'a leaf')} had requires_grad=True, and it has False now."
        for leaf in frozen.values()
        if error._has_more is not True
    ]
    lines += [
        f"In forward, {name} had requires_grad=False, and it has True now."
        for name, leaf in _named_tensors(function)
        if error._has_more is not False and leaf.is_leaf and leaf.requires_grad and id(leaf) not in known
    ]
    return " ".join([*lines, "Change requires_grad after backward."] if lines else lines)


def blame(
    error: DeterminismError,
    frame: HandleFrame,
    function: Any,
    required: Collection[int],
    *,
    is_debugged: bool,
) -> None:
    """Lets an error say more: which operator saved the tensor, what may be the cause, and how to see more.

    Args:
        error: What a recompute raised.
        frame: The region.
        function: The function.
        required: Those tensors that are known to have required grad when forward began, by the ``id`` of each.
        is_debugged: Whether both runs are logged.
    """
    error.grad_fn = grad_fn_of(frame, error.index)
    parts = [str(error), changed_requires_grad(error, frame.path, function, required)]
    if error.grad_fn is not None:
        parts.append(f"The tensor at position {error.index} was saved by {error.grad_fn}.")
    if _is_compiled(frame, function):
        parts.append(_COMPILED)
    if not is_debugged:
        parts.append(SEE_MORE)
    error.args = (" ".join(filter(None, parts)).replace("\n ", "\n"),)


SEE_MORE = "Pass `debug=True` to see the operators of both runs."
#: On functions with a compiled function inside.
_COMPILED = (
    "The region runs a function compiled by torch.compile. What such a function saves is the compiler's choice, and the "
    "recompute may have run another graph than forward: one compiled since for other shapes or numbers, or none at all "
    "(torch.compiler.set_stance). Apply torch.compile to the function that has the region in it, write `with "
    "checkpoint_region():`, which runs Python once, or have one graph for all calls (torch._dynamo.mark_dynamic, tensors in "
    "place of numbers)."
)


def _is_compiled(frame: HandleFrame, function: Any) -> bool:
    """Whether compiled code ran in a region: it saved a tensor, or the function names compiled functions or modules."""
    for node in _nodes():
        # By name: AOTAutograd makes a class anew for each compiled function.
        if "CompiledFunction" in node.name() and any(
            isinstance(packed, tuple) and len(packed) == 2 and packed[0] is frame for packed in _packed_by(node)
        ):
            return True
    code, named = getattr(function, "__code__", None), [function]
    if code is not None:
        named += [function.__globals__.get(name) for name in code.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                named.append(cell.cell_contents)
    return any(hasattr(one, "_torchdynamo_orig_callable") for one in named) or any(
        module._compiled_call_impl is not None for module in walk_from(function).modules
    )


def uninitialized(region: tuple[str, ...]) -> CheckpointError:
    """Returns the error for a region with contexts to enter, whose lazy modules have not run yet."""
    return CheckpointError(
        f"region {'/'.join(region)!r} has a policy, a context_fn or debug=True, and reaches lazy modules whose parameters are "
        "not made yet. Run the model once before its first step, as torch advises for such modules.",
        region=region,
    )
