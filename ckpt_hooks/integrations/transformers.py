"""``enable_in_transformers``: the checkpointing switch of a Transformers model, with the regions of this package."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any

from torch.nn import Module
from typing_extensions import Self

from ckpt_hooks._core.misuse import OfThisProcess, checked_flag, checked_integer
from ckpt_hooks.modules.forward import checked_runner
from ckpt_hooks.modules.own_switches import FUNCTION, SWITCH, calls_function
from ckpt_hooks.report.formatting import Printed, Table, alike, count_of, fold_names, name_pattern, times

from .patch_torch import TorchPatch, patch_torch
from .transformers_models import FLAG, Taken, TakenSwitch, check_support, planned_layers, switch_of, transformers_model

# Hooks on the input embeddings: the former in 5.18 and 5.23.
_HOOKS = ("_require_grads_hooks", "_require_grads_hook")
_ABSENT = object()


def enable_in_transformers(
    model: Module,
    *,
    policy: Any = None,
    plan: Any = None,
    every_n_layers: int = 1,
    recorded: bool = False,
    keep_first: int = 0,
    keep_last: int = 0,
    input_require_grads: bool = False,
    **options: Any,
) -> EnabledCheckpointing:
    """Switches checkpointing on in a Transformers model, by regions of this package.

    The layers are those of Transformers' own switch (``model.activation_checkpointing_enable()``, and
    ``model.gradient_checkpointing_enable()`` before 5.23), which this call replaces. As there, layers are regions in training
    mode only (``model.train()``), and get no key-value cache.

    Some modules call ``torch.utils.checkpoint`` themselves and take no function (Grounding DINO's decoder, CLVP's conditioning
    encoder). The entries of their module lists become regions by :func:`ckpt_hooks.apply_checkpointing`.

    Until ``undo()``, the model's own switch (``activation_checkpointing_enable()``, ``gradient_checkpointing_disable()``) turns
    these regions on and off, whether a trainer calls it or PEFT: with ``gradient_checkpointing=True``, TRL's default, they stay
    on. The options are those given here; of the switch's own, ``every_n_layers`` holds where it is not 1.

    Args:
        model: A Transformers model, or a model of PEFT around one: the outermost, whose switch trainers call.
        policy: The outputs to keep: a policy of :mod:`ckpt_hooks.policies`, a list of operators, or a function.
        plan: A :class:`ckpt_hooks.planner.Plan` of the model, whose blocks are layers of the switch: each layer keeps what the
            plan says. In place of the other options of regions.
        every_n_layers: Makes each n-th layer a region, beginning with the first, as Transformers counts them.
        recorded: Whether backward replays operators, as :class:`ckpt_hooks.checkpoint_region` does, instead of calling
            the layer again, as :func:`ckpt_hooks.checkpoint` does.
        keep_first: How many of these layers are left without regions, from the first.
        keep_last: How many, from the last; see :func:`ckpt_hooks.apply_checkpointing`.
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
        ValueError: If the model has no layer which can be checkpointed so, or none is left; if an option has a wrong value, or
            a block of the plan is no layer.
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
    owner = transformers_model(model)
    every_n_layers = checked_integer(every_n_layers, "every_n_layers", "Pass 1 for every layer.")
    recorded = checked_flag(recorded, "recorded")
    keep = checked_integer(keep_first, "keep_first", least=0), checked_integer(keep_last, "keep_last", least=0)
    input_require_grads = checked_flag(input_require_grads, "input_require_grads")
    if plan is not None and (policy is not None or every_n_layers != 1 or any(keep) or options):
        raise ValueError(
            "enable_in_transformers got plan, and options of regions, which the plan has itself. Leave out policy, "
            f"every_n_layers, keep_first, keep_last{''.join(f', {name}' for name in options)}."
        )
    options["policy"] = policy
    planned = None if plan is None else planned_layers(plan, model, owner)
    taken = Taken(recorded or plan is not None, options, planned)
    taken.keep = keep
    checked_runner("enable_in_transformers", taken.recorded, options, of=type(owner).__name__)  # before the model is touched
    flagged = {name: module for name, module in owner.named_modules() if hasattr(module, FLAG)}
    if switch_of(owner) is None:
        return _enable_by_patch(owner, flagged, every_n_layers, recorded or any(keep), options)
    check_support(owner, flagged)
    for module in owner.modules():  # regions that were switched off since
        earlier = vars(module).get(SWITCH)
        if type(earlier) is TakenSwitch and (before := earlier.handle()) is not None:
            before.undo()

    handle = EnabledCheckpointing(owner, flagged)
    try:
        handle.take_over(owner, every_n_layers, taken)
        if input_require_grads:
            handle.require_grads(owner)
    except BaseException:
        handle.undo()
        raise
    return handle


class EnabledCheckpointing(OfThisProcess, Printed):
    """Checkpointing switched on in a Transformers model: the result of :func:`enable_in_transformers`.

    As a context manager, undoes itself at the end of the block. Holds no module.

    Attributes:
        patch: The patch of torch's checkpoint, for a model whose switch takes no function; None without.
        disable: The name of the model's public switch, if that was called.
    """

    patch: TorchPatch | None = None
    disable: str | None = None

    def __init__(self, owner: Module, flagged: dict[str, Module]) -> None:
        self._model, self._owner = type(owner).__name__, weakref.ref(owner)
        self._before = [(name, weakref.ref(module), _attributes(module, (FLAG, FUNCTION))) for name, module in flagged.items()]
        self._switches: list[TakenSwitch] = []
        self._hooks: tuple[dict[str, Any], dict[str, Any]] | None = None

    def take_over(self, owner: Module, n: int, taken: Taken) -> None:
        """Switches checkpointing on, and takes the place of the model's switch, and of the switches of models inside."""
        models = [(name, module) for name, module in owner.named_modules() if switch_of(module) is not None]
        self._switches = [TakenSwitch(module, name, n, taken) for name, module in models]
        self._switches[0]()
        for switch in self._switches:
            switch.handle = weakref.ref(self)
            switch.put()

    def require_grads(self, owner: Any) -> None:
        """Has the outputs of input embeddings require grad."""
        before = _attributes(owner, _HOOKS)
        _put_back(owner, dict.fromkeys(_HOOKS, _ABSENT))  # a second switch would lose the hooks of the first
        self._hooks = before, {}
        owner.enable_input_require_grads()
        self._hooks = before, _attributes(owner, _HOOKS)

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the modules whose checkpointing is on: layers, or stacks of layers in releases before 4.52."""
        modules = [(name, reference()) for name, reference, _ in self._before]
        on = [name for name, module in modules if module is not None and getattr(module, FLAG) and self._is_region(module)]
        return (*on, *(self._switches[0].entries_on() if self._switches else ()))

    def _is_region(self, module: Module) -> bool:
        return self._is_ours(module) and (self.patch is not None or calls_function(module))

    def _is_ours(self, module: Module) -> bool:
        return self.patch is not None or self._switches[0].taken.has(vars(module).get(FUNCTION))

    def undo(self) -> None:
        """Leaves the model as it was, but for modules enabled anew since. A second call does nothing."""
        owner = self._owner()
        if self.disable is not None and owner is not None and self._before:
            getattr(owner, self.disable)()
        for switch in self._switches:
            switch.remove()
        for _, reference, attributes in self._before:
            module = reference()
            if module is not None and self._is_ours(module):
                _put_back(module, attributes)
        if self._hooks is not None and owner is not None:
            before, own = self._hooks
            for value in own.values():
                for hook in value if isinstance(value, list) else [] if value is _ABSENT else [value]:
                    hook.remove()
            if _attributes(owner, _HOOKS) == own or not own:  # the model's own switch puts others there
                _put_back(owner, before)
        if self.patch is not None:
            self.patch.undo()
        self._before, self._switches, self._hooks = [], [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def _headline(self) -> str:
        regions = self.regions
        count = count_of(len(regions), "region") if regions else "switched off"
        kept = f", {fold_names(names)} kept" if self._switches and (names := self._switches[0].kept) else ""
        return f"{self._model}, {count if self._before else 'undone'}{kept}"

    def _tables(self) -> list[Table]:
        rows = [(times(names), fold_names(names)) for names in alike(self.regions, name_pattern)]
        return [Table(["", "module"], rows, (0,), (1,))] if rows else []


def _attributes(module: Module, names: Iterable[str]) -> dict[str, Any]:
    return {name: vars(module).get(name, _ABSENT) for name in names}


def _put_back(module: Module, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is not _ABSENT:
            vars(module)[name] = value
        else:
            vars(module).pop(name, None)


def _enable_by_patch(
    owner: Any, flagged: dict[str, Module], n: int, is_more: bool, options: dict[str, Any]
) -> EnabledCheckpointing:
    """Calls the model's public switch, and diverts torch's checkpoint."""
    public = next((word for word in ("activation", "gradient") if hasattr(owner, f"{word}_checkpointing_enable")), None)
    enable = getattr(owner, f"{public}_checkpointing_enable", None)
    known = inspect.signature(enable).parameters if enable is not None else {}
    if enable is None or is_more or len(options) > 1 or (n > 1 and "every_n_layers" not in known):
        raise RuntimeError(
            f"The method {SWITCH} of {type(owner).__name__} takes no gradient_checkpointing_func, as it does in Transformers "
            "4.35 to 5.23. The public switch, under patch_torch, takes policy alone. Leave other options out, or write "
            "`ckpt_hooks.apply_checkpointing(model, layers)`."
        )
    keywords: dict[str, Any] = {f"{public}_checkpointing_kwargs": {"use_reentrant": False}, "every_n_layers": n}
    handle = EnabledCheckpointing(owner, flagged)
    handle.disable, handle.patch = f"{public}_checkpointing_disable", patch_torch(reentrant=True, policy=options["policy"])
    try:
        enable(**{keyword: value for keyword, value in keywords.items() if keyword in known})
    except BaseException:
        handle.undo()
        raise
    return handle
