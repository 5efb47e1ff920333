"""The checkpointing switch that a model of another package has itself: a flag of modules which call a function when it is set.

Models of Transformers, diffusers, timm and open_clip have one. Modules whose own switch is on, and which are, contain or are
inside of a region of this package, are computed three times: both recompute.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Module

from ckpt_hooks._core.call_sites import warn_user

#: In Transformers, since 4.35, and in diffusers: the attribute of a module that holds the function.
FUNCTION = "_gradient_checkpointing_func"
#: In Transformers, since 4.35: the method of a model which sets the flag and the function of its modules.
SWITCH = "_set_gradient_checkpointing"

#: The flag: in Transformers and diffusers, in timm and open_clip.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
_FUNCTIONS = frozenset({FUNCTION, "checkpoint", "checkpoint_seq", "checkpoint_sequential"})


def calls_function(module: Module) -> bool:
    """Whether a module calls the function which the switch puts there."""
    return FUNCTION in _names_in(type(module))


def calls_torch(module: Module) -> bool:
    """Whether a module calls torch's checkpoint, and not the function which the switch puts there."""
    return "checkpoint" in _names_in(type(module)) and not calls_function(module)


#: The names in each class: trainers switch around the pass of a reference model, in each step.
_names: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def _names_in(kind: type) -> set[str]:
    """Returns the globals and attributes named in the methods of a class, and in functions which decorate them."""
    if kind in _names:
        return _names[kind]
    methods: dict[str, Any] = {}
    for base in kind.__mro__:
        if base is not Module and not {SWITCH, "save_pretrained"} <= vars(base).keys():  # PreTrainedModel has the switch
            methods = {**vars(base), **methods}
    found: set[str] = set()
    for method in methods.values():
        while method is not None:
            if inspect.isfunction(method):
                found.update(method.__code__.co_names)
            method = getattr(method, "__wrapped__", None) if callable(method) else None
    _names[kind] = found
    return found


class OwnSwitch:
    """A model's own switch, as far as the flags of its modules bear on one region."""

    __slots__ = ("_modules", "_told", "region")

    def __init__(self, region: str, modules: Iterable[tuple[str, Module]], told: list[str]) -> None:
        self.region, self._told = region, told
        flags = ((name, module, flag) for name, module in modules for flag in _FLAGS if hasattr(module, flag))
        self._modules = [(name, weakref.ref(module), flag) for name, module, flag in flags]

    def look(self, *, runs: bool = True) -> None:
        """Warns, once a model, where the model's own switch is on; for a call of the region only where that trains."""
        if self._told or (runs and not torch.is_grad_enabled()):
            return
        for name, reference, flag in self._modules:
            module = reference()
            if module is not None and getattr(module, flag) and (module.training or not runs):
                self._told.append(self.region)
                warn_user(
                    f"{self.region!r} is a region by apply_checkpointing, and the model's own checkpointing is on as well: "
                    f"{flag} of {name!r} is {getattr(module, flag)}. Both recompute. Call "
                    "`model.gradient_checkpointing_disable()`, as Transformers has it, or undo apply_checkpointing."
                )
                return


def own_switches(model: Module, regions: Iterable[str]) -> dict[str, OwnSwitch]:
    """Returns the model's own switch for each region that it bears on."""
    flagged = {
        name: module
        for name, module in model.named_modules()
        if any(hasattr(module, flag) for flag in _FLAGS) and not _FUNCTIONS.isdisjoint(_names_in(type(module)))
    }
    told: list[str] = []
    found = {}
    for region in regions if flagged else ():
        near = [(name, module) for name, module in flagged.items() if _is_within(name, region) or _is_within(region, name)]
        if near:
            found[region] = OwnSwitch(region, near, told)
    return found


def _is_within(name: str, other: str) -> bool:
    return not other or f"{name}.".startswith(f"{other}.")
