"""The policy by module: what runs while modules of some names or classes run is kept.

The running modules are read off the stack of Python. The road not taken: hooks on each module, which stay where one raises.
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
    title, kind = "save_modules", "modules"
    advice = "Names are those of named_modules(), or their ends. Modules run where they are called, not where their forward is."

    def __init__(self, *names: str | type[Module]) -> None:
        self._names, self.expects = names, frozenset(names)
        self._classes = tuple(name for name in names if isinstance(name, type))
        patterns = "|".join(name_expression(name) for name in names if isinstance(name, str))
        self._expression = rf"(?:.*\.)?(?:{patterns or '(?!)'})"  # the end of the name: the model may stand in another one
        words = [repr(name) if isinstance(name, str) else name.__name__ for name in names]
        self.meaning = f"keeps the results of what runs in modules {', '.join(words)}"
        # Whether modules are named: by outermost module, and the identity of the dictionary, which a checkpointed one shares.
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
        if called[0] is None or not self._has_one(called):
            return False
        self.expects = frozenset()
        return True

    def _has_one(self, called: list[Any]) -> bool:
        table = self.tables.setdefault(called[-1], {})
        for module in called:
            found = table.get(id(vars(module)))
            if found is None or found[0]() is None:  # a module added since
                named = [("", module), *called[-1].named_modules()]
                table.update({id(vars(one)): (weakref.ref(one), self._is_meant(name, None)) for name, one in named})
                found = table[id(vars(module))]
            if found[1] or isinstance(module, self._classes):
                return True
        return False

    def _is_meant(self, name: str, kind: Any) -> bool:
        name = re.sub(r"\.forward\._reference\(\)|\.__wrapped__", "", name)  # from a region to its module, in compiled code
        by_class = isinstance(kind, type) and issubclass(kind, self._classes)
        return by_class or re.fullmatch(self._expression, name) is not None


@makes_policies
def save_modules(*names: str | type[Module]) -> Policy:
    """Returns a policy which keeps the results of what runs in some modules, modules inside of them included.

    Kept are results of operators, and of custom functions with kernels that no operator shows, until backward has used them, if
    a saved tensor depends on them. The stack of Python tells which modules run, at some five microseconds for each operator of
    a region under this policy. A module runs where it is called: not where its ``forward`` is called by hand, nor inside of
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
