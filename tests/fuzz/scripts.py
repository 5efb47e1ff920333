"""What a program's source runs in: a namespace here, a script of its own for a reader."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import random
import re
import sys
import threading
import types
import warnings

import torch
import torch.nn.functional as F

import ckpt_hooks

from . import observe, prelude
from .implementations import Implementation

__all__ = ["base_namespace", "load", "load_on", "script"]

_IMPORTS = {
    "collections": collections,
    "ckpt_hooks": ckpt_hooks,
    "contextlib": contextlib,
    "ctypes": ctypes,
    "dataclasses": dataclasses,
    "functools": functools,
    "random": random,
    "sys": sys,
    "threading": threading,
    "torch": torch,
    "types": types,
    "warnings": warnings,
}


def base_namespace() -> dict[str, object]:
    """Returns what programs may name."""
    offered = {name: value for module in (prelude, observe) for name, value in vars(module).items() if name[0] != "_"}
    with contextlib.suppress(ImportError):
        import numpy

        offered["np"] = numpy
    return {**_IMPORTS, "F": F, **offered}


_BASE = base_namespace()


def load(source: str, seed: int):
    """Returns the function that a program's source defines; a traceback, of a crash too, has the seed."""
    namespace = dict(_BASE)
    exec(compile(source, f"<program {seed}>", "exec"), namespace)
    return namespace["program"]


def load_on(device: str, source: str, seed: int):
    """Returns the same function with its tensors on a device: by default, and under autocast of that device.

    What it shows last is where it leaves the device's random stream.
    """
    read_state = getattr(torch.get_device_module(device), "get_rng_state", torch.get_rng_state)
    program = load(source.replace('torch.autocast("cpu"', f"torch.autocast({torch.device(device).type!r}"), seed)

    def there(run, see):
        torch.manual_seed(seed)
        with torch.device(device):
            program(run, see)
        see("stream", device, read_state())

    return there


def _mentions(source: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", source) is not None


def script(source: str, implementation: Implementation, heading: str) -> str:
    """Returns a script that runs a program plainly and under an implementation, and fails if they differ.

    Args:
        source: The program's.
        implementation: What to run its regions with.
        heading: A comment, of one line or more.
    """
    always = [observe.plain, observe.observe, observe.same, observe.difference]
    offered = [value for module in (prelude, observe) for value in vars(module).values() if value not in always]
    offered = [value for value in offered if inspect.isroutine(value) or inspect.isclass(value)]
    sources = {value.__name__: inspect.getsource(value) for value in offered}
    used, size = [], -1
    while len(used) > size:  # what is used by what is used, and so on
        size = len(used)
        used = [text for name, text in sources.items() if any(_mentions(other, name) for other in [source, *used])]
    if any(_mentions(text, "FACTOR") for text in used):
        used.insert(0, 'FACTOR = contextvars.ContextVar("FACTOR", default=1.0)\n')
    text = "\n\n".join([f"{implementation.source}\n", *used, source, *map(inspect.getsource, always)])
    imports = [f"import {name}" for name in sorted([*_IMPORTS, "contextvars"]) if _mentions(text, name)]
    if _mentions(text, "F"):
        imports.append("import torch.nn.functional as F")
    if _mentions(text, "np"):
        imports.append("import numpy as np")
    comment = "\n".join(f"# {line}" for line in heading.splitlines())
    ending = "found = difference(observe(program, plain), observe(program, run))\nassert found is None, found[1]\n"
    return "\n".join([comment, *imports, "", text, "", ending])
