"""Blocks: the modules whose calls may be regions, by the model's tree or by selection."""

from __future__ import annotations

import collections
import itertools
import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.misuse import check_module, wrong
from ckpt_hooks.modules.selecting import selected_of, selector_of, span
from ckpt_hooks.modules.spans import span_in
from ckpt_hooks.report.ledger.data import Holder

#: The most leaves of a block, as a fraction of all leaves in possible blocks: larger blocks leave a plan too few choices.
_LARGEST = 0.25


def blocks_of(model: Module, chunked: Collection[str] = ()) -> list[str]:
    """Returns the blocks of a model: names of modules, and of spans of layers, outside of modules that run in chunks."""
    # Descends the tree until a module has at most a quarter of the leaves in possible blocks. A leaf is no block, since a
    # region around a single operator drops nothing, but several leaves in a row are a span. Bytes would tell more than the
    # number of leaves, but need a step without regions, which may not fit.
    possible = {name for name, module in model.named_modules() if name and _can_be_block(module)}
    possible.update(name for at, module in model.named_modules() for run in _leaves_in_a_row(at, module) for name in run)
    saved: collections.Counter[str] = collections.Counter()
    for name, module in model.named_modules():
        if not [*module.children()]:
            around = _around(name)
            saved.update(dict.fromkeys(around, 1))
            saved[""] += 0 if possible.isdisjoint(around) else 1
    blocks: list[str] = []
    todo = [("", model)]
    while todo:
        name, module = todo.pop()
        children = [(f"{name}.{child}".strip("."), submodule) for child, submodule in module.named_children()]
        if not saved[name] or not children or name in chunked:
            continue
        runs = _leaves_in_a_row(name, module)
        is_flat = all(not [*submodule.children()] for _, submodule in children)
        # A larger module is a block if there is none inside, as in a model of two branches with three leaves each.
        if name and _can_be_block(module) and (saved[name] <= _LARGEST * saved[""] or (is_flat and not runs)):
            blocks.append(name)
        else:
            for run in runs:
                blocks += _spans_of(run, saved)
            todo += reversed(children)
    if not blocks:
        if chunked and blocks_of(model):  # all possible blocks run in chunks
            check_chunked(sorted(chunked), chunked)
        raise ValueError(
            f"No blocks were found in {type(model).__name__}: a block is a module with submodules and at most a quarter of the "
            "leaf modules, or a run of layers. Pass blocks: module classes or patterns, as apply_checkpointing takes them."
        )
    return blocks


def check_chunked(blocks: Iterable[str], chunked: Collection[str]) -> None:
    """Raises if a block is itself a module that runs in chunks."""
    if both := [name for name in blocks if name in chunked]:
        advice = "Name modules inside the blocks, as in chunks={'layers.*.mlp': (1, 4, 8)}, or pass other blocks."
        raise wrong(both, "chunks", "modules inside or outside of blocks, not blocks", advice, ValueError)


def _leaves_in_a_row(name: str, module: Module) -> list[list[str]]:
    """Returns the runs of more than three leaves in a list or Sequential, by name."""
    runs: list[list[str]] = [[]]
    for child, leaf in module.named_children() if isinstance(module, (ModuleList, Sequential)) else ():
        if any(True for _ in leaf.children()):
            runs.append([])
        else:
            runs[-1].append(f"{name}.{child}".strip("."))
    return [run for run in runs if len(run) > 3]


def _spans_of(run: list[str], saved: Mapping[str, int]) -> list[str]:
    """Splits a run of leaves into spans: about as many spans as leaves in each."""
    most = sum(saved[name] for name in run) / math.sqrt(len(run))
    spans: list[list[str]] = []
    size = math.inf
    for name in run:
        if size + saved[name] > most:
            spans.append([])
            size = 0.0
        spans[-1].append(name)
        size += saved[name]
    return [str(span(leaves[0], leaves[-1])) for leaves in spans if len(leaves) > 1]


def with_spans_around(blocks: Sequence[str]) -> list[str]:
    """Returns spans around runs of blocks, about as many spans as blocks in each, and the blocks; nothing without spans."""
    parents: dict[str, list[str]] = {}
    for name in blocks:
        parents.setdefault(ends_of(name)[0].rpartition(".")[0], []).append(name)
    spans: list[str] = []
    for row in parents.values():
        count = math.isqrt(len(row))
        for at in range(0, len(row) if count > 1 else 0, count):
            ends = row[at : at + count]
            if len(ends) > 1:
                spans.append(str(span(ends_of(ends[0])[0], ends_of(ends[-1])[1])))
    return [*spans, *blocks] if spans else []


def selected_blocks(model: Module, select: Any) -> list[str]:
    """Returns the blocks that a user selects, by name."""
    # Only modules below the model: a block that is the whole model would leave a plan no choice.
    chosen = selected_of(model, select, None, "blocks", below=True)
    for name, (_, policy) in chosen.items():
        if policy is not None:
            raise ValueError(f"blocks has a policy for {name!r}, but a plan says what blocks keep. Write None in place of it.")
    selected = {name: module for name, (module, _) in chosen.items()}
    outer = {
        id(inner): name
        for name, module in selected.items()
        for inner in (() if isinstance(module, span) else module.modules())
        if inner is not module
    }
    for name, module in selected.items():
        if id(module) in outer:
            raise ValueError(
                f"Block {name!r} is inside of block {outer[id(module)]!r}, and blocks must not overlap. Leave out one of them."
            )
    return [*selected]


class Blocks:
    """The blocks of a plan in a model: modules, and spans, which may be around other blocks."""

    def __init__(self, model: Module, names: Sequence[str]) -> None:
        self._roots: dict[str, weakref.ref[Module]] = {}
        self.kinds: dict[str, str] = {}
        self.around: dict[str, str] = {}  # the span around a block
        self.spans: set[str] = set()
        self.members: set[str] = set()  # names of the modules in blocks
        for name in names:
            selector = selector_of(name)
            if isinstance(selector, span):
                modules = span_in(model, selector)
                self.spans.add(name)
                self._roots[name], self.kinds[name] = weakref.ref(modules.parent), modules.kind
                row = [at for at, _ in model.named_modules()][modules.place[0] : modules.place[1] + 1]
                self.members.update(row)
                self.around.update({other: name for other in names if other != name and {*ends_of(other)} <= {*row}})
            else:
                module = model.get_submodule(name)
                self._roots[name], self.kinds[name] = weakref.ref(module), type(module).__name__
                self.members.add(name)

    @property
    def roots(self) -> dict[str, Module]:
        """The module of each block, or the parent of a span: names of submodules are relative to it."""
        return {name: module for name, reference in self._roots.items() if (module := reference()) is not None}


def ends_of(name: str) -> tuple[str, str]:
    """Returns the names of the first and the last module of a block."""
    return name.partition(" to ")[0], name.rpartition(" to ")[2]


def _around(name: str) -> list[str]:
    """Returns the names of a module and of the modules around, without the model's own name."""
    return [*itertools.accumulate(name.split(".") if name else (), "{}.{}".format)]


def _can_be_block(module: Module) -> bool:
    return not isinstance(module, (ModuleList, ModuleDict)) and any(True for _ in module.children())


#: The attributes in which FSDP1, torch's own checkpointing and torch.compile hold the module that they wrap.
_WRAPPED = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def names_in(model: Module, blocks: Collection[str]) -> dict[str, str]:
    """Returns the names of a plan's blocks in a model with other wrappers (DDP, FSDP, PEFT) than the planned model."""
    check_module(model, "model", "Pass the model of the plan.")
    # A wrapper and its module share a name here. The module, which comes later, wins: regions belong inside FSDP1's gathers.
    real_names = {".".join(part for part in name.split(".") if part not in _WRAPPED): name for name, _ in model.named_modules()}
    outers = sorted(real_names, key=lambda name: name.count(".") + bool(name))
    ends = {end for name in blocks for end in ends_of(name)}
    for cut in range(min(name.count(".") for name in ends) + 1):
        inner = {name: ".".join(name.split(".")[cut:]) for name in ends}
        if len({name.removesuffix(rest) for name, rest in inner.items()}) > 1:
            break
        for outer in outers:
            names = {name: f"{outer}.{rest}".strip(".") for name, rest in inner.items()}
            if all(full_name in real_names for full_name in names.values()):
                return {name: " to ".join(dict.fromkeys(real_names[names[end]] for end in ends_of(name))) for name in blocks}
    return {name: name for name in blocks}  # the caller raises for missing names


def outside_of(holders: Iterable[Holder], blocks: Collection[str]) -> tuple[str, int]:
    """Returns the module outside of blocks with the most bytes of results, as in ``"head Linear"``, and the bytes of all."""
    # Without gradients of parameters, which a plan cannot change.
    sizes: collections.Counter[str] = collections.Counter()
    for holder in holders:
        module = holder.origin.module or ""
        names = {"", *_around(module.rpartition(" ")[0]), *_around((holder.origin.region or "").rpartition(" ")[0])}
        if holder.reason is not Reason.GRADIENT and names.isdisjoint(blocks):
            sizes[module.strip()] += holder.nbytes
    return max(sizes, key=sizes.__getitem__, default=""), sizes.total()
