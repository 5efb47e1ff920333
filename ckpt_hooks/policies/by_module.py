"""Policies that depend on the running module: ``save_modules`` and ``save_indices``.

They find the running modules on Python's stack. The road not taken: hooks on each module, which miss calls that raise.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._core.call_sites import called_modules, name_expression, warn_user
from ckpt_hooks._core.misuse import check_is, check_module, checked_integer, described_as, wrong
from ckpt_hooks._torch.functions import Operator
from ckpt_hooks._torch.modes import MODULE_CALL

from .base import Policy, checked_operators, decision_of, makes_policies, spread

_NO_RUNS = frozenset[int]()

#: The name of a submodule, and the name of an operator.
_Key = tuple[str, str]
_Modules = str | type[Module]


class _SaveIndices(Policy):
    """Keeps the outputs of single runs; pickles and comparisons use only names and numbers."""

    title = "save_indices"

    def __init__(
        self, runs: dict[_Key, frozenset[int]], counts: dict[_Key, int] | None, root: torch.nn.Module | None = None
    ) -> None:
        self._runs, self._counts = runs, counts
        self._root = (lambda: None) if root is None else weakref.ref(root)
        #: Operators with a kept run: a region counts runs only of these.
        self._operators = frozenset(operator for _, operator in runs)
        number = sum(map(len, runs.values()))
        self.meaning = f"keeps the outputs of {number} {'run' if number == 1 else 'runs'} of operators"
        self._has_warned = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SaveIndices) and (self._runs, self._counts) == (other._runs, other._counts)

    def __hash__(self) -> int:
        return hash(frozenset(self._runs.items()))

    def __str__(self) -> str:
        rows = [
            (module or "(itself)", operator, ", ".join(map(str, sorted(runs))))
            for (module, operator), runs in self._runs.items()
        ]
        rows.insert(0, ("module", "operator", "runs kept"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join((repr(self), *lines))

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        return None if str(op) in self._operators else CheckpointPolicy.PREFER_RECOMPUTE

    def count_runs(self) -> Callable[[Any], bool]:
        root = self._root() or called_modules(sys._getframe(1))[0]
        names = {} if root is None else _names_in(root)
        # Keys are a submodule's name and an operator's ``id``, since an operator's own hash takes a call of Python. A state has
        # the number of runs so far, the runs to keep, and the number of runs that the policy was made for.
        states: dict[tuple[str, int], list[Any]] = {}
        does_match = True

        def is_kept(op: Any) -> bool:
            nonlocal does_match
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code is not MODULE_CALL:
                frame = frame.f_back
            name = "" if frame is None else names.get(id(frame.f_locals["self"]))
            if name is None:
                outermost = called_modules(frame)[-1] if root is None else None
                names.update({} if outermost is None else _names_in(outermost))
                name = names.setdefault(id(frame.f_locals["self"]), "")
            state = states.get((name, id(op)))
            if state is None:
                key = name, str(op)
                most = float("inf") if self._counts is None else self._counts.get(key, 0)
                state = states[name, id(op)] = [0, self._runs.get(key, _NO_RUNS), most]
            count, kept_runs, most = state
            state[0] = count + 1
            if does_match and count >= most:
                does_match = False
                self._warn(name, op, int(most))
            return does_match and count in kept_runs

        return is_kept

    def _warn(self, module: str, op: Any, expected: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{self!r} was made for {expected} runs of {op} in {f'module {module!r}' if module else 'the module itself'}, "
                "but the operator ran once more: this call of the region keeps no more outputs. Make another policy for inputs "
                "of this shape or for this mode of the module, or leave `counts` out."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"runs": self._runs, "counts": self._counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["runs"], state["counts"])  # type: ignore[misc]


#: For each module to which names in a policy are relative: a hash of the submodules' ``id``, and the names by ``id``.
_names: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, dict[int, str]]] = weakref.WeakKeyDictionary()


def _names_in(root: torch.nn.Module) -> dict[int, str]:
    """Returns the names of a module's submodules by ``id``; a module with several names has the first."""
    modules = [*root.modules()]
    cached = _names.get(root)
    if cached is None or cached[0] != hash(tuple(map(id, modules))):
        cached = _names[root] = hash(tuple(map(id, modules))), {id(module): name for name, module in root.named_modules()}
    return cached[1]


@makes_policies
def save_indices(
    runs: Iterable[tuple[str, Operator, int]],
    *,
    counts: Mapping[tuple[str, Operator], int] | None = None,
    root: torch.nn.Module | None = None,
) -> Policy:
    """Returns a policy that keeps the outputs of single runs of operators.

    A run is identified by the submodule whose forward runs it, the operator, and the number of earlier runs of this operator in
    this submodule, within a call of the region. So a dropout that is off, a cast that autocast has cached, or an expert without
    tokens does not shift the runs of other submodules. The policy can be pickled, compares equal to its copies, and prints as a
    table.

    Args:
        runs: The runs, each a submodule name, an operator (``torch.ops.aten.mm.default``) and a number from 0. Names are
            relative to the innermost module whose forward runs when the region begins, or else to the outermost module that the
            region calls. ``""`` is that module.
        counts: How many times each operator runs in each submodule. A call that runs another operator, or more of them, keeps
            nothing from there on and warns once. None checks nothing.
        root: The module that names are relative to, held weakly and not pickled. None means the module above.

    Raises:
        TypeError: If ``runs`` or ``counts`` has something else in it, or ``root`` is not a module.
        ValueError: If an operator is invalid, or a number is not an integer from 0.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.policies import save_indices
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        >>> policy = save_indices([("2", torch.ops.aten.addmm.default, 0)])
        >>> print(policy)
        <save_indices: keeps the outputs of 1 run of operators>
        module  operator            runs kept
        2       aten.addmm.default  0
        >>> y = checkpoint(policy=policy)(block)(torch.ones(2, 4))
    """
    kept_runs: dict[_Key, frozenset[int]] = {}
    pairs: Any = {} if counts is None else counts
    try:
        triples = [(module, operator, number) for module, operator, number in runs]
        counted = [(module, operator, number) for (module, operator), number in pairs.items()]
    except (TypeError, ValueError, AttributeError):
        advice = "Write runs=[('', operator, 0)], and counts={('', operator): 1}."
        raise wrong(
            (runs, counts),
            "runs and counts",
            "(module, operator, run) triples, and a mapping of (module, operator) pairs to numbers",
            advice,
        ) from None
    for module, operator, number in triples:
        key = _checked(module, operator, number, "runs")
        kept_runs[key] = kept_runs.get(key, frozenset()) | {number}
    expected = {_checked(module, operator, number, "counts"): number for module, operator, number in counted}
    if root is not None:
        check_module(root, "root", "Pass the module in which the names are, or leave root out.")
    return _SaveIndices(kept_runs, None if counts is None else expected, root)


def _checked(module: Any, operator: Any, number: Any, argument: str) -> _Key:
    checked_operators([operator], argument)
    check_is(module, str, f"a submodule in {argument}", "a string", "Give its name, or '' for the module itself.")
    checked_integer(number, f"a number in {argument}", f"Give a number of runs of {operator}, from 0.", 0)
    return module, str(operator)


class _SaveModules(Policy):
    title, kind = "save_modules", "modules"
    advice = (
        "Give names as in named_modules(), or the last parts of such names. A module counts only if the program calls the "
        "module itself, and not its forward."
    )

    def __init__(self, *names: str | type[Module]) -> None:
        self._names, self.expects = names, frozenset(names)
        self._classes = tuple(name for name in names if isinstance(name, type))
        patterns = "|".join(name_expression(name) for name in names if isinstance(name, str))
        # Matches the ends of names, since the model may be inside another module.
        self._expression = rf"(?:.*\.)?(?:{patterns or '(?!)'})"
        words = [repr(name) if isinstance(name, str) else name.__name__ for name in names]
        self.meaning = f"keeps the results of what runs in modules {', '.join(words)}"
        # For each outermost module: whether the names match an inner module, by the ``id`` of the inner module's ``__dict__``,
        # which is the same for ``checkpoint(module)``.
        self.tables: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return _SaveModules, self._names

    def for_op(self, op: Any) -> None:
        return None

    def count_runs(self) -> Callable[[Any], bool]:
        return self.for_function

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return decision_of(self.for_function(op))

    def for_function(self, function: Any) -> bool:
        if traced := torch.fx.traceback.current_meta.get("nn_module_stack"):  # set by Dynamo while it traces
            return any(self._is_meant(*entry) for entry in traced.values())
        called = called_modules(sys._getframe(1))
        if called[0] is None or not self._any_is_meant(called):
            return False
        self.expects = frozenset()
        return True

    def _any_is_meant(self, called: list[Any]) -> bool:
        table = self.tables.setdefault(called[-1], {})
        for module in called:
            row = table.get(id(vars(module)))
            if row is None or row[0]() is None:  # the module was added after the table was made
                named = [("", module), *called[-1].named_modules()]
                table.update({id(vars(inner)): (weakref.ref(inner), self._is_meant(name, None)) for name, inner in named})
                row = table[id(vars(module))]
            if row[1] or isinstance(module, self._classes):
                return True
        return False

    def _is_meant(self, name: str, kind: Any) -> bool:
        name = re.sub(r"\.forward\._reference\(\)|\.__wrapped__", "", name)  # Dynamo's names include attributes of regions
        by_class = isinstance(kind, type) and issubclass(kind, self._classes)
        return by_class or re.fullmatch(self._expression, name) is not None


@makes_policies
def save_modules(*names: _Modules | Sequence[_Modules] | Set[_Modules]) -> Policy:
    """Returns a policy that keeps the results of everything that runs in some modules, including the modules inside them.

    Results are kept until backward has used them, if a saved tensor depends on them; results of custom functions too. The
    policy reads the Python stack to find the running module, which costs about five microseconds for each operator in the
    region. A module must be called: calling its ``forward`` by hand does not count, nor does TorchScript.

    Args:
        *names: Module classes, names as in ``model.named_modules()``, or lists of them. ``*`` stands for a part of a name
            between dots, ``**`` for any number of parts. A name may be the end of a full name: ``"self_attn"`` matches the
            attention of every layer.

    Raises:
        TypeError: If an argument is neither a name nor a module class.
        ValueError: If there are no names.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.policies import save_modules
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> checkpoint(policy=save_modules("self_attn"))(layer)(torch.ones(2, 4, 8)).sum().backward()
    """
    parts = spread(names)
    if not parts:
        raise ValueError("save_modules got no modules. Name some, as in save_modules('self_attn').")
    for name in parts:
        if not (isinstance(name, str) or (isinstance(name, type) and issubclass(name, Module))):
            raise TypeError(f"save_modules takes names and classes of modules, but got {described_as(name)}. Pass its name.")
    return _SaveModules(*parts)
