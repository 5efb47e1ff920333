"""Recorded regions in functions that ``torch.compile`` traces.

Dynamo marks the nodes of a region's block with a number (``torch.fx.traceback.annotate``). AOTAutograd passes the marks to the
operators of the joint graph of forward and backward. There a pass, the config ``joint_custom_pass`` of functorch, tells the
partitioner which operators run again in backward, and which outputs the region's policy keeps. The partitioner keeps tensors
between regions, as for ``torch.utils.checkpoint``.

The key of the compile cache contains neither marks nor the pass. So the places of regions in the graph, with their policies,
go into the config ``cache_key_tag``. Both configs belong to the process. They are set when a region is traced, and reset when
that compilation ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import itertools
import operator
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.traceback import annotate, preserve_node_meta, set_current_meta
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch.compiling import at_end_of_compilation, num_traced_nodes, set_compile_configs, while_tracing
from ckpt_hooks._torch.functions import OPERATORS, OVERLOAD
from ckpt_hooks._torch.pytree import tree_map
from ckpt_hooks.policies.base import Policy, policy_from
from ckpt_hooks.policies.decisions import RECOMPUTE, Decisions, SelectiveCheckpointContext

_REGION, _NAME = "ckpt_hooks_region", "ckpt_hooks_name"


@dataclasses.dataclass
class _TracedRegion:
    outermost: int  # the number of the outermost region around, or of this region
    policy: Policy | None  # None keeps nothing
    start: int  # how many nodes Dynamo's graph has before the region


class _Compilation:
    """The regions traced in the present compilation, and the compile configs that were set before."""

    def __init__(self) -> None:
        self.regions: dict[int, _TracedRegion] = {}
        self.places: list[str] = []
        self.before: tuple[Any, str] = None, ""


_compilation = _Compilation()
_next_number = itertools.count(1).__next__


@contextlib.contextmanager
def traced_region(policy: Any, region: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Marks a block as a region; for Dynamo to trace."""
    if not torch.compiler.is_dynamo_compiling():
        with region():
            yield
        return
    if torch.compiler.is_exporting():  # an exported program keeps no activations
        yield
        return
    number = _begin(policy)
    try:
        with annotate({_REGION: number}):
            yield
    finally:
        _end(number)


def traced_name(value: Any, name: str) -> Any:
    """Returns a view whose node has a name, or a container with views; for Dynamo to trace."""

    def named(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            with annotate({_NAME: name}):
                return leaf.view_as(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(leaf, **{field: traced_name(getattr(leaf, field), name) for field in fields})
        return leaf

    return named(value) if isinstance(value, torch.Tensor) else tree_map(named, value)


@while_tracing
def _begin(policy: Any) -> int:
    """Notes a region and sets the configs; returns the region's number."""
    number = _next_number()
    around = torch.fx.traceback.current_meta.get("custom", {}).get(_REGION)
    outermost = number if around not in _compilation.regions else _compilation.regions[around].outermost
    if not _compilation.regions:
        _compilation.before = set_compile_configs(_mark, torch.compiler.config.cache_key_tag)
        at_end_of_compilation(_restore)
    _compilation.regions[number] = _TracedRegion(outermost, None if policy is None else policy_from(policy), num_traced_nodes())
    return number


@while_tracing
def _end(number: int) -> None:
    """Adds the region's place and policy to the key of the compile cache."""
    region = _compilation.regions.get(number)
    if region is not None:
        _compilation.places.append(f"{region.start}:{num_traced_nodes()}:{_key_of(region.policy)}")
        digest = hashlib.sha256("|".join(_compilation.places).encode()).hexdigest()
        set_compile_configs(_mark, f"{_compilation.before[1]}ckpt_hooks:{digest}")


def _restore() -> None:
    set_compile_configs(*_compilation.before)
    _compilation.regions.clear()
    _compilation.places.clear()


def _mark(graph: GraphModule, inputs: Any) -> GraphModule:
    """Marks the forward operators of regions that backward computes again; a pass on the joint graph."""
    by_region: dict[int, Decisions] = {}
    for node in graph.graph.nodes:
        marks = node.meta.get("custom") or {}
        region = _compilation.regions.get(marks.get(_REGION, 0))
        if region is None or node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        if "ac_graph_id" in node.meta:  # a function region has marked the node, and decides
            continue
        node.meta["ac_graph_id"] = region.outermost
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        if region.policy is not None:
            decisions = by_region.get(marks[_REGION])
            if decisions is None:
                decisions = by_region[marks[_REGION]] = Decisions(region.policy)
            if _NAME in marks:
                if decisions.of_name(marks[_NAME]) != RECOMPUTE:
                    node.args[0].meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif _is_kept(decisions, node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    before = _compilation.before[0]
    return before(graph, inputs) if callable(before) else graph


def _is_kept(decisions: Decisions, node: Node) -> bool:
    if node.target is operator.getitem:  # an operator's tuple is kept by its items, since the graph cannot keep a tuple
        whole = node.args[0]
        return isinstance(whole, Node) and whole.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
    if not isinstance(node.target, OVERLOAD):
        return False
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    # With gradients off, operators count as part of running compiled code. A policy may ask for the node's modules.
    with torch.enable_grad(), preserve_node_meta(), set_current_meta(node):
        facts, output = facts_of(node.target), node.meta.get("val")
        return decisions.decide(SelectiveCheckpointContext(), facts, args, kwargs, output) != RECOMPUTE


#: Attributes that change as regions ask a policy, so they must not be part of the compile cache's key.
_LEARNED = frozenset({"decisions", "expects", "looked_through", "tables"})


def _key_of(value: Any) -> str:
    """Returns text that differs for different policies; new text each time for a policy with a user's function."""
    if isinstance(value, (str, int, enum.Enum, type(None), *OPERATORS)):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(_key_of, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(map(_key_of, value)))}}}"
    if isinstance(value, dict):
        return _key_of([_key_of(item) for item in value.items() if item[0] not in _LEARNED])
    if isinstance(value, Policy) and type(value).__module__.startswith("ckpt_hooks."):
        return f"{type(value).__qualname__}({_key_of(vars(value))})"
    return uuid.uuid4().hex


@while_tracing
def warn_of_instance() -> None:
    warn_user(
        "A checkpoint_region made outside of a function does nothing where torch.compile traces the function. Write `with "
        "checkpoint_region(...):` in the function, or decorate the function with it."
    )
