"""Finding the blocks of a model: the modules whose calls a plan makes regions of."""

from __future__ import annotations

import collections
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks.modules.selecting import select_modules
from ckpt_hooks.report.ledger.ledger import MemoryLedger

__all__ = ["blocks_of"]

#: A block saves at most this part of all that the model saves: larger ones leave a plan too little to choose from.
_LARGEST = 0.25


def blocks_of(model: Module, select: Any, ledger: MemoryLedger) -> dict[str, Module]:
    """Returns the blocks of a model, by name.

    Without a selection, the model's tree is descended until a module saves at most a quarter of all that backward needs. A
    leaf is no block: a region around one operator drops nothing.

    Args:
        model: The model.
        select: The blocks, as :func:`ckpt_hooks.apply_checkpointing` takes them; None to find them.
        ledger: A step without regions.

    Raises:
        ValueError: If there are no blocks, or one is inside of another.
    """
    if select is not None:
        return _selected(model, select)
    saved: collections.Counter[str] = collections.Counter()
    for one in ledger.allocations:
        if one.origin.module is not None and any(hold.reason is Reason.SAVED for hold in one.holds):
            name = one.origin.module.rpartition(" ")[0]
            for end in range(len(parts := name.split("."))):
                saved[".".join(parts[: end + 1])] += one.nbytes
            if name:
                saved[""] += one.nbytes
    found: dict[str, Module] = {}
    todo = [(name, module) for name, module in reversed([*model.named_children()])]
    while todo:
        name, module = todo.pop()
        children = [(f"{name}.{child}", one) for child, one in module.named_children()]
        if not saved[name] or not children:
            continue
        is_container = isinstance(module, (ModuleList, ModuleDict))
        is_flat = all(not [*one.children()] for _, one in children)
        if not is_container and (saved[name] <= _LARGEST * saved[""] or is_flat):
            found[name] = module
        else:
            todo += reversed(children)
    if not found:
        raise ValueError(
            f"No blocks were found in {type(model).__name__}: modules of several others, each with at most a quarter of what "
            "backward needs. Pass blocks=..., module classes or names as apply_checkpointing takes them."
        )
    return found


def _selected(model: Module, select: Any) -> dict[str, Module]:
    found = {name: module for name, (module, _) in select_modules(model, select, None).items()}
    if len(found) > 1:
        found.pop("", None)  # which the pattern of all its children names as well
    outer = {id(inner): name for name, module in found.items() for inner in module.modules() if inner is not module}
    for name, module in found.items():
        if id(module) in outer:
            raise ValueError(f"Block {name!r} is inside of block {outer[id(module)]!r}. Leave out one of the two.")
    return found
