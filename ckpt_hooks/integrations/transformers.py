"""``enable_in_transformers``: the checkpointing switch of a Transformers model, with the regions of this package.

Transformers is not imported: a model is known by its methods. Private names of Transformers used here, with their releases:

- ``PreTrainedModel._set_gradient_checkpointing(enable, gradient_checkpointing_func)``, since 4.35; it takes
  ``every_n_layers`` since some release between 5.0 and 5.18. The public switch takes no function.
- ``_gradient_checkpointing_func``, since 4.35: the attribute of each module where the switch puts the function.
- ``_require_grads_hooks``, since 5.0, and ``_require_grads_hook``: hooks on the input embeddings.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch.nn import Module
from typing_extensions import Self

from ckpt_hooks._checkpoint.checkpoint import checkpoint
from ckpt_hooks._core.misuse import checked_flag, described_as
from ckpt_hooks.region import checkpoint_region

__all__ = ["EnabledCheckpointing", "enable_in_transformers"]

_SWITCH, _FUNCTION, _FLAG = "_set_gradient_checkpointing", "_gradient_checkpointing_func", "gradient_checkpointing"
_HOOKS = ("_require_grads_hooks", "_require_grads_hook")
_ADVICE = "Name its layers to ckpt_hooks.modules.apply_checkpointing instead."
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

    The layers are those of Transformers' own switch (``model.activation_checkpointing_enable()``,
    ``model.gradient_checkpointing_enable()`` before 5.23), which this call replaces. As there, layers are regions in training
    mode only (``model.train()``), and layers in regions get no key-value cache.

    Do not set ``gradient_checkpointing=True`` in ``TrainingArguments`` as well: the trainer would call Transformers' own
    switch after this one, and torch's checkpointing would run.

    Args:
        model: A Transformers model, or a model of PEFT around one.
        policy: Which outputs to keep: a policy of :mod:`ckpt_hooks.policies`, a function, or a list of operators.
        every_n_layers: Makes each n-th layer a region, beginning with the first, as Transformers counts them.
        recorded: Whether a layer is a recorded region (:func:`ckpt_hooks.checkpoint_region`), whose Python does not run again.
        input_require_grads: Whether the outputs of input embeddings require grad, as after Transformers' own switch. Reentrant
            checkpointing needs that to train adapters on a frozen model; the regions of this package do not. Backward then goes
            through frozen layers below the first trained one too.
        **options: Further options of :func:`ckpt_hooks.checkpoint`, or of :func:`ckpt_hooks.checkpoint_region` where
            ``recorded``. Regions have the names of their modules.

    Returns:
        A handle: ``undo()`` leaves the model as it was, and so does the end of a ``with`` block. ``regions`` names the modules
        whose checkpointing is on.

    Raises:
        TypeError: If ``model`` is no Transformers model, or an option has a wrong type.
        ValueError: If no layer of the model can be checkpointed so, or an option has a wrong value.
        RuntimeError: If the regions of this package are on in the model already, or Transformers is too old or too new.

    Note:
        Modules which call ``torch.utils.checkpoint`` themselves (Grounding DINO's decoder, CLVP's conditioning encoder) are
        left without checkpointing, with a warning. A deep copy of the model has regions too, which the handle does not undo.

    Example:
        >>> import torch
        >>> from ckpt_hooks.integrations import enable_in_transformers
        >>> from ckpt_hooks.policies import dots_saveable
        >>> def train(model, batch):
        ...     with enable_in_transformers(model.train(), policy=dots_saveable):
        ...         model(**batch).loss.backward()
    """
    owner = _transformers_model(model)
    every = _checked_number(every_n_layers)
    if "name" in options:
        raise ValueError(f"enable_in_transformers got name={options['name']!r}, but regions have names of modules. Leave it out.")
    recorded = checked_flag(recorded, "recorded")
    engine = _Engine("region", policy, recorded, options)  # checks the options before the model is touched
    requires_grads = checked_flag(input_require_grads, "input_require_grads")
    switch = _switch_of(owner)
    modules = dict(owner.named_modules())
    _check_support(owner, modules)

    flagged = {name: module for name, module in modules.items() if hasattr(module, _FLAG)}
    before = [(module, _attributes(module, (_FLAG, _FUNCTION))) for module in flagged.values()]
    if every == 1 or "every_n_layers" in inspect.signature(switch).parameters:
        numbers = {} if every == 1 else {"every_n_layers": every}
        switch(owner, enable=True, gradient_checkpointing_func=engine, **numbers)
    else:
        switch(owner, enable=True, gradient_checkpointing_func=engine)
        _thin_out(flagged, every)

    applied: list[_Applied] = []
    for (name, module), (_, attributes) in zip(flagged.items(), before, strict=True):
        own = _Engine(name or type(owner).__name__, policy, recorded, options)
        setattr(module, _FUNCTION, own)
        applied.append(_Applied(weakref.ref(module), own, attributes))
    calling = [name for name, module in flagged.items() if _calls_torch(module)]
    for name in calling:
        setattr(flagged[name], _FLAG, False)
    hooks = _require_grads(owner) if requires_grads else None
    regions = tuple(name for name, module in flagged.items() if getattr(module, _FLAG) and _calls_function(module))
    handle = EnabledCheckpointing(type(owner).__name__, regions, applied, weakref.ref(owner), hooks)
    if calling:
        _leave_out(handle, owner, calling)
    return handle


class _Engine:
    """A function for ``gradient_checkpointing_func``: calls as regions, each of one name.

    Copied and pickled with the model, by its options.
    """

    def __init__(self, name: str, policy: Any, recorded: bool, options: dict[str, Any]) -> None:
        self._made_of = (name, policy, recorded, options)
        self._region: checkpoint_region | None = None
        self._as_region: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        if recorded:
            self._region = checkpoint_region(policy=policy, name=name, **options)
        else:
            self._as_region = checkpoint(policy=policy, name=name, **options)

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a layer as a region."""
        if self._as_region is not None:
            return self._as_region(function)(*args, **kwargs)
        assert self._region is not None
        with self._region:
            return function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Engine, self._made_of


class _Applied:
    """What the switch changed in one module: a weak reference to the module, the function set, the attributes before."""

    __slots__ = ("attributes", "engine", "module")

    def __init__(self, module: weakref.ref[Module], engine: _Engine, attributes: dict[str, Any]) -> None:
        self.module, self.engine, self.attributes = module, engine, attributes

    def undo(self) -> None:
        module = self.module()
        # A switch of Transformers' own since then has set another function, and has the last word.
        if module is not None and vars(module).get(_FUNCTION) is self.engine:
            _put_back(module, self.attributes)


class EnabledCheckpointing:
    """Checkpointing switched on in a Transformers model: the result of :func:`enable_in_transformers`.

    Holds the model weakly.

    Attributes:
        regions: Names of the modules whose checkpointing is on: of layers, or of stacks of layers in releases before 4.53.
    """

    def __init__(
        self,
        model: str,
        regions: tuple[str, ...],
        applied: list[_Applied],
        owner: weakref.ref[Module],
        hooks: dict[str, Any] | None,
    ) -> None:
        self.regions = regions
        self._model, self._applied, self._owner, self._hooks = model, applied, owner, hooks

    def undo(self) -> None:
        """Leaves the model as it was. Does nothing the second time, or where Transformers' own switch was used since."""
        for entry in self._applied:
            entry.undo()
        owner = self._owner()
        if self._hooks is not None and owner is not None:
            owner.disable_input_require_grads()  # type: ignore[operator]
            _put_back(owner, self._hooks)
        self._applied, self._hooks = [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = f"{len(self.regions)} regions" if self._applied else "undone"
        return f"<checkpointing in {self._model}: {state}>"


# The model


def _transformers_model(model: Any) -> Any:
    """Returns the Transformers model which is meant: the model itself, or the model inside one of PEFT."""
    switch = getattr(model, _SWITCH, None) if isinstance(model, Module) else None
    owner = getattr(switch, "__self__", None)
    if isinstance(owner, Module):
        return owner
    if isinstance(model, Module):
        inside = next((name for name, module in model.named_modules() if hasattr(type(module), _SWITCH)), None)
        if inside is not None:
            raise TypeError(
                f"enable_in_transformers takes a Transformers model, but got {described_as(model)}, which has one inside. Pass "
                f"the model inside: `enable_in_transformers(model.{inside})`."
            )
    raise TypeError(
        f"enable_in_transformers takes a Transformers model, but got {described_as(model)}. For other modules, name the layers "
        "to ckpt_hooks.modules.apply_checkpointing instead."
    )


def _switch_of(owner: Module) -> Callable[..., Any]:
    """Returns the switch of a model which takes a function: the latest of its class and of the classes above.

    Some models (Grounding DINO, OmDet-Turbo) override the switch by one of the form before 4.35, which takes none.
    """
    for kind in type(owner).__mro__:
        switch = vars(kind).get(_SWITCH)
        if switch is not None and "gradient_checkpointing_func" in inspect.signature(switch).parameters:
            return switch  # type: ignore[no-any-return]
    raise RuntimeError(
        f"The switch {_SWITCH} of {type(owner).__name__} takes no gradient_checkpointing_func. Releases 4.35 to 5.23 of "
        "Transformers are known to have it. Use the model's public switch within ckpt_hooks.integrations.patch_torch() instead."
    )


def _check_support(owner: Module, modules: dict[str, Module]) -> None:
    """Checks for modules with a flag to switch, none of them on with an engine of this package."""
    name = type(owner).__name__
    if not getattr(owner, "supports_gradient_checkpointing", True):
        raise ValueError(f"{name} does not support the checkpointing switch of Transformers. {_ADVICE}")
    if not any(hasattr(module, _FLAG) and (_calls_function(module) or _calls_torch(module)) for module in modules.values()):
        raise ValueError(f"No module of {name} runs its layers by the checkpointing switch of Transformers. {_ADVICE}")
    on = [
        name
        for name, module in modules.items()
        if type(vars(module).get(_FUNCTION)) is _Engine and getattr(module, _FLAG, False)
    ]
    if on:
        disable = next(way for way in ("activation_checkpointing_disable", "gradient_checkpointing_disable") if hasattr(owner, way))
        raise RuntimeError(
            f"enable_in_transformers was applied to {name} before: {on[0] or 'the model'!r} is a region already. Call undo() on "
            f"what the earlier call returned first, or `model.{disable}()`."
        )


def _checked_number(every: Any) -> int:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every_n_layers should be an integer of at least 1, but got {every!r}. Pass 1 for every layer.")
    return every


def _thin_out(flagged: dict[str, Module], every: int) -> None:
    """Switches off all but each n-th layer, in a release whose switch takes no ``every_n_layers``."""
    layers = [module for module in flagged.values() if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)]
    if not layers:
        raise ValueError(
            f"every_n_layers={every}, but this release of Transformers has no GradientCheckpointingLayer to count (4.53 is the "
            f"first). {_ADVICE}"
        )
    for index, module in enumerate(layers):
        setattr(module, _FLAG, index % every == 0)


def _leave_out(handle: EnabledCheckpointing, owner: Module, calling: list[str]) -> None:
    """Warns of modules which call torch's checkpoint themselves, and are no regions."""
    warnings.warn(
        f"{', '.join(repr(name) for name in calling)} of {type(owner).__name__} would call torch.utils.checkpoint, not the "
        "function given, and is left without checkpointing. Name its layers to ckpt_hooks.modules.apply_checkpointing as well.",
        stacklevel=3,
    )


# Names in code


def _calls_function(module: Module) -> bool:
    """Whether a module calls the function that the switch sets."""
    return _FUNCTION in _names_in(type(module))


def _calls_torch(module: Module) -> bool:
    """Whether a module with a flag calls torch's checkpoint instead of the function that the switch sets."""
    names = _names_in(type(module))
    return "checkpoint" in names and _FUNCTION not in names


def _names_in(kind: type) -> set[str]:
    """Returns the global names and attributes in the methods of a class, and in what decorates them."""
    return {name for code in _codes(kind) for name in code.co_names}


def _codes(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        if base is Module or {_SWITCH, "save_pretrained"} <= vars(base).keys():  # PreTrainedModel, which has the switch itself
            continue
        for value in vars(base).values():
            while value is not None:
                if inspect.isfunction(value):
                    yield value.__code__
                value = getattr(value, "__wrapped__", None) if callable(value) else None


# Attributes


def _attributes(module: Module, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: vars(module).get(name, _ABSENT) for name in names}


def _put_back(module: Module, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is not _ABSENT:
            vars(module)[name] = value
        else:
            vars(module).pop(name, None)


def _require_grads(owner: Any) -> dict[str, Any] | None:
    """Hooks the input embeddings, unless they are hooked already. Returns the attributes before."""
    before = _attributes(owner, _HOOKS)
    if any(value is not _ABSENT and value for value in before.values()):
        return None
    owner.enable_input_require_grads()
    return before
