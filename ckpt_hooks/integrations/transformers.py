"""``enable_in_transformers``: the checkpointing switch of a Transformers model, with the regions of this package."""

from __future__ import annotations

import weakref
from typing import Any

from torch.nn import Module
from typing_extensions import Self

from ckpt_hooks._core.misuse import OfThisProcess, checked_flag, checked_integer
from ckpt_hooks.modules.forward import checked_runner
from ckpt_hooks.modules.own_switches import FUNCTION, SWITCH, calls_function
from ckpt_hooks.report.formatting import Printed, Table, alike, count_of, fold_names, name_pattern, times

from .transformers_models import FLAG, Taken, TakenSwitch, check_support, planned_layers, switch_of, transformers_model


def enable_in_transformers(
    model: Module,
    *,
    policy: Any = None,
    plan: Any = None,
    every_n_layers: int = 1,
    recorded: bool = False,
    keep_first: int = 0,
    keep_last: int = 0,
    **options: Any,
) -> EnabledCheckpointing:
    """Switches checkpointing on in a Transformers model, by regions of this package.

    The layers are those of Transformers' own switch (``model.activation_checkpointing_enable()``, and
    ``model.gradient_checkpointing_enable()`` before 5.23), which this call replaces. As there, layers are regions in training
    mode only (``model.train()``), and get no key-value cache.

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
        **options: Other options of :func:`ckpt_hooks.checkpoint`, or of :class:`ckpt_hooks.checkpoint_region` if ``recorded``.
            Regions have the names of their modules.

    Returns:
        A handle: ``undo()`` leaves the model as it was, and so does the end of a ``with`` block. ``regions`` names the modules
        whose checkpointing is on.

    Raises:
        TypeError: If ``model`` is no Transformers model, or an option has a value of another kind.
        ValueError: If the model has no layer which can be checkpointed so, or none is left; if a module of the model calls
            torch's checkpoint by itself (Grounding DINO's decoder, CLVP's conditioning encoder); if an option has a wrong
            value, or a block of the plan is no layer.
        RuntimeError: If the model has regions of this package already, or a switch which takes no function.

    Note:
        Shown with Transformers 4.46, 4.57, 5.0 and 5.23; ``every_n_layers`` needs 4.52. A deep copy of the model has regions
        too, which the handle does not undo. The outputs of input embeddings need not require grad: frozen layers below the
        first trained one keep nothing then, and take no part in backward.

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
    if plan is not None and (policy is not None or every_n_layers != 1 or any(keep) or options):
        raise ValueError(
            "enable_in_transformers got plan, and options of regions, which the plan has itself. Leave out policy, "
            f"every_n_layers, keep_first, keep_last{''.join(f', {name}' for name in options)}."
        )
    options["policy"] = policy
    planned = None if plan is None else planned_layers(plan, model, owner)
    taken = Taken(recorded or plan is not None, options, planned, keep)
    checked_runner("enable_in_transformers", taken.recorded, options, of=type(owner).__name__)  # before the model is touched
    flagged = {name: module for name, module in owner.named_modules() if hasattr(module, FLAG)}
    check_support(owner, flagged)
    for module in owner.modules():  # regions that were switched off since
        earlier = vars(module).get(SWITCH)
        if type(earlier) is TakenSwitch and (before := earlier.handle()) is not None:
            before.undo()

    handle = EnabledCheckpointing(owner, flagged, every_n_layers, taken)
    try:
        handle.take_over()
    except BaseException:
        handle.undo()
        raise
    return handle


class EnabledCheckpointing(OfThisProcess, Printed):
    """Checkpointing switched on in a Transformers model: the result of :func:`enable_in_transformers`.

    As a context manager, undoes itself at the end of the block. Holds no module.
    """

    def __init__(self, owner: Module, flagged: dict[str, Module], n: int, taken: Taken) -> None:
        self._model = type(owner).__name__
        self._before = [
            (name, weakref.ref(module), {one: vars(module)[one] for one in (FLAG, FUNCTION) if one in vars(module)})
            for name, module in flagged.items()
        ]
        models = [(name, module) for name, module in owner.named_modules() if switch_of(module) is not None]
        self._switches = [TakenSwitch(module, name, n, taken) for name, module in models]

    def take_over(self) -> None:
        """Switches checkpointing on, and takes the place of the model's switch, and of the switches of models inside."""
        self._switches[0]()
        for switch in self._switches:
            switch.handle = weakref.ref(self)
            switch.put()

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the modules whose checkpointing is on: layers, or stacks of layers in releases before 4.52."""
        modules = [(name, reference()) for name, reference, _ in self._before]
        return tuple(
            name
            for name, module in modules
            if module is not None and getattr(module, FLAG) and self._is_ours(module) and calls_function(module)
        )

    def _is_ours(self, module: Module) -> bool:
        return self._switches[0].taken.has(vars(module).get(FUNCTION))

    def undo(self) -> None:
        """Leaves the model as it was, but for modules enabled anew since. A second call does nothing."""
        for switch in self._switches:
            switch.remove()
        for _, reference, attributes in self._before:
            module = reference()
            if module is None or not self._is_ours(module):
                continue
            for attribute in (FLAG, FUNCTION):
                if attribute in attributes:
                    vars(module)[attribute] = attributes[attribute]
                else:
                    vars(module).pop(attribute, None)
        self._before, self._switches = [], []

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
