"""Blocks: the modules whose calls may be regions, found or selected, and what is outside of them."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.misuse import check_module
from ckpt_hooks.modules.selecting import selected_of
from ckpt_hooks.report.ledger import MemoryLedger
from ckpt_hooks.report.ledger.data import Holder

#: A block saves at most this part of all that blocks may save: larger ones leave a plan too little to choose from.
_LARGEST = 0.25


def blocks_of(model: Module, ledger: MemoryLedger) -> dict[str, Module]:
    """Returns the blocks of a model, by name."""
    # The model's tree is descended until a module saves at most a quarter of all that blocks may save: what the model itself
    # and its leaves save, as logits, is of no block. A leaf is no block: a region around one operator drops nothing.
    possible = {name for name, one in model.named_modules() if name and _can_be_block(one)}
    saved: collections.Counter[str] = collections.Counter()
    for one in ledger.allocations:
        if one.origin.module is not None and any(hold.reason is Reason.SAVED for hold in one.holds):
            name = one.origin.module.rpartition(" ")[0]
            around = _around(name)
            saved.update(dict.fromkeys(around, one.nbytes))
            saved[""] += one.nbytes if not possible.isdisjoint(around) else 0
    found: dict[str, Module] = {}
    todo = [(name, module) for name, module in reversed([*model.named_children()])]
    while todo:
        name, module = todo.pop()
        children = [(f"{name}.{child}", one) for child, one in module.named_children()]
        if not saved[name] or not children:
            continue
        is_flat = all(not [*one.children()] for _, one in children)
        if _can_be_block(module) and (saved[name] <= _LARGEST * saved[""] or is_flat):
            found[name] = module
        else:
            todo += reversed(children)
    if not found:
        raise ValueError(
            f"No blocks were found in {type(model).__name__}: modules of several others, each with at most a quarter of what "
            "backward needs. Pass blocks=..., module classes or names as apply_checkpointing takes them."
        )
    return found


def selected_blocks(model: Module, select: Any) -> dict[str, Module]:
    """Returns the blocks that a user selects, by name."""
    # A block that is the whole model would leave a plan no choice.
    below = {name: module for name, module in model.named_modules() if name}
    found = {name: module for name, (module, _) in selected_of(below, select, None, "blocks").items()}
    outer = {id(inner): name for name, module in found.items() for inner in module.modules() if inner is not module}
    for name, module in found.items():
        if id(module) in outer:
            raise ValueError(f"Block {name!r} is inside of block {outer[id(module)]!r}. Leave out one of the two.")
    return found


def _around(name: str) -> list[str]:
    """Returns the names of a module and of the modules around, without the model's."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _can_be_block(module: Module) -> bool:
    return not isinstance(module, (ModuleList, ModuleDict)) and any(True for _ in module.children())


#: The attributes in which wrappers of modules have these: of FSDP1, torch's own checkpointing, and torch.compile.
_WRAPPED = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def names_in(model: Module, blocks: Collection[str]) -> dict[str, str]:
    """Returns the names of a plan's blocks in a model, which wrappers (DDP, FSDP, PEFT) may be around, or may have been."""
    check_module(model, "model", "Pass the model of the plan.")
    # Of a wrapper and what is in it, of one name then, the latter is the block: a region belongs inside of FSDP1's gathers.
    found = {".".join(part for part in name.split(".") if part not in _WRAPPED): name for name, _ in model.named_modules()}
    outers = sorted(found, key=lambda name: name.count(".") + bool(name))
    for cut in range(min(name.count(".") for name in blocks) + 1):
        inner = {name: ".".join(name.split(".")[cut:]) for name in blocks}
        if len({name.removesuffix(one) for name, one in inner.items()}) > 1:
            break
        for outer in outers:
            names = {name: f"{outer}.{one}".strip(".") for name, one in inner.items()}
            if all(one in found for one in names.values()):
                return {name: found[one] for name, one in names.items()}
    return {name: name for name in blocks}  # of which apply_checkpointing says that there are none


def outside_of(holders: Iterable[Holder], blocks: Collection[str]) -> tuple[str, int]:
    """Returns the module outside of blocks whose results take the most, as in ``"head Linear"``, and the bytes of all such."""
    # Gradients of parameters are there whatever is kept.
    sizes: collections.Counter[str] = collections.Counter()
    for holder in holders:
        module = holder.origin.module or ""
        names = {"", *_around(module.rpartition(" ")[0]), *_around((holder.origin.region or "").rpartition(" ")[0])}
        if holder.reason is not Reason.GRADIENT and names.isdisjoint(blocks):
            sizes[module.strip()] += holder.nbytes
    return max(sizes, key=sizes.__getitem__, default=""), sizes.total()
