"""Places in the user's program: the present line, and the module whose forward runs."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import re
import sys
import types
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_hooks._torch.modes import MODULE_CALL
from ckpt_hooks._torch.tensors import storage_of

#: A place in a program, cheap to note: the code, its line, the innermost called module, and whether the line is inside of the
#: innermost region.
CallSite = tuple[types.CodeType | None, int, "weakref.ref[torch.nn.Module] | None", bool]

#: A cache by file name: whether the file belongs to this package or torch, and whether it belongs to this package.
_FILES: dict[str, tuple[bool, bool]] = {}

_MOST = 6  # how many callers of an operator's line are searched for a module's call: each operator pays for the search


def is_library_frame(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("ckpt_hooks", "torch")


def warn_user(message: str) -> None:
    """Warns at the innermost line of the user's program."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and is_library_frame(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def site_of(frame: types.FrameType | None) -> str | None:
    """Returns the innermost line outside of this package and of torch, as in ``"model.py:12"``; None without such a line."""
    while frame is not None and is_library_frame(frame):
        frame = frame.f_back
    return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def name_expression(pattern: str) -> str:
    """Returns a regular expression for a name pattern: ``*`` for a part of a name, ``**`` for any number of parts."""
    parts = (".*" if part == "**" else "[^.]*".join(map(re.escape, part.split("*"))) for part in pattern.split("."))
    return r"\.".join(parts)


def called_modules(frame: types.FrameType | None) -> list[Any]:
    """Returns the modules whose calls run, innermost first; ``[None]`` where no module is called."""
    modules = []
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules or [None]


def module_in_call(module: torch.nn.Module | None) -> str | None:
    """Returns a module's name within the outermost called module, or None; by default the innermost called module's name."""
    called = called_modules(sys._getframe(1))
    module = called[0] if module is None else module
    if called[-1] is None:
        return None if module is None else ""
    return next((name for name, candidate in called[-1].named_modules() if candidate is module), None)


def _look_at(frame: types.FrameType) -> tuple[bool, bool]:
    name = frame.f_code.co_filename
    ownership = is_library_frame(frame), frame.f_globals.get("__name__", "").partition(".")[0] == "ckpt_hooks"
    if not name.startswith("<"):  # not cached: several modules may share a name such as "<string>"
        _FILES[name] = ownership
    return ownership


def call_site_of(frame: types.FrameType | None) -> CallSite:
    """Returns an operator's place: the innermost line outside of this package and of torch, and the innermost called module."""
    module, is_inside = None, True
    while frame is not None:
        code = frame.f_code
        if code is MODULE_CALL and module is None:
            module = weakref.ref(frame.f_locals["self"])
        of_library, of_package = _FILES.get(code.co_filename) or _look_at(frame)
        if not of_library:
            break
        if of_package:
            is_inside = False
        frame = frame.f_back
    if frame is None:
        return None, 0, module, False
    place, line, count = frame.f_code, frame.f_lineno, 0
    while module is None and count < _MOST and (caller := frame.f_back) is not None:
        frame, count = caller, count + 1
        if frame.f_code is MODULE_CALL:
            module = weakref.ref(frame.f_locals["self"])
    return place, line, module, is_inside


def place_in_words(place: CallSite, names: Mapping[int, str]) -> str:
    code, line, reference, _ = place
    module = None if reference is None else reference()
    words = "an unknown line" if code is None else f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}()"
    if module is not None:
        name = names.get(id(vars(module)), "")
        words += f", module {name} ({type(module).__name__})" if name else f", module {type(module).__name__}"
    text = "" if code is None else linecache.getline(code.co_filename, line).strip()
    return f"{words}: {text}" if text else words


def module_names(reference: weakref.ref[torch.nn.Module] | None) -> dict[int, str]:
    """Returns the names of modules in a model, by ``id`` of ``__dict__``: ``checkpoint(module)`` shares the module's."""
    root = None if reference is None else reference()
    names: dict[int, str] = {}
    for name, module in () if root is None else root.named_modules():
        names.setdefault(id(vars(module)), name)
    return names


def outermost_module(otherwise: Any = None) -> weakref.ref[torch.nn.Module] | None:
    """Returns a weak reference to the outermost called module, or else to ``otherwise`` if that is a module."""
    called = called_modules(sys._getframe(1))[-1]
    root = otherwise if called is None else called
    return weakref.ref(root) if isinstance(root, torch.nn.Module) else None


def objects_of(*kinds: type) -> list[Any]:
    """Returns each object of some classes, found in the list of objects of Python's garbage collector."""
    objects = gc.get_objects()
    try:
        classes = {cls for cls in {*map(type, objects)} if issubclass(cls, kinds)}  # five times as quick as asking each object
    except TypeError:  # a class cannot be hashed if its metaclass defines __eq__ without __hash__
        return [object_ for object_ in objects if issubclass(type(object_), kinds)]
    return [object_ for object_ in objects if type(object_) in classes]


def name_in_models(tensor: torch.Tensor) -> str | None:
    """Returns in words the parameter or buffer that shares a tensor's memory; slow, since it looks at all objects."""
    storage = storage_of(tensor)
    if not storage:
        return None
    modules = objects_of(torch.nn.Module)
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    descriptions: list[str] = []
    for root in [module for module in modules if id(module) not in inner]:
        with contextlib.suppress(Exception):  # a user's module may be half built, and raise
            for kind, named in ("parameter", root.named_parameters()), ("buffer", root.named_buffers()):
                for name, value in named:
                    if storage_of(value) == storage:
                        words = f"the {kind} {name!r} of {type(root).__name__}"
                        if (value.storage_offset(), value.shape) == (tensor.storage_offset(), tensor.shape):
                            return words
                        descriptions.append(words)
    return descriptions[0] if len(descriptions) == 1 else None  # with several names it is unknown which is meant
