"""Selecting modules of a model: by class, by name, by number, by a predicate, or every n-th."""

from __future__ import annotations

import dataclasses
import difflib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol, SupportsIndex, TypeVar

from torch.nn import Module, ModuleList, Sequential

from ckpt_hooks._core.call_sites import name_expression
from ckpt_hooks._core.descriptions import text_of
from ckpt_hooks._core.misuse import check_callable, check_is, checked_flag, checked_integer, integer_in, wrong
from ckpt_hooks._options import is_policy
from ckpt_hooks._state.places import class_attribute
from ckpt_hooks.policies.base import PolicyLike
from ckpt_hooks.report.printing import name_pattern

#: Selected modules and spans by name, each with its policy.
Selected = dict[str, tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class span:  # noqa: N801 -- used like a function
    """Selects the code from one layer to another as one recorded region, for :func:`ckpt_hooks.apply_checkpointing`.

    For a flat ``Sequential`` whose single layers have nothing to drop, and for several layers of a list together::

        apply_checkpointing(model, [span("layers.0", "layers.3"), span("layers.4", "layers.7")])

    The region opens before the first layer and closes after the last, in each call of the module that calls both. Code between
    the layers belongs to it. Layers and smaller spans inside may be regions too. Calls of a layer from elsewhere are plain, and
    so are calls that ``torch.compile`` traces.

    Args:
        first: The name of the first layer.
        last: The name of the last layer, called later by the same module.

    Raises:
        TypeError: If a name is not a string.
        CheckpointError: In forward, if autocast, the grad mode, a mode or the region around differs between both ends, or if
            the module returns without calling the last layer.

    Example:
        >>> import torch
        >>> from ckpt_hooks import apply_checkpointing, span
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
        >>> with apply_checkpointing(model, [span("0", "3"), span("4", "7")]):
        ...     model(torch.ones(2, 4)).sum().backward()
    """

    first: str
    last: str

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            check_is(getattr(self, name), str, name, "a string", "Give a name as `model.named_modules()` has it.")

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


#: A selector in a list or mapping: a name pattern, a span, layers by number, or a module class.
Key = str | span | slice | range | SupportsIndex | type[Module]
Value_co = TypeVar("Value_co", covariant=True)
_OfKey = PolicyLike | Mapping[str, Any] | None


class ByKey(Protocol[Value_co]):
    """A mapping for type checkers: a ``dict[str, None]`` is no ``Mapping[Key, None]``, since keys are invariant."""

    def items(self) -> Set[tuple[Key, Value_co]]: ...


_Keys = Sequence[Key] | Set[Key] | Mapping[Key, _OfKey] | ByKey[_OfKey]
_Layers = str | span | slice | type[Module] | Callable[[str, Module], bool] | _Keys


def selector_of(name: str) -> str | span:
    """Returns the selector for the name of a block: the name of a module, or a span."""
    first, _, last = name.partition(" to ")
    return span(first, last) if last else name


@dataclasses.dataclass(frozen=True)
class every:  # noqa: N801 -- used like a function
    """Selects every n-th layer, starting with the first, for :func:`ckpt_hooks.apply_checkpointing`.

    Args:
        n: The distance between selected layers.
        of: The layers to count: module classes, name patterns or a predicate. None means the entries of each outermost
            ``torch.nn.ModuleList``, or of the model if that is a ``Sequential`` or ``ModuleList`` itself. Layers of one parent
            are counted together.

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
    of: _Layers | None = None

    def __post_init__(self) -> None:
        checked_integer(self.n, "n", "Pass 2 to select every second layer.")


#: Any selector of modules: module classes, name patterns, numbers of layers, :class:`span`, a function of a name and a module,
#: :class:`every`, or a mapping from classes, patterns and numbers to policies.
SelectLike = _Layers | every


def selected_of(model: Module, select: Any, policy: Any, argument: str, *, below: bool = False) -> Selected:
    """Returns the selected modules in the model's order; ``below`` leaves out the model itself, errors name ``argument``."""
    return _selected(
        model, {name: module for name, module in model.named_modules() if name or not below}, select, policy, argument
    )


def _selected(root: Module, modules: dict[str, Module], select: Any, policy: Any, argument: str) -> Selected:
    keys = [select] if isinstance(select, (str, span, slice)) else [*select] if isinstance(select, _SEVERAL) else []
    if isinstance(select, Mapping):
        selected = _by_keys(root, modules, select.items(), argument)
    elif any(map(_is_place, keys)) and all(_is_place(key) or _is_class(key) for key in keys):
        selected = _by_keys(root, modules, [(key, policy) for key in keys], argument)
    else:
        chosen = (
            _every(root, modules, select)
            if isinstance(select, every)
            else _outermost(modules, _predicate(select, argument), argument)
        )
        selected = {name: (module, policy) for name, module in chosen.items()}
    if not selected:
        classes = ", ".join(sorted({type(module).__name__ for module in modules.values()}))
        raise ValueError(f"{argument}={text_of(select)} selects no module. Select among these classes: {classes}.")
    return selected


_SEVERAL = (list, tuple, set, frozenset, range)


def _is_place(key: Any) -> bool:
    return isinstance(key, (str, span, slice, range)) or integer_in(key) is not None


def _is_class(key: Any) -> bool:
    return isinstance(key, type) and issubclass(key, Module)


def kept_plain(selected: Sequence[Any], keep_first: int, keep_last: int) -> list[Any]:
    """Returns the first and last entries of ``selected``, which stay plain."""
    ends = checked_integer(keep_first, "keep_first", least=0), checked_integer(keep_last, "keep_last", least=0)
    if 0 < len(selected) <= sum(ends):
        raise ValueError(f"keep_first and keep_last leave no region: {len(selected)} modules are selected. Pass lower numbers.")
    return [*selected[:keep_first], *selected[len(selected) - keep_last :]]


def _predicate(select: Any, argument: str) -> Callable[[str, Module], Any]:
    kinds = tuple(select) if isinstance(select, _SEVERAL) else (select,)
    if kinds and all(map(_is_class, kinds)):
        return lambda name, module: isinstance(module, kinds)
    wanted = (
        "module classes, name patterns, numbers of layers, spans, a function of a name and a module, every(n), or a mapping"
    )
    if is_policy(select):
        raise wrong(select, argument, wanted, "Pass a policy as `policy=...`, after the modules.")
    if integer_in(select) is not None:
        number = text_of(select)
        raise wrong(select, argument, wanted, f"Write [{number}] for one layer, or every({number}) for one in {number}.")
    if isinstance(select, (type, Module)):
        raise wrong(select, argument, wanted, "To select one module, write its name, or `checkpoint_module(module)`.")
    check_callable(select, argument, "name, module", wanted, "Write a name as `model.named_modules()` has it.")
    predicate: Callable[[str, Module], Any] = select
    return predicate


_ANSWER = "Return `bool(...)` from the function. Pass a policy as `policy=...`."


def _outermost(modules: dict[str, Module], predicate: Callable[[str, Module], Any], argument: str) -> dict[str, Module]:
    """Returns the modules for which a predicate holds, without modules inside another match."""
    outermost: dict[str, Module] = {}
    inside: set[int] = set()
    for name, module in modules.items():
        if id(module) in inside:
            continue
        answer = predicate(name, module)
        if checked_flag(answer, f"The result of {argument}({name!r}, module)", advice=_ANSWER):
            outermost[name] = module
            inside.update(map(id, module.modules()))
    return outermost


def _lists(root: Module, modules: dict[str, Module]) -> dict[str, Any]:
    """Returns the lists whose entries are the layers of a model, by name."""
    if isinstance(root, (Sequential, ModuleList)):
        return {"": root}
    return _outermost(modules, lambda _, module: isinstance(module, ModuleList), "of")


def _every(root: Module, modules: dict[str, Module], select: every) -> dict[str, Module]:
    if select.of is None:
        layers = {
            f"{name}.{index}" if name else index: layer
            for name, entries in _lists(root, modules).items()
            for index, layer in entries.named_children()
        }
    elif isinstance(select.of, every):
        raise TypeError(
            f"of should be module classes, name patterns or a predicate, but got {text_of(select.of)}. Write one `every`, with "
            "the product of both numbers."
        )
    else:
        layers = {name: module for name, (module, _) in _selected(root, modules, select.of, None, "of").items()}
    counts: dict[str, int] = {}
    chosen: dict[str, Module] = {}
    for name, layer in layers.items():
        parent = name.rpartition(".")[0]
        count = counts[parent] = counts.get(parent, -1) + 1
        if count % select.n == 0:
            chosen[name] = layer
    return chosen


def _by_keys(root: Module, modules: dict[str, Module], pairs: Iterable[tuple[Any, Any]], argument: str) -> Selected:
    """Returns the modules and spans that keys select, each with the policy of the first key that selects it."""
    pairs = [*pairs]
    classes = tuple(key for key, _ in pairs if _is_class(key))
    of_classes = _outermost(modules, lambda _, module: isinstance(module, classes), argument)
    # A star matches neither the model itself nor lists of modules, which have no forward.
    starred = {
        at: module
        for at, module in modules.items()
        if at and (class_attribute(type(module), "forward") is not Module.forward or "forward" in vars(module))
    }
    selected: Selected = {}
    for key, policy in pairs:
        if isinstance(key, span):
            for end in (key.first, key.last):
                _matching(modules, re.escape(end), end, argument)
            selected[str(key)] = key, policy
            continue
        if _is_class(key):
            names = [name for name, module in of_classes.items() if isinstance(module, key)]
            if not names:
                raise ValueError(
                    f"{argument}={key.__name__} selects no module, or only modules inside modules of other selected classes. "
                    f"Leave {key.__name__} out, or give names of modules."
                )
        elif isinstance(key, str):
            names = _matching(starred if "*" in key else modules, name_expression(key), key, argument)
        else:
            if not _is_place(key):
                raise wrong(key, f"a key of {argument}", "a name pattern, a module class, or a number", "Give a module's name.")
            names = _numbered(root, modules, key, argument)
        for name in names:
            selected.setdefault(name, (modules[name], policy))
    places = {name: place for place, name in enumerate(modules)}
    return dict(sorted(selected.items(), key=lambda pair: places[pair[0].partition(" to ")[0]]))


def _numbered(root: Module, modules: dict[str, Module], key: Any, argument: str) -> list[str]:
    """Returns the names of the layers with the numbers of ``key`` in each list; raises if no list is long enough."""
    lists = {name: [*entries] for name, entries in _lists(root, modules).items()}
    names = {id(module): name for name, module in modules.items()}
    numbers = [] if isinstance(key, slice) else map(operator.index, key if isinstance(key, range) else [key])
    numbered: list[str] = []
    for part in [key] if isinstance(key, slice) else [slice(number, number + 1 or None) for number in numbers] or [slice(0)]:
        layers = [layer for entries in lists.values() for layer in entries[part]]
        if not layers:
            words = text_of(key if isinstance(key, (slice, range)) else [key])
            have = " and ".join(f"{name or 'the model'} has {len(entries)}" for name, entries in lists.items())
            raise ValueError(
                f"{argument}={words} is out of range. Layers: {have or 'the model has no torch.nn.ModuleList'}. Give numbers "
                "of layers from 0, or from -1 backwards, or select modules by class or name."
            )
        numbered += [names[id(layer)] for layer in layers]
    return numbered


def _matching(modules: Mapping[str, Module], expression: str, pattern: str, argument: str) -> list[str]:
    """Returns the names that match a pattern; raises if there are none."""
    matches = [name for name in modules if re.fullmatch(expression, name)]
    if not matches:
        names = [name for name in modules if name]
        names = [*dict.fromkeys(name_pattern(name).replace("\0", "*") for name in names), *names] if "*" in pattern else names
        near = difflib.get_close_matches(pattern, names, 1) or names
        advice = f"Write a module's name, such as {near[0]!r}." if near else "For the model, write `checkpoint_module(model)`."
        if pattern in (type(module).__name__ for module in modules.values()):
            advice = f"To select by class, pass the class {pattern} itself."
        elif argument == "select" and is_policy(pattern):
            advice = f"To give a policy by its name, write policy={pattern!r} after the modules."
        raise ValueError(
            f"{argument}={pattern!r} selects no module. `*` stands for a part of a name between dots, `**` for any number "
            f"of parts; neither selects the model itself or a list of modules. {advice}"
        )
    return matches
