"""Private parts of autograd: hooks, graph tasks, and nodes with their saved tensors, read without running anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from .tensors import run_past_modes

Hook = Callable[[Any], Any]
Hooks = tuple[Hook, Hook]

# Pushing the pair of hooks directly costs 0.1 us; ``torch.autograd.graph.saved_tensors_hooks``, the public form, builds an
# object and enters it, and does nothing else. Remove once the public way is as quick.
push_saved_tensors_hooks: Callable[[Hook, Hook], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

# The innermost pair of saved-tensor hooks (a parent region's or the user's), or None. The argument: whether to return hooks
# during a trace too. There is no public way to ask whether hooks are active.
top_saved_tensors_hooks: Callable[[bool], Hooks | None] = torch._C._autograd._top_saved_tensors_default_hooks

# Which ``backward`` is running on this thread: a number that is never used twice, or -1 outside of ``backward``.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# The node that ``backward`` is running on this thread, or None.
current_node: Callable[[], Any] = torch._C._current_autograd_node

_ENGINE = torch.autograd.graph._engine_run_backward.__code__


def is_called_by_engine(frame: FrameType | None) -> bool:
    """Whether a frame runs the engine of autograd: a call from this frame comes from C++ of the engine or of a node."""
    return frame is not None and frame.f_code is _ENGINE


# Runs a callable when the backward of this thread ends, and owns the callable until then. A backward that fails drops the
# callable, and with it the recomputed values. FSDP and DDP rely on the same call. Torch 2.15 made it public: remove the
# engine's private call when torch 2.14 is no longer supported.
queue_callback: Callable[[Callable[[], None]], None] = getattr(
    torch.autograd.graph, "queue_callback", torch.autograd.Variable._execution_engine.queue_callback
)

# Whether the graph task that is running keeps its graph (``retain_graph=True``).
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# The ``GraphExecGroup`` that this thread is in. Torch's groups and this package's groups use the same slot, so that regions of
# either see both.
graph_exec_group: Callable[[], object | None] = torch._C._get_graph_exec_group
set_graph_exec_group: Callable[[Any], None] = torch._C._set_graph_exec_group

# The number that the next autograd node created on this thread will get. Tensors that an operator saves are packed after its
# node was made and before the next one's, so equal numbers mean the same operator.
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The sequence number of a node, given by its thread.
node_number: Callable[[Any], int] = lambda node: node._sequence_nr()  # noqa: E731

# ``torch.set_grad_enabled`` without building its context manager. Remove once the public way is as quick.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


class SavedTensor(Protocol):
    """A tensor saved by autograd, by way of the saved-tensor hooks active at the time."""

    def unpack(self) -> torch.Tensor: ...


class _SaveInput(torch.autograd.Function):
    """Saves its second argument for a backward which never runs; the first argument makes autograd build a node."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return run_past_modes(functools.partial(torch.empty, 0, device=anchor.device))


class NodeSavedTensor:
    """:class:`SavedTensor` for torch 2.11, where an autograd node has to save the tensor."""

    __slots__ = ("output",)

    def __init__(self, tensor: torch.Tensor) -> None:
        anchor = run_past_modes(functools.partial(torch.empty, 0, requires_grad=True, device="cpu"))
        # The output owns the node: the Python object of a node does not keep the tensors that the node saved.
        self.output: Any = _SaveInput.apply(anchor, tensor)  # type: ignore[no-untyped-call]

    def unpack(self) -> torch.Tensor:
        tensor: torch.Tensor = self.output.grad_fn.saved_tensors[0]
        return tensor


# 2.12 added a way to make a ``SavedTensor`` from Python. Remove ``NodeSavedTensor`` with torch 2.11.
save_tensor: Callable[[torch.Tensor], SavedTensor] = (
    (lambda tensor: torch._C._autograd._make_saved_tensor(tensor, False))
    if hasattr(torch._C._autograd, "_make_saved_tensor")
    else NodeSavedTensor
)


def has_tangent(tensor: torch.Tensor) -> bool:
    # Mostly there is no dual level, and no need to unpack. Remove once torch has a public way to ask whether there is a level.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


# The classes of saved tensors, which have the packed object as ``data``. Remove once torch has a public way to list the
# tensors that a node saved, without the unpack hooks.
SAVED_TENSORS: tuple[type, ...] = (torch._C._autograd.SavedTensor, NodeSavedTensor)

_functions: Any = torch._C._functions
#: The classes of the nodes of casts, and of the nodes which accumulate the gradients of leaves.
CAST_NODE, LEAF_NODE = _functions.ToCopyBackward0, _functions.AccumulateGrad

# The attributes which hold saved tensors, by the class of nodes; each operator has a class.
_fields: dict[type, tuple[str, ...]] = {}


def saved_in(node: Any) -> Sequence[Any]:
    """Returns the saved tensors of a node; none for a node whose backward has freed them."""
    # Handwritten C++ nodes, such as nodes of extensions, do not expose saved tensors, nor does the node in ``CopySlices``.
    kind = type(node)
    fields = _fields.get(kind)
    if fields is None and issubclass(kind, torch.autograd.function.BackwardCFunction):
        fields = ("_raw_saved_tensors",)  # not cached: the cache would keep the class of a custom function alive
    elif fields is None:
        fields = _fields[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    tensors: list[Any] = []
    for field in fields:
        try:
            saved = getattr(node, field)
        except RuntimeError:  # freed by a backward
            continue
        if isinstance(saved, (list, tuple)):
            tensors += saved
        elif saved is not None:
            tensors.append(saved)
    return tensors


def packed_of(saved: Any) -> Any:
    """Returns the tensor itself, or the result of the pack hook; None for a tensor that is undefined, or freed."""
    if type(saved) is NodeSavedTensor:
        (saved,) = saved_in(saved.output.grad_fn)
    try:
        return saved.data
    except RuntimeError:  # freed by a backward
        return None


def is_packed(saved: Any) -> bool:
    return type(saved) is NodeSavedTensor or saved.unpack_hook is not None


def nodes_below(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields nodes and the nodes below them, each once; passes over None, the node of a tensor without history."""
    todo, seen = [*nodes], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [below for below, _ in node.next_functions]


def ctx_attributes(node: Any) -> dict[str, Any]:
    """Returns the attributes on a custom function's ``ctx``; none for other nodes."""
    return getattr(node, "__dict__", {})
