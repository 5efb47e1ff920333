"""Policies made in a function that ``torch.compile`` traces.

Dynamo would trace their constructors, and build the object when the compiled function runs, long after a region has asked. So
there the functions which make policies return a key, a string, and regions look the policy up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ckpt_hooks._torch.compiling import while_tracing

__all__ = ["key_for", "made_while_tracing", "makes_policies"]

F = TypeVar("F", bound=Callable[..., Any])

# Policies by key, for good: compiled code may be traced again.
_made: dict[str, Any] = {}


def makes_policies(make: F) -> F:
    """Returns a function which makes policies, also where Dynamo traces."""

    @while_tracing
    def key_of(*args: Any, **kwargs: Any) -> str:
        named = {name: made_while_tracing(one) for name, one in kwargs.items()}
        return key_for(make(*map(made_while_tracing, args), **named))

    @functools.wraps(make)
    def policy(*args: Any, **kwargs: Any) -> Any:
        return key_of(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else make(*args, **kwargs)

    return cast("F", policy)


@while_tracing
def key_for(policy: Any) -> str:
    """Returns a new key for a policy, a list of operators, or a function; for Dynamo to call."""
    made = made_while_tracing(policy)
    key = f"policy {len(_made)}: {made!r}"
    _made[key] = made
    return key


def made_while_tracing(value: Any) -> Any:
    """Returns what a key stands for; any other value as it is."""
    return _made.get(value, value) if isinstance(value, str) else value
