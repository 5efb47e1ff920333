"""``enable_in_transformers``: the checkpointing switch of a Transformers model, with the regions of this package.

Transformers is not imported: a model is known by its methods. Private names of Transformers used here:

- ``_set_gradient_checkpointing(enable, gradient_checkpointing_func)``, a method of models since 4.35. The public switch takes
  no function. The method has ``every_n_layers`` in 5.18 and 5.23, and not yet in 5.0.
- ``_gradient_checkpointing_func``, since 4.35: the attribute of a module where the method puts the function.
- ``GradientCheckpointingLayer``, since 4.52: the class of a layer which calls this function. Before, stacks of layers call it.
- ``_require_grads_hooks``, in 5.18 and 5.23, and ``_require_grads_hook``: hooks on the input embeddings.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module, ModuleList
from typing_extensions import Self

from ckpt_hooks._checkpoint.checkpoint import checkpoint
from ckpt_hooks._core.misuse import checked_flag, described_as
from ckpt_hooks._recorded.traced import traced_region
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks.modules import AppliedCheckpointing, AppliedRegion, apply_checkpointing, every
from ckpt_hooks.modules.forward import region_forward_of
from ckpt_hooks.region import checkpoint_region

from .patch_torch import TorchPatch, patch_torch

__all__ = ["EnabledCheckpointing", "enable_in_transformers"]

_SWITCH, _FUNCTION, _FLAG = "_set_gradient_checkpointing", "_gradient_checkpointing_func", "gradient_checkpointing"
_HOOKS = ("_require_grads_hooks", "_require_grads_hook")
_ABSENT = object()


def enable_in_transformers(
    model: Module,
    *,
    policy: Any = None,
    every_n_layers: int = 1,
    recorded: bool = False,
    input_require_grads: bool = False,
    **options: Any,
) -> EnabledCheckpointing:
    """Switches checkpointing on in a Transformers model, by regions of this package.

    The layers are those of Transformers' own switch (``model.activation_checkpointing_enable()``, and
    ``model.gradient_checkpointing_enable()`` before 5.23), which this call replaces. As there, layers are regions in training
    mode only (``model.train()``), and get no key-value cache.

    Some modules call ``torch.utils.checkpoint`` themselves and take no function (Grounding DINO's decoder, CLVP's conditioning
    encoder). The entries of their module lists become regions by :func:`ckpt_hooks.apply_checkpointing`.

    Do not set ``gradient_checkpointing=True`` in ``TrainingArguments`` as well: the trainer would call Transformers' own
    switch after this one, and torch's checkpointing would run.

    Args:
        model: A Transformers model, or a model of PEFT around one.
        policy: The outputs to keep: a policy of :mod:`ckpt_hooks.policies`, a list of operators, or a function.
        every_n_layers: Makes each n-th layer a region, beginning with the first, as Transformers counts them.
        recorded: Whether backward replays operators, as :class:`ckpt_hooks.checkpoint_region` does, instead of calling
            the layer again, as :func:`ckpt_hooks.checkpoint` does.
        input_require_grads: Whether the outputs of input embeddings require grad, as after Transformers' own switch. Reentrant
            checkpointing needs that to train adapters on a frozen model. The regions of this package do not. Without it,
            frozen layers below the first trained one keep nothing and take no part in backward.
        **options: Other options of :func:`ckpt_hooks.checkpoint`, or of :class:`ckpt_hooks.checkpoint_region` if ``recorded``.
            Regions have the names of their modules.

    Returns:
        A handle: ``undo()`` leaves the model as it was, and so does the end of a ``with`` block. ``regions`` names the modules
        whose checkpointing is on.

    Raises:
        TypeError: If ``model`` is no Transformers model, or an option has a value of another kind.
        ValueError: If the model has no layer which can be checkpointed so, or an option has a wrong value.
        RuntimeError: If the model has regions of this package already, or a switch which takes no function and not these
            options.

    Note:
        Shown with Transformers 4.46, 4.57, 5.0 and 5.23; ``every_n_layers`` needs 4.52. A deep copy of the model has regions
        too, which the handle does not undo. In releases whose switch takes no function (before 4.35), the public switch is
        called, and :func:`ckpt_hooks.patch_torch` is in force until ``undo()``.

    Example:
        >>> from ckpt_hooks.integrations import enable_in_transformers
        >>> from ckpt_hooks.policies import dots_saveable
        >>> def train(model, batch):
        ...     with enable_in_transformers(model.train(), policy=dots_saveable):
        ...         model(**batch).loss.backward()
    """
    owner = _transformers_model(model)
    if isinstance(every_n_layers, bool) or not isinstance(every_n_layers, int) or every_n_layers < 1:
        raise ValueError(f"every_n_layers should be a positive integer, but got {every_n_layers!r}. Pass 1 for every layer.")
    if "name" in options:
        raise ValueError("enable_in_transformers got name, but names each region after its module. Leave it out.")
    recorded = checked_flag(recorded, "recorded")
    input_require_grads = checked_flag(input_require_grads, "input_require_grads")
    options["policy"] = policy
    engine = _Engine(type(owner).__name__, recorded, options)  # checks the options before the model is touched
    switch = _switch_of(owner)
    flagged = {name: module for name, module in owner.named_modules() if hasattr(module, _FLAG)}
    if switch is None:
        return _enable_by_patch(owner, flagged, every_n_layers, recorded, options)
    _check_support(owner, flagged)
    # Modules that call torch's checkpoint on others.
    callers = [module for module in flagged.values() if _calls_torch(module)]

    handle = EnabledCheckpointing(owner, flagged.values(), input_require_grads)
    applied: Iterable[AppliedRegion] = ()
    try:
        if callers:
            entries = _entries_of(owner, callers)
            select = every(every_n_layers, of=lambda name, module: module in entries)
            handle.others = applied = apply_checkpointing(owner, select, recorded=recorded, **options)
        _switch_on(owner, switch, handle.take(engine), every_n_layers, flagged.values())
        for module in callers:
            setattr(module, _FLAG, False)
        for name, module in flagged.items():
            setattr(module, _FUNCTION, handle.take(_Engine(name or type(owner).__name__, recorded, options)))
        if input_require_grads:
            owner.enable_input_require_grads()
    except BaseException:
        handle.undo()
        raise
    handle.regions = (
        *(name for name, module in flagged.items() if getattr(module, _FLAG) and _calls_function(module)),
        *(region.name for region in applied),
    )
    return handle


class _Engine:
    """A function for ``gradient_checkpointing_func``: its calls are regions of one name.

    Copied and pickled with the model, by its options.
    """

    def __init__(self, name: str, recorded: bool, options: dict[str, Any]) -> None:
        self._made_of = name, recorded, options
        self._region: Any = checkpoint_region(name=name, **options) if recorded else checkpoint(name=name, **options)
        self._recorded = recorded

    @skipped  # after a graph break in the function, Python runs all of it in a region, as with torch's function
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function as a region."""
        region = self._region
        if not self._recorded:
            return region.run(function, args, kwargs)
        with traced_region(self._made_of[2]["policy"], lambda: region) if torch.compiler.is_dynamo_compiling() else region:
            return function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Engine, self._made_of


class EnabledCheckpointing:
    """Checkpointing switched on in a Transformers model: the result of :func:`enable_in_transformers`.

    As a context manager, undoes itself at the end of the block. Holds no module.

    Attributes:
        regions: Names of the modules whose checkpointing is on: layers, or stacks of layers in releases before 4.52.
        others: Regions on entries of modules which call torch's checkpoint themselves, or a patch; None without.
        disable: The name of the model's public switch, if that was called.
    """

    regions: tuple[str, ...] = ()
    others: AppliedCheckpointing | TorchPatch | None = None
    disable: str | None = None

    def __init__(self, owner: Module, flagged: Iterable[Module], input_require_grads: bool) -> None:
        """Notes the attributes which the switch changes.

        Args:
            owner: The model.
            flagged: Its modules with a flag for checkpointing.
            input_require_grads: Whether hooks are put on the input embeddings.
        """
        self._model = type(owner).__name__
        self._before = [(weakref.ref(module), _attributes(module, (_FLAG, _FUNCTION))) for module in flagged]
        self._functions: list[_Engine] = []
        self._owner = weakref.ref(owner)
        self._hooks = _attributes(owner, _HOOKS) if input_require_grads else None
        if self._hooks is not None:
            _put_back(owner, dict.fromkeys(_HOOKS, _ABSENT))  # a second switch would lose the hooks of the first

    def take(self, function: _Engine) -> _Engine:
        """Notes a function which the model is given, and returns the function."""
        self._functions.append(function)
        return function

    def undo(self) -> None:
        """Leaves the model as it was, but for modules switched by Transformers since. A second call does nothing."""
        own, owner = set(map(id, self._functions)), self._owner()
        if self.disable is not None and owner is not None and self._before:
            getattr(owner, self.disable)()
        for reference, attributes in self._before:
            module = reference()
            if module is not None and (self.disable is not None or id(vars(module).get(_FUNCTION)) in own):
                _put_back(module, attributes)
        if self._hooks is not None and owner is not None:
            if _HOOKS[1] in vars(owner):  # not where the switch failed before
                owner.disable_input_require_grads()  # type: ignore[operator]
            _put_back(owner, self._hooks)
        if self.others is not None:
            self.others.undo()
        self._before, self._hooks = [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        count = f"{len(self.regions)} {'region' if len(self.regions) == 1 else 'regions'}"
        return f"<EnabledCheckpointing in {self._model}: {count if self._before else 'undone'}>"


def _attributes(module: Module, names: Iterable[str]) -> dict[str, Any]:
    return {name: vars(module).get(name, _ABSENT) for name in names}


def _put_back(module: Module, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is not _ABSENT:
            vars(module)[name] = value
        else:
            vars(module).pop(name, None)


# The model and its switch


def _transformers_model(model: Any) -> Any:
    """Returns the Transformers model: the argument, or the model inside one of PEFT."""
    if isinstance(model, Module):
        owner = getattr(getattr(model, _SWITCH, None), "__self__", None)
        if isinstance(owner, Module):
            return owner
        inside = next((name for name, module in model.named_modules() if hasattr(type(module), _SWITCH)), None)
        if inside is not None:
            raise TypeError(
                f"model should be a Transformers model, but got {described_as(model)}, which has one inside. Pass the one "
                f"inside: `enable_in_transformers(model.{inside})`."
            )
    raise TypeError(
        f"model should be a Transformers model, but got {described_as(model)}. Pass other modules to "
        "`ckpt_hooks.apply_checkpointing(model, layers)`."
    )


def _switch_of(owner: Module) -> Callable[..., Any] | None:
    """Returns the switch which takes a function, of the model's class or of a class above; None if there is none.

    Some models (Grounding DINO, OmDet-Turbo, models on the Hub) override the switch by one of before 4.35, which takes none.
    """
    for kind in type(owner).__mro__:
        switch = vars(kind).get(_SWITCH)
        if switch is not None and "gradient_checkpointing_func" in inspect.signature(switch).parameters:
            return switch  # type: ignore[no-any-return]
    return None


def _enable_by_patch(
    owner: Any, flagged: dict[str, Module], n: int, recorded: bool, options: dict[str, Any]
) -> EnabledCheckpointing:
    """Calls the model's public switch, and diverts torch's checkpoint."""
    public = next((word for word in ("activation", "gradient") if hasattr(owner, f"{word}_checkpointing_enable")), None)
    enable = getattr(owner, f"{public}_checkpointing_enable", None)
    known = inspect.signature(enable).parameters if enable is not None else {}
    if enable is None or recorded or len(options) > 1 or (n > 1 and "every_n_layers" not in known):
        raise RuntimeError(
            f"The method {_SWITCH} of {type(owner).__name__} takes no gradient_checkpointing_func, as it does in Transformers "
            "4.35 to 5.23. The public switch, under patch_torch, takes policy alone. Leave other options out, or write "
            "`ckpt_hooks.apply_checkpointing(model, layers)`."
        )
    keywords: dict[str, Any] = {f"{public}_checkpointing_kwargs": {"use_reentrant": False}, "every_n_layers": n}
    handle = EnabledCheckpointing(owner, flagged.values(), False)
    handle.disable, handle.others = f"{public}_checkpointing_disable", patch_torch(reentrant=True, policy=options["policy"])
    try:
        enable(**{keyword: value for keyword, value in keywords.items() if keyword in known})
    except BaseException:
        handle.undo()
        raise
    handle.regions = tuple(name for name, module in flagged.items() if getattr(module, _FLAG))
    return handle


def _check_support(owner: Any, flagged: dict[str, Module]) -> None:
    name, advice = type(owner).__name__, "Write `ckpt_hooks.apply_checkpointing(model, layers)`."
    if not getattr(owner, "supports_gradient_checkpointing", True):
        raise ValueError(f"{name} does not support the checkpointing switch of Transformers. {advice}")
    if not any(_calls_function(module) or _calls_torch(module) for module in flagged.values()):
        raise ValueError(f"The checkpointing switch of Transformers switches nothing on in {name}. {advice}")
    for path, module in flagged.items():
        if region_forward_of(module) is not None:
            raise RuntimeError(
                f"{path!r} of {name} is a region by apply_checkpointing. Call `ckpt_hooks.remove_checkpointing(model)` before."
            )
        if type(vars(module).get(_FUNCTION)) is _Engine and getattr(module, _FLAG):
            public = "activation" if hasattr(owner, "activation_checkpointing_disable") else "gradient"
            raise RuntimeError(
                f"{path!r} of {name} is a region by enable_in_transformers already. Call undo() of what the earlier call "
                f"returned before, or `model.{public}_checkpointing_disable()`."
            )


def _switch_on(owner: Module, switch: Callable[..., Any], engine: _Engine, n: int, flagged: Collection[Module]) -> None:
    """Calls the switch for each n-th layer."""
    if n == 1:
        switch(owner, enable=True, gradient_checkpointing_func=engine)
    elif "every_n_layers" in inspect.signature(switch).parameters:
        switch(owner, enable=True, gradient_checkpointing_func=engine, every_n_layers=n)
    else:
        layers = [module for module in flagged if _is_layer(module)]
        if not layers and any(_calls_function(module) for module in flagged):
            raise ValueError(
                f"every_n_layers={n}, but the switch of {type(owner).__name__} knows no layers: there is no "
                "GradientCheckpointingLayer, which Transformers has since 4.52. Write "
                f"`ckpt_hooks.apply_checkpointing(model, ckpt_hooks.every({n}))`."
            )
        switch(owner, enable=True, gradient_checkpointing_func=engine)
        for index, module in enumerate(layers):
            setattr(module, _FLAG, index % n == 0)


def _is_layer(module: Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


# Who calls what


def _calls_function(module: Module) -> bool:
    """Whether a module calls the function which the switch puts there."""
    return any(_FUNCTION in names for names in _names_in(type(module)))


def _calls_torch(module: Module) -> bool:
    """Whether a module calls torch's checkpoint, and not the function which the switch puts there."""
    return not _calls_function(module) and any("checkpoint" in names for names in _names_in(type(module)))


def _names_in(kind: type) -> Iterator[tuple[str, ...]]:
    """Yields the globals and attributes named in each method of a class, and in each function which decorates it."""
    methods: dict[str, Any] = {}
    for base in kind.__mro__:
        if base is not Module and not {_SWITCH, "save_pretrained"} <= vars(base).keys():  # PreTrainedModel has the switch
            methods = {**vars(base), **methods}
    for method in methods.values():
        while method is not None:
            if inspect.isfunction(method):
                yield method.__code__.co_names
            method = getattr(method, "__wrapped__", None) if callable(method) else None


def _entries_of(owner: Module, callers: Iterable[Module]) -> set[Module]:
    """Returns the entries of the module lists of modules which call torch's checkpoint.

    Raises:
        ValueError: If there are none.
    """
    found: set[Module] = set()
    for module in callers:
        entries = [entry for child in module.children() if isinstance(child, ModuleList) for entry in child]
        if not entries:
            raise ValueError(
                f"{type(module).__name__} in {type(owner).__name__} calls torch.utils.checkpoint itself, and has no list of "
                "layers. Call the model's public switch within `ckpt_hooks.integrations.patch_torch()`, or write "
                "`ckpt_hooks.apply_checkpointing(model, layers)`."
            )
        found.update(entries)
    return found
