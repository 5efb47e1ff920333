"""The policy by module: what runs while modules of some names or classes run is kept.

The running modules are read off the stack of Python, so nothing is put on modules, and exceptions, threads and regions need no
care. The road not taken: hooks before and after each forward, which slow every module, and stay where one raises.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from ckpt_hooks._core.call_sites import called_modules, name_expression
from ckpt_hooks._core.misuse import described_as

from .base import Policy, decision_of, makes_policies


class _SaveModules(Policy):
    """Keeps the results of what runs in some modules."""

    title, kind = "save_modules", "modules"
    advice = "Names are those of named_modules(), or their ends. Modules run where they are called, not where their forward is."

    def __init__(self, *names: str | type[Module]) -> None:
        self._names, self.expects = names, frozenset(names)
        self._classes = tuple(name for name in names if isinstance(name, type))
        patterns = "|".join(name_expression(name) for name in names if isinstance(name, str))
        self._expression = rf"(?:.*\.)?(?:{patterns or '(?!)'})"  # the end of the name: the model may stand in another one
        words = [repr(name) if isinstance(name, str) else name.__name__ for name in names]
        self.meaning = f"keeps the results of what runs in modules {', '.join(words)}"
        # By outermost module: each module in it, by the identity of the dictionary, which a checkpointed module shares, and
        # whether the policy names it.
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
        if traced := torch.fx.traceback.current_meta.get("nn_module_stack"):  # Dynamo's notes
            return any(self._is_meant(*entry) for entry in traced.values())
        called = called_modules(sys._getframe(1))
        if called[0] is not None and any(isinstance(one, self._classes) or self._is_named(one, called[-1]) for one in called):
            self.expects = frozenset()
            return True
        return False

    def _is_named(self, module: Module, outermost: Module) -> bool:
        key = id(vars(module))
        found = self.tables.get(outermost, {}).get(key)
        if found is None or found[0]() is None:  # a module added since
            named = outermost.named_modules()
            table = {id(vars(one)): (weakref.ref(one), self._is_meant(name, None)) for name, one in named}
            found = table.setdefault(key, (weakref.ref(module), False))
            self.tables[outermost] = table
        return bool(found[1])

    def _is_meant(self, name: str, kind: Any) -> bool:
        name = re.sub(
            r"\.forward\._reference\(\)|\.__wrapped__", "", name
        )  # how compiled code comes from a region to its module
        by_class = isinstance(kind, type) and issubclass(kind, self._classes)
        return by_class or re.fullmatch(self._expression, name) is not None


@makes_policies
def save_modules(*names: str | type[Module]) -> Policy:
    """Returns a policy which keeps the results of what runs in some modules, modules inside of them included.

    Kept are results of operators, and of custom functions with kernels that no operator shows, until backward has used them, if
    a saved tensor depends on them. The stack of Python tells which modules run, at two to five microseconds for each operator
    of a region under this policy. A module runs where it is called: not where its ``forward`` is called by hand, nor inside of
    TorchScript. In functions that ``torch.compile`` traces, the compiler knows the modules, and keeps the results.

    Args:
        *names: Module classes, and names as in ``model.named_modules()``, with ``*`` for a part of a name between dots and
            ``**`` for any number of parts. The end of a name will do: ``"self_attn"`` is the attention of every layer,
            ``"layers.0.self_attn"`` that of the first.

    Raises:
        TypeError: If an argument is neither a name nor a module class.
        ValueError: If there is none.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.policies import save_modules
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> checkpoint(policy=save_modules("self_attn"))(layer)(torch.ones(2, 4, 8)).sum().backward()
    """
    if not names:
        raise ValueError("save_modules got no modules. Name some, as in save_modules('self_attn').")
    for name in names:
        if not (isinstance(name, str) or (isinstance(name, type) and issubclass(name, Module))):
            raise TypeError(f"save_modules takes names and classes of modules, but got {described_as(name)}. Pass its name.")
    return _SaveModules(*names)
