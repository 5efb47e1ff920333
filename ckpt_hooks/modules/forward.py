"""The ``forward`` of a module whose calls are regions, and a model's own checkpointing switch.

Models of Transformers, diffusers, timm and open_clip have such a switch. If the switch is on around or inside a region, model
and region both recompute.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch.nn import Module

from ckpt_hooks._checkpoint.checkpoint import checkpoint
from ckpt_hooks._checkpoint.chunks import Chunks, chunks_among, run_in_chunks
from ckpt_hooks._checkpoint.region import checkpoint_region
from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.misuse import check_runs, checked_flag, unknown_error
from ckpt_hooks._function.contexts import ContextPair
from ckpt_hooks._options import DeterminismCheck, Form, options_of
from ckpt_hooks._state.places import class_attribute
from ckpt_hooks._torch.compiling import skipped

#: In Transformers, since 4.35, and in diffusers: the attribute of a module that holds its checkpoint function.
FUNCTION = "_gradient_checkpointing_func"
#: In Transformers, since 4.35: the method of a model that sets the flag and the function of its modules.
SWITCH = "_set_gradient_checkpointing"

#: The names of a module's flag: the first in Transformers and diffusers, the second in timm and open_clip.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
_FUNCTIONS = frozenset({FUNCTION, "checkpoint", "checkpoint_seq", "checkpoint_sequential"})


def calls_function(module: Module) -> bool:
    """Whether a module calls the function that the switch sets."""
    return FUNCTION in _names_in(type(module))


def calls_torch(module: Module) -> bool:
    """Whether a module calls torch's checkpoint, and not the function that the switch sets."""
    return "checkpoint" in _names_in(type(module)) and not calls_function(module)


#: A cache by class, since some trainers flip the switch in each step, for the pass of a reference model.
_names: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def _names_in(kind: type) -> set[str]:
    """Returns the globals and attributes named in the methods of a class, and in their decorators."""
    if kind in _names:
        return _names[kind]
    methods: dict[str, Any] = {}
    for base in kind.__mro__:
        # ``PreTrainedModel`` is left out: its switch names the function, but does not call it.
        if base is not Module and not {SWITCH, "save_pretrained"} <= vars(base).keys():
            methods = {**vars(base), **methods}
    names: set[str] = set()
    for method in methods.values():
        while method is not None:
            if inspect.isfunction(method):
                names.update(method.__code__.co_names)
            method = getattr(method, "__wrapped__", None) if callable(method) else None
    _names[kind] = names
    return names


class OwnSwitch:
    """The flags of a model's own switch in modules around and inside a region."""

    __slots__ = ("_modules", "_told", "region")

    def __init__(self, region: str, modules: Iterable[tuple[str, Module]], told: list[str]) -> None:
        self.region, self._told = region, told
        flags = ((name, module, flag) for name, module in modules for flag in _FLAGS if hasattr(module, flag))
        self._modules = [(name, weakref.ref(module), flag) for name, module, flag in flags]

    def look(self, *, runs: bool = True) -> None:
        """Warns once for each model if its own switch is on; for a call of the region (``runs``) only in training."""
        if self._told or (runs and not torch.is_grad_enabled()):
            return
        for name, reference, flag in self._modules:
            module = reference()
            if module is not None and getattr(module, flag) and (module.training or not runs):
                self._told.append(self.region)
                warn_user(
                    f"{self.region!r} is a region by apply_checkpointing, and the model's own checkpointing is on as well: "
                    f"{flag} of {name!r} is {getattr(module, flag)}. Both recompute. In Transformers "
                    "call `model.gradient_checkpointing_disable()`, or undo apply_checkpointing."
                )
                return


def own_switches(model: Module, regions: Iterable[str]) -> dict[str, OwnSwitch]:
    """Returns the flags of the model's own switch for each region with such flags around or inside."""
    flagged = {
        name: module
        for name, module in model.named_modules()
        if any(hasattr(module, flag) for flag in _FLAGS) and not _FUNCTIONS.isdisjoint(_names_in(type(module)))
    }
    told: list[str] = []
    switches = {}
    for region in regions if flagged else ():
        near = [(name, module) for name, module in flagged.items() if _is_within(name, region) or _is_within(region, name)]
        if near:
            switches[region] = OwnSwitch(region, near, told)
    return switches


def _is_within(name: str, other: str) -> bool:
    return not other or f"{name}.".startswith(f"{other}.")


# DataParallel copies a module by this method. Regions replace the method, since the copy would share the object in ``forward``,
# and so run the original module.
_REPLICATE = "_replicate_for_data_parallel"


class RegionKeywords(TypedDict, total=False):
    """Options of regions, for type checkers; ``policy``, ``name`` and ``recorded`` stand in signatures."""

    context_fn: Callable[[], ContextPair]
    determinism_check: DeterminismCheck
    debug: bool
    early_stop: bool
    preserve_rng_state: bool
    respect_saved_tensors_hooks: bool | None
    use_reentrant: bool | None
    preserve_buffers: bool
    offload_inputs: bool
    split_backward: bool
    replay_whole: bool | None


class ModuleKeywords(RegionKeywords, total=False):
    """Options of regions, and the options that cut the first argument of a module."""

    chunks: int | None
    dim: int
    reduce: Literal["sum", "mean"] | None
    chunked: str | Sequence[str]
    check_rows: bool
    chunk_size: int | None


class RegionRunner:
    """Calls functions as regions of either kind, with the same options each time; pickled as these options."""

    def __init__(self, recorded: bool, options: dict[str, Any], chunks: Chunks | None = None) -> None:
        self._made_of = recorded, options, chunks
        self.recorded, self.policy, self.chunks, self.name = recorded, options.get("policy"), chunks, options.get("name")
        region: Any = checkpoint_region(**options) if recorded else checkpoint(**options)
        self._run = region._run if recorded else region.run
        self._region: checkpoint_region | None = region if recorded else None

    @skipped  # after a graph break in the function, Python runs the whole call as a region, as torch's checkpoint does
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.chunks is not None:
            return run_in_chunks(self._run, function, args, kwargs, self.chunks)
        return self._run(function, args, kwargs)

    def region_of(self, root: Any, function: Any, args: Any, kwargs: dict[str, Any]) -> checkpoint_region | None:
        """Returns the recorded region for a call; a plan chooses one by the arguments, or None for a plain call."""
        return self._region

    def __reduce__(self) -> tuple[Any, ...]:
        return RegionRunner, self._made_of


def checked_runner(
    form: Callable[..., Any],
    recorded: Any,
    options: dict[str, Any],
    *,
    of: str | None = None,
    where: str = "",
    cut: Sequence[str] = Chunks._fields,
) -> RegionRunner:
    """Returns the runner for the options of ``form``; ``of`` names the region if ``name`` is no option."""
    is_recorded, options = checked_flag(recorded, "recorded"), {**options}
    chunks = chunks_among(options) if cut else None
    known = ["recorded", *options_of(Form.RECORDED if is_recorded else Form.CURRIED)]
    if of is not None:
        known.remove("name")
    if unknown := [name for name in options if name not in known]:
        kws = () if where else (arg.name for arg in inspect.signature(form).parameters.values() if arg.kind is arg.KEYWORD_ONLY)
        all_known = dict.fromkeys((*kws, *known, *cut))
        raise unknown_error(unknown, all_known, f"{'With recorded=True ' if is_recorded else ''}{form.__name__}{where}")
    return RegionRunner(is_recorded, options if of is None else {**options, "name": of}, chunks)


@skipped  # compiled by Dynamo it would return ``module.forward``, a ``RegionForward``, in place of the bound method
def forward_of_class(module: Module) -> Callable[..., Any]:
    """Returns the ``forward`` of a module's class, bound to the module."""
    forward = class_attribute(type(module), "forward")
    bound: Callable[..., Any] = forward.__get__(module, type(module)) if hasattr(type(forward), "__get__") else forward
    return bound


class RegionForward:
    """Calls a module's forward as a region; copies and pickles belong to the copied module."""

    own_switch: OwnSwitch | None = None  # None in copies

    def __init__(self, module: Module) -> None:
        self.run: RegionRunner | None = None  # None if the module is no region itself, and only has spans
        # Methods of spans that call the function. In ``around``, this module is an end of the span, and the widest span is
        # first. In ``inside``, this module calls both ends: a rerun of this module opens the span again.
        self.around: list[Any] = []
        self.inside: list[Any] = []
        self.replaced: Callable[..., Any] | None = None  # the instance's ``forward`` before; None if only the class has one
        self.is_active = True  # False after removal, when another object in ``forward`` may still call this object
        self._reference = weakref.ref(module)  # weak, since the module holds this object

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        function = self.__wrapped__
        if torch.compiler.is_dynamo_compiling() and self.replaced is None:
            # After a graph break Dynamo passes a bound method to Python as ``module.forward``, which is this object again.
            function = functools.partial(type(self.module).forward, self.module)
        if not self.is_active:
            return function(*args, **kwargs)
        is_traced = torch.compiler.is_dynamo_compiling()  # compiled code has no spans
        if self.own_switch is not None and not is_traced:
            self.own_switch.look()
        for part in () if is_traced else self.inside:
            function = functools.partial(part, function, self.module)
        if self.run is not None:
            function = functools.partial(self.run, function)
        for part in () if is_traced else reversed(self.around):
            function = functools.partial(part, function)
        return function(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward to run; ``inspect.signature`` reads it too."""
        replaced = self.replaced
        return forward_of_class(self.module) if replaced is None else replaced

    @property
    def module(self) -> Module:
        module = self._reference()
        if module is None:
            raise ReferenceError(
                "The module of this forward is gone: a checkpointed forward holds its module weakly. Keep the module, and call "
                "it instead of its forward."
            )
        return module

    @property
    def __globals__(self) -> dict[str, Any]:
        # ``torch.jit.script`` reads globals first, so this error comes before torch's error about missing source code.
        if sys._getframe(1).f_globals.get("__name__") == "torch._jit_internal":
            raise TypeError(
                f"torch.jit.script cannot compile a checkpointed {type(self.module).__name__}. Call "
                "`remove_checkpointing(model)` first."
            )
        variables: dict[str, Any] = getattr(self.__wrapped__, "__globals__", {})
        return variables

    def __getattr__(self, name: str) -> Any:
        if "_reference" not in self.__dict__:  # ``copy`` and ``pickle`` look for methods before they set the state
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def put(self, module: Module) -> None:
        if not hasattr(type(module), "__copy__"):
            # ``copy.copy`` looks for the method only in the class, where it stays: without a region it copies as before.
            type.__setattr__(type(module), "__copy__", _copied)
        variables = vars(module)
        self.replaced = variables.get("forward")
        variables["forward"] = self
        variables[_REPLICATE] = self.replicate

    def remove(self, runner_or_span: object = None) -> None:
        """Removes a runner, the parts of a span, or everything."""
        for parts in (self.around, self.inside):
            for part in [part for part in parts if runner_or_span in (None, part.__self__)]:
                parts.remove(part)
                part.__self__.is_active = False
        name = "a module with a span" if self.run is None else repr(self.run.name)
        self.run = None if runner_or_span in (None, self.run) else self.run
        if self.run is not None or self.around or self.inside:
            return
        module, was_active = self._reference(), self.is_active
        self.is_active = False
        if module is None:
            return
        variables = vars(module)
        if variables.get("forward") is self:
            if self.replaced is None:
                del variables["forward"]
            else:
                variables["forward"] = self.replaced
        elif "forward" in variables and was_active:
            warn_user(
                f"The forward of {name}, a {type(module).__name__}, was replaced after the module became a region. The new "
                "forward stays, without a region. To have the forward of the class again, write `del module.forward`."
            )
        if region_forward_of(module) is self:
            del variables[_REPLICATE]

    def replicate(self) -> Module:
        """Returns a copy of the module as DataParallel makes it, with a forward of its own."""
        module = self.module
        return self.moved_to(type(module)._replicate_for_data_parallel(module))  # type: ignore[no-untyped-call]

    def moved_to(self, copied: Module) -> Module:
        """Gives a copied module, whose attributes still include this object, a forward of its own."""
        variables = vars(copied)
        del variables[_REPLICATE]
        if variables["forward"] is self:
            del variables["forward"]
            forward = RegionForward(copied)
            forward.put(copied)
            parts = {"around": [*self.around], "inside": [*self.inside]}
            forward.__dict__.update(run=self.run, replaced=self.replaced, is_active=self.is_active, **parts)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionForward:
        module = self.module
        copied = memo[id(self)] = RegionForward(memo.get(id(module), module))
        state = {name: value for name, value in vars(self).items() if name != "_reference"}
        copied.__dict__.update(copy.deepcopy({**state, "own_switch": None}, memo))
        return copied

    def __getstate__(self) -> tuple[Any, ...]:
        return self.module, self.run, self.replaced, self.is_active, self.around, self.inside

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        module, self.run, self.replaced, self.is_active, self.around, self.inside = state
        self._reference = weakref.ref(module)


def _copied(module: Module) -> Module:
    copied: Module = copy._reconstruct(module, None, *module.__reduce_ex__(4))  # type: ignore[attr-defined]
    forward = region_forward_of(copied)
    return copied if forward is None else forward.moved_to(copied)


def region_forward_of(module: Module) -> RegionForward | None:
    """Returns the object that makes a module's calls regions, even if ``forward`` is another object by now; or None."""
    forward = getattr(vars(module).get(_REPLICATE), "__self__", None)
    return forward if type(forward) is RegionForward else None


def region_forward_for(module: Module) -> RegionForward:
    """Returns the object that makes a module's calls regions; makes it if there is none."""
    forward = region_forward_of(module)
    if forward is None:
        forward = RegionForward(module)
        forward.put(module)
    return forward


def check_forward(module: Module, name: str) -> None:
    """Raises unless a module's ``forward`` can be replaced."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{name!r} is a TorchScript module, whose forward cannot be replaced. Write `checkpoint(module, x)`.")
    if inspect.isdatadescriptor(forward := class_attribute(type(module), "forward")):
        raise ValueError(
            f"{name!r} is a {type(module).__name__}, whose forward is a {type(forward).__name__} and cannot be replaced by an "
            "attribute. Write `checkpoint(module, x)`."
        )
    if "forward" not in vars(module):
        forward = forward_of_class(module)
        if getattr(forward, "__func__", None) is Module.forward:
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, which has no forward. Select the modules inside: {f'{name}.*'!r}."
            )
        check_runs(forward)
