"""The checkpointing switch of a Transformers model, and the object which stands in its place while regions are in force.

Transformers is not imported: a model is known by its methods. The public switch takes no function, and calls the method
``SWITCH``, which puts the function into the attribute ``FUNCTION`` of modules.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.nn import Module

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.misuse import described_as, wrong
from ckpt_hooks.modules.forward import RegionRunner, region_forward_of
from ckpt_hooks.modules.own_switches import FUNCTION, SWITCH, calls_function, calls_torch
from ckpt_hooks.modules.selecting import ends_of

#: The attribute of a module whose layers are checkpointed while it is True.
FLAG = "gradient_checkpointing"


class Taken:
    """The functions for ``gradient_checkpointing_func`` of one model, by names of modules."""

    def __init__(
        self, recorded: bool, options: dict[str, Any], planned: Mapping[str, RegionRunner] | None, keep: tuple[int, int]
    ) -> None:
        self.recorded, self.options, self.planned = recorded, options, planned
        self.keep = keep  # how many layers are left without regions, from the first and from the last
        self._runners: dict[str, RegionRunner] = dict(planned or {})

    def runner(self, name: str) -> RegionRunner:
        if name not in self._runners:
            self._runners[name] = RegionRunner(self.recorded, {"name": name, **self.options})
        return self._runners[name]

    def has(self, function: Any) -> bool:
        return any(runner is function for runner in self._runners.values())


class TakenSwitch:
    """Stands in a model's attributes for the method by which Transformers switches checkpointing on and off."""

    # So a trainer that calls the public switch switches these regions. Copies and pickles belong to the copied model.
    __slots__ = ("_before", "_n", "_name", "_owner", "handle", "kept", "taken")

    def __init__(self, owner: Module, name: str, n: int, taken: Taken) -> None:
        self._owner = weakref.ref(owner)  # which holds this object
        self._name, self._n, self.taken = name, n, taken
        self._before: Any = None
        self.kept: Sequence[str] = ()  # names of the layers left without regions
        self.handle: Callable[[], Any] = lambda: None  # the handle of the regions; none in copies

    def __reduce__(self) -> tuple[Any, ...]:
        return TakenSwitch, (self._owner(), self._name, self._n, self.taken)

    @property
    def __self__(self) -> Module | None:
        return self._owner()

    def put(self) -> None:
        owner = self._owner()
        if owner is not None:
            before = vars(owner).get(SWITCH)
            self._before = None if type(before) is TakenSwitch else before
            vars(owner)[SWITCH] = self

    def remove(self) -> None:
        owner = self._owner()
        if owner is not None and vars(owner).get(SWITCH) is self:
            del vars(owner)[SWITCH]
            if self._before is not None:
                vars(owner)[SWITCH] = self._before

    def __call__(self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1) -> None:
        """Switches the regions on or off, as the method of Transformers does; the function given is left out."""
        # ``every_n_layers`` of 1 stands for the number that the regions were made with.
        owner, taken = self._owner(), self.taken
        switch = None if owner is None else switch_of(owner)
        if owner is None or switch is None:
            return
        flagged = {name: module for name, module in owner.named_modules() if hasattr(module, FLAG)}
        runner = taken.runner(self._name or type(owner).__name__)
        n = self._n if every_n_layers == 1 else every_n_layers
        if enable:
            _warn_of_options(gradient_checkpointing_func)
            _switch_on(owner, switch, taken, runner, n, flagged.values())
        else:
            switch(owner, enable=False, gradient_checkpointing_func=runner)
        for name, module in flagged.items():
            setattr(module, FUNCTION, taken.runner(self._path(name) or type(owner).__name__))
            if taken.planned is not None and self._path(name) not in taken.planned:
                setattr(module, FLAG, False)
        on = [(name, one) for name, one in flagged.items() if getattr(one, FLAG) and calls_function(one)]
        kept = ends_of(on, *taken.keep) if enable else []
        for _, module in kept:
            setattr(module, FLAG, False)
        self.kept = [self._path(name) for name, _ in kept]

    def _path(self, name: str) -> str:
        return ".".join(part for part in (self._name, name) if part)


#: Options of torch's checkpoint that change nothing for regions of this package.
_WITHOUT_EFFECT = frozenset({"use_reentrant", "preserve_rng_state", "debug", "early_stop", "determinism_check"})


def _warn_of_options(function: Any) -> None:
    """Warns where the model's own switch was called with options which these regions leave out."""
    if function is None:
        return
    options = getattr(function, "keywords", {})
    inner = getattr(function, "func", function)
    left_out = sorted(set(options) - _WITHOUT_EFFECT)
    if getattr(inner, "__module__", None) == "torch.utils.checkpoint" and not left_out:
        return
    words = f"the options {', '.join(left_out)}" if left_out else f"the function {getattr(inner, '__qualname__', inner)}"
    warn_user(
        f"the model's own checkpointing switch was called with {words}, but enable_in_transformers is in force, whose regions "
        "leave them out. Pass options to enable_in_transformers (`offload_inputs=True` for an offload), or call the undo() of "
        "its handle before."
    )


def transformers_model(model: Any) -> Any:
    """Returns the Transformers model: the argument, or the model inside one of PEFT."""
    if isinstance(model, Module):
        owner = getattr(getattr(model, SWITCH, None), "__self__", None)
        if isinstance(owner, Module):
            return owner
        inside = next((name for name, module in model.named_modules() if hasattr(type(module), SWITCH)), None)
        if inside is not None:
            raise TypeError(
                f"model should be a Transformers model, but got {described_as(model)}, which has one inside. Pass the one "
                f"inside: `enable_in_transformers(model.{inside})`."
            )
    raise TypeError(
        f"model should be a Transformers model, but got {described_as(model)}. Pass other modules to "
        "`ckpt_hooks.apply_checkpointing(model, layers)`."
    )


def switch_of(owner: Module) -> Callable[..., Any] | None:
    """Returns the switch which takes a function, of the model's class or of a class above; None if there is none."""
    # Some models (Grounding DINO, OmDet-Turbo, models on the Hub) override the switch by one of before 4.35, which takes none.
    for kind in type(owner).__mro__:
        switch = vars(kind).get(SWITCH)
        if switch is not None and "gradient_checkpointing_func" in inspect.signature(switch).parameters:
            return switch  # type: ignore[no-any-return]
    return None


def check_support(owner: Any, flagged: dict[str, Module]) -> None:
    """Refuses a model without a switch or layers to switch on, or with regions of this package."""
    name, advice = type(owner).__name__, "Write `ckpt_hooks.apply_checkpointing(model, layers)`."
    if switch_of(owner) is None:
        raise RuntimeError(f"The method {SWITCH} of {name} takes no gradient_checkpointing_func, new in 4.35. {advice}")
    if not getattr(owner, "supports_gradient_checkpointing", True):
        raise ValueError(f"{name} does not support the checkpointing switch of Transformers. {advice}")
    for module in flagged.values():
        if calls_torch(module):
            raise ValueError(
                f"{type(module).__name__} in {name} calls torch.utils.checkpoint itself. Call the model's public switch within "
                "`ckpt_hooks.patch_torch(reentrant=True)`, or write `ckpt_hooks.apply_checkpointing(model, layers)`."
            )
    if not any(map(calls_function, flagged.values())):
        raise ValueError(f"The checkpointing switch of Transformers switches nothing on in {name}. {advice}")
    for path, module in flagged.items():
        if region_forward_of(module) is not None:
            raise RuntimeError(
                f"{path!r} of {name} is a region by apply_checkpointing. Call `ckpt_hooks.remove_checkpointing(model)` before."
            )
        if isinstance(vars(module).get(FUNCTION), RegionRunner) and getattr(module, FLAG):
            public = "activation" if hasattr(owner, "activation_checkpointing_disable") else "gradient"
            raise RuntimeError(
                f"{path!r} of {name} is a region by enable_in_transformers already. Call undo() of what the earlier call "
                f"returned before, or `model.{public}_checkpointing_disable()`."
            )


def planned_layers(plan: Any, model: Module, owner: Module) -> dict[str, RegionRunner]:
    """Returns the functions of a plan for the layers of a Transformers model, by their names in that model."""
    if isinstance(plan, type) or not callable(getattr(plan, "runners", None)):
        raise wrong(plan, "plan", "a Plan of ckpt_hooks.plan_memory", "Pass one.")
    modules, names = dict(model.named_modules()), {id(module): name for name, module in owner.named_modules()}
    found = {}
    for block, runner in plan.runners().items():
        module = modules.get(block)
        if module is None or not hasattr(module, FLAG) or not calls_function(module):
            raise ValueError(
                f"Block {block!r} of the plan is no layer which the checkpointing switch of {type(owner).__name__} calls. "
                "Write `plan.apply(model)`, or plan with the layers of the switch as blocks."
            )
        found[names[id(module)]] = runner
    return found


def _switch_on(owner: Module, switch: Any, taken: Taken, runner: RegionRunner, n: int, flagged: Collection[Module]) -> None:
    """Calls the switch for each n-th layer."""
    if n == 1 and not any(taken.keep):
        switch(owner, enable=True, gradient_checkpointing_func=runner)
    elif "every_n_layers" in inspect.signature(switch).parameters:  # in 5.18 and 5.23, not yet in 5.0
        switch(owner, enable=True, gradient_checkpointing_func=runner, every_n_layers=n)
    else:
        # By name: Transformers is not imported here, and has no such class before 4.52.
        classes = ((module, {kind.__name__ for kind in type(module).__mro__}) for module in flagged)
        layers = [module for module, names in classes if "GradientCheckpointingLayer" in names]
        if not layers and any(calls_function(module) for module in flagged):
            keep = "keep_first={}, keep_last={}".format(*taken.keep)
            raise ValueError(
                f"every_n_layers={n}, {keep}, but the switch of {type(owner).__name__} knows no layers: there is no "
                "GradientCheckpointingLayer, which Transformers has since 4.52. Write "
                f"`ckpt_hooks.apply_checkpointing(model, ckpt_hooks.every({n}))`."
            )
        switch(owner, enable=True, gradient_checkpointing_func=runner)
        for index, module in enumerate(layers):
            setattr(module, FLAG, index % n == 0)
