"""Selecting modules of a model: by class, by name, by a predicate, or every n-th."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.nn import Module, ModuleList

from ckpt_hooks._core.call_sites import name_expression
from ckpt_hooks._core.misuse import checked_count, described_as

T = TypeVar("T")

#: Module classes, name patterns, a predicate of a name and a module, :func:`every`, or a mapping of patterns to policies.
Select = Any
#: Selected modules by name, each with its policy.
Selected = dict[str, tuple[Module, Any]]


@dataclasses.dataclass(frozen=True)
class every:  # noqa: N801 -- used like a function
    """Selects every n-th layer, beginning with the first, for :func:`ckpt_hooks.apply_checkpointing`.

    Args:
        n: The number of layers for one region.
        of: The layers: module classes, name patterns or a predicate. None is the entries of each ``torch.nn.ModuleList`` that
            is not inside another's entry. Layers of one parent are counted together.

    Raises:
        ValueError: If ``n`` is not a positive integer.

    Example:
        >>> import torch
        >>> from ckpt_hooks import apply_checkpointing, every
        >>> model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        >>> [region.name for region in apply_checkpointing(model, every(2))]
        ['0', '2']
    """

    n: int
    of: Select = None

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"n should be a positive integer, but got {self.n!r}. Pass 2 to select every second layer.")


def select_modules(model: Module, select: Select, policy: Any) -> Selected:
    """Returns the selected modules of a model, in the model's order; a module with several names has the first."""
    modules = dict(model.named_modules())
    if isinstance(select, Mapping):
        patterns: Mapping[str, Any] = select
        return _by_patterns(modules, patterns)
    if isinstance(select, str):
        return _by_patterns(modules, {select: policy})
    if isinstance(select, every):
        found = _every(modules, select)
    elif isinstance(select, (list, tuple, set, frozenset)) and select and all(isinstance(one, str) for one in select):
        return _by_patterns(modules, dict.fromkeys(select, policy))
    else:
        found = _outermost(modules, _predicate(select))
    if not found:
        raise ValueError(
            f"select={select!r} selects no module of {type(model).__name__}. Its modules are of the classes "
            f"{', '.join(sorted({type(module).__name__ for module in modules.values()}))}."
        )
    return {name: (module, policy) for name, module in found.items()}


def ends_of(selected: Sequence[T], keep_first: int, keep_last: int) -> list[T]:
    """Returns the first and the last of what was selected, which are left without regions."""
    if 0 < len(selected) <= checked_count(keep_first, "keep_first") + checked_count(keep_last, "keep_last"):
        raise ValueError(
            f"keep_first={keep_first} and keep_last={keep_last} leave no region of {len(selected)} modules selected. Pass less."
        )
    return [*selected[:keep_first], *selected[len(selected) - keep_last :]]


def _predicate(select: Any) -> Callable[[str, Module], Any]:
    kinds = tuple(select) if isinstance(select, (list, tuple, set, frozenset)) else (select,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, Module) for kind in kinds):
        return lambda name, module: isinstance(module, kinds)
    if callable(select) and not isinstance(select, (type, Module)):
        predicate: Callable[[str, Module], Any] = select
        return predicate
    raise TypeError(
        f"select should be module classes, name patterns, a function of a name and a module, every(n), or a mapping of "
        f"patterns to policies, but got {described_as(select)}. To select one module, write `checkpoint_module(module)`."
    )


def _outermost(modules: dict[str, Module], predicate: Callable[[str, Module], Any]) -> dict[str, Module]:
    """Returns the modules for which a predicate holds, without those inside another."""
    found: dict[str, Module] = {}
    inside: set[int] = set()
    for name, module in modules.items():
        if id(module) not in inside and predicate(name, module):
            found[name] = module
            inside.update(map(id, module.modules()))
    return found


def _every(modules: dict[str, Module], select: every) -> dict[str, Module]:
    if select.of is None:
        lists = _outermost(modules, lambda _, module: isinstance(module, ModuleList))
        layers = {
            f"{name}.{index}" if name else index: layer
            for name, entries in lists.items()
            for index, layer in entries.named_children()
        }
    elif isinstance(select.of, every):
        raise TypeError(f"of should be module classes, name patterns or a predicate, but got {select.of!r}. Multiply the two.")
    else:
        layers = {name: module for name, (module, _) in select_modules(modules[""], select.of, None).items()}
    counts: dict[str, int] = {}
    found: dict[str, Module] = {}
    for name, layer in layers.items():
        parent = name.rpartition(".")[0]
        count = counts[parent] = counts.get(parent, -1) + 1
        if count % select.n == 0:
            found[name] = layer
    return found


def _by_patterns(modules: dict[str, Module], patterns: Mapping[str, Any]) -> Selected:
    """Returns the modules whose name matches a pattern, with the policy of the first such pattern."""
    found: Selected = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"select should map name patterns to policies, but has {described_as(pattern)}. Give its name.")
        expression = re.compile(name_expression(pattern))
        matches = [name for name in modules if expression.fullmatch(name)]
        if not matches:
            near = difflib.get_close_matches(pattern, modules, 1) or [next((name for name in modules if name), "")]
            raise ValueError(
                f"select={pattern!r} selects no module. `*` stands for a part of a name between dots, `**` for any number of "
                f"these. A name near to it is {near[0]!r}."
            )
        for name in matches:
            found.setdefault(name, (modules[name], patterns[pattern]))
    return {name: found[name] for name in modules if name in found}
