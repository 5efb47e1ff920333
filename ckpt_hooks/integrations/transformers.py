"""``enable_in_transformers``: the checkpointing switch of a Transformers model, with the regions of this package.

Transformers is not imported: its models are recognized by their methods. The public switch takes no function. It calls the
method ``SWITCH``, which sets the function as attribute ``FUNCTION`` of modules.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch.nn import Module
from typing_extensions import Self, Unpack

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.misuse import Misuse, OfThisProcess, checked_flag, checked_integer, described_as, wrong
from ckpt_hooks.modules.applying import PlanLike, PlannedWhileTraining, check_none, planner
from ckpt_hooks.modules.forward import (
    FUNCTION,
    SWITCH,
    RegionKeywords,
    RegionRunner,
    calls_function,
    calls_torch,
    checked_runner,
    region_forward_of,
)
from ckpt_hooks.modules.selecting import kept_plain
from ckpt_hooks.policies.base import PolicyLike
from ckpt_hooks.report.printing import Printed, Table, alike, count_of, fold_names, name_pattern, times

#: A module's flag. While the flag is True, the module checkpoints its layers.
FLAG = "gradient_checkpointing"


class Taken:
    """The runners that are set as ``FUNCTION`` in a model, by names of modules."""

    def __init__(
        self, recorded: bool, options: dict[str, Any], planned: Mapping[str, RegionRunner] | None, keep: tuple[int, int]
    ) -> None:
        self.recorded, self.options, self.planned = recorded, options, planned
        self.keep = keep  # how many layers stay without regions, at the start and at the end
        self._runners: dict[str, RegionRunner] = dict(planned or {})

    def runner(self, name: str) -> RegionRunner:
        if name not in self._runners:
            self._runners[name] = RegionRunner(self.recorded, {"name": name, **self.options})
        return self._runners[name]

    def has(self, function: Any) -> bool:
        return any(runner is function for runner in self._runners.values())


class TakenSwitch:
    """Replaces ``SWITCH`` in a model's attributes, so that a trainer's call of the public switch switches these regions."""

    # A copy or pickle of this object belongs to the copied model, so it leaves out what refers to the original.
    __slots__ = ("_before", "_n", "_name", "_owner", "handle", "kept", "taken")

    def __init__(self, owner: Module, name: str, n: int, taken: Taken) -> None:
        self._owner = weakref.ref(owner)  # weak, since the model holds this object
        self._name, self._n, self.taken = name, n, taken
        self._before: Any = None
        self.kept: Sequence[str] = ()  # names of the layers without regions
        self.handle: Callable[[], Any] = lambda: None  # returns the handle of the regions; None in copies

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
        """Switches the regions on or off, as the method of Transformers does; ignores the caller's function."""
        # The default of ``every_n_layers`` is 1, so 1 means the number that ``enable_in_transformers`` got.
        owner, taken = self._owner(), self.taken
        switch = None if owner is None else switch_of(owner)
        if owner is None or switch is None:
            return
        flagged = {name: module for name, module in owner.named_modules() if hasattr(module, FLAG)}
        runner = taken.runner(self._name or type(owner).__name__)
        n = self._n if every_n_layers == 1 else every_n_layers
        if enable:
            _warn_of_options(gradient_checkpointing_func)
            if n == 1 and not any(taken.keep):
                switch(owner, enable=True, gradient_checkpointing_func=runner)
            elif "every_n_layers" in inspect.signature(switch).parameters:  # Transformers 5.18 and 5.23 have it, 5.0 does not
                switch(owner, enable=True, gradient_checkpointing_func=runner, every_n_layers=n)
            else:
                keep = "keep_first={}, keep_last={}".format(*taken.keep)
                raise ValueError(
                    f"every_n_layers={n}, {keep}: the switch of {type(owner).__name__} cannot select layers before "
                    f"Transformers 5.18. Update Transformers, or write `apply_checkpointing(model, every({n}), ...)` with the "
                    "same keep_first and keep_last."
                )
        else:
            switch(owner, enable=False, gradient_checkpointing_func=runner)
        for name, module in flagged.items():
            setattr(module, FUNCTION, taken.runner(self._path(name) or type(owner).__name__))
            if taken.planned is not None and self._path(name) not in taken.planned:
                setattr(module, FLAG, False)
        on = [(name, module) for name, module in flagged.items() if getattr(module, FLAG) and calls_function(module)]
        whole = kept_plain(on, *taken.keep) if enable else []
        for _, module in whole:
            setattr(module, FLAG, False)
        self.kept = [self._path(name) for name, _ in whole]

    def _path(self, name: str) -> str:
        return ".".join(part for part in (self._name, name) if part)


#: Options of torch's checkpoint that need no warning if these regions ignore them, since results stay right.
_WITHOUT_EFFECT = frozenset({"use_reentrant", "preserve_rng_state", "debug", "early_stop", "determinism_check"})


def _warn_of_options(function: Any) -> None:
    """Warns if the model's own switch was called with options that these regions ignore."""
    if function is None:
        return
    options = getattr(function, "keywords", {})
    inner = getattr(function, "func", function)
    left_out = sorted(set(options) - _WITHOUT_EFFECT)
    if getattr(inner, "__module__", None) == "torch.utils.checkpoint" and not left_out:
        return
    words = f"the options {', '.join(left_out)}" if left_out else f"the function {getattr(inner, '__qualname__', inner)}"
    warn_user(
        f"the model's own checkpointing switch was called with {words}, which the regions of enable_in_transformers ignore. "
        "Pass options to enable_in_transformers instead (`offload_inputs=True` for an offload), or call the undo() of its "
        "handle first."
    )


def transformers_model(model: Any) -> Any:
    """Returns the Transformers model: the argument, or the model inside a model of PEFT."""
    if isinstance(model, Module):
        owner = getattr(getattr(model, SWITCH, None), "__self__", None)
        if isinstance(owner, Module):
            return owner
        inside = next((name for name, module in model.named_modules() if hasattr(type(module), SWITCH)), None)
        if inside is not None:
            raise TypeError(
                f"model should be a Transformers model, but got {described_as(model)}, which has such a model inside. "
                f"Write `enable_in_transformers(model.{inside})`."
            )
    raise TypeError(
        f"model should be a Transformers model, but got {described_as(model)}. Pass other modules to "
        "`ckpt_hooks.apply_checkpointing(model, layers)`."
    )


def switch_of(owner: Module) -> Callable[..., Any] | None:
    """Returns the switch that takes a function, of the model's class or of a base class; None if there is none."""
    # Some models (Grounding DINO, OmDet-Turbo, models on the Hub) override the switch by a method in the form of Transformers
    # before 4.35, which takes no function.
    for kind in type(owner).__mro__:
        switch = vars(kind).get(SWITCH)
        if switch is not None and "gradient_checkpointing_func" in inspect.signature(switch).parameters:
            return switch  # type: ignore[no-any-return]
    return None


def check_support(owner: Any, flagged: dict[str, Module]) -> None:
    """Raises if a model has no switch, no layers to switch on, or already has regions of this package."""
    name, advice = type(owner).__name__, "Write `ckpt_hooks.apply_checkpointing(model, layers)`."
    if switch_of(owner) is None:
        raise RuntimeError(
            f"The method {SWITCH} of {name} lacks the parameter gradient_checkpointing_func that Transformers has since 4.35. "
            f"{advice}"
        )
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
                f"{path!r} of {name} is already a region, made by apply_checkpointing. Call "
                "`ckpt_hooks.remove_checkpointing(model)` first."
            )
        if isinstance(vars(module).get(FUNCTION), RegionRunner) and getattr(module, FLAG):
            public = "activation" if hasattr(owner, "activation_checkpointing_disable") else "gradient"
            raise RuntimeError(
                f"{path!r} of {name} is already a region, made by enable_in_transformers. First call undo() of the handle that "
                f"the earlier call returned, or `model.{public}_checkpointing_disable()`."
            )


def planned_layers(plan: Any, model: Module, owner: Module) -> dict[str, RegionRunner]:
    """Returns the runners of a plan for the layers of a Transformers model, by their names in that model."""
    if isinstance(plan, type) or not callable(getattr(plan, "runners", None)):
        raise wrong(plan, "plan", "a Plan of ckpt_hooks.plan_memory", "Pass the result of plan_memory.")
    modules, names = dict(model.named_modules()), {id(module): name for name, module in owner.named_modules()}
    functions = {}
    for block, runner in plan.runners().items():
        module = modules.get(block)
        if module is None or not hasattr(module, FLAG) or not calls_function(module):
            raise ValueError(
                f"Block {block!r} of the plan is not a layer of the checkpointing switch of {type(owner).__name__}. "
                "Write `plan.apply(model)`, or plan with the layers of the switch as blocks."
            )
        functions[names[id(module)]] = runner
    return functions


def enable_in_transformers(
    model: Module,
    *,
    memory_budget: float | str | None = None,
    margin: float | None = None,
    cost: Literal["seconds", "operations"] | None = None,
    policy: PolicyLike | None = None,
    plan: PlanLike | Mapping[str, Any] | None = None,
    every_n_layers: int = 1,
    recorded: bool = False,
    keep_first: int = 0,
    keep_last: int = 0,
    chunked_loss: bool | int = False,
    **options: Unpack[RegionKeywords],
) -> EnabledCheckpointing:
    """Switches on checkpointing in a Transformers model, with this package's regions in place of torch's.

    Checkpoints the layers that Transformers' own switch (``gradient_checkpointing_enable()``, since 5.23
    ``activation_checkpointing_enable()``) would. As there, layers are regions in training mode only and get no key-value cache.
    Until ``undo()``, the model's own switch turns these regions on and off, whoever calls it, such as a trainer or PEFT. The
    options given here stay in force; of the switch's own options only ``every_n_layers`` counts, if it is not 1.

    Args:
        model: A Transformers model, or the outermost PEFT model around it.
        memory_budget: The largest peak of a step. Each layer keeps what a plan says, made while the model trains; see
            :func:`ckpt_hooks.apply_checkpointing`. Takes no options of regions.
        margin: With ``memory_budget``, the fraction of the budget to leave free.
        cost: With ``memory_budget``, ``"seconds"`` or ``"operations"``, as for :func:`ckpt_hooks.apply_checkpointing`.
        policy: The outputs to keep: a policy of :mod:`ckpt_hooks.policies` or its name (``"dots_saveable"``), a list of
            operators, or a function.
        plan: A :class:`ckpt_hooks.planner.Plan` whose blocks are these layers. With ``memory_budget``, a plan of an earlier
            run, or the result of its handle's ``to_json()``. Takes no options of regions.
        every_n_layers: Makes every n-th layer a region, starting with the first.
        recorded: Whether backward replays operators, as :class:`ckpt_hooks.checkpoint_region` does, instead of calling
            the layer again, as :func:`ckpt_hooks.checkpoint` does.
        keep_first: The number of layers to leave plain, counted from the first.
        keep_last: The same from the last; see :func:`ckpt_hooks.apply_checkpointing`.
        chunked_loss: Whether a causal language model computes its loss in slices of tokens, in training, as
            :func:`ckpt_hooks.losses.chunked_cross_entropy` does; a number sets how many, True means 8. Takes labels given to
            the model. Logits of the output are computed when something looks at them, at once for all tokens.
        **options: Other options of :func:`ckpt_hooks.checkpoint`, or of :class:`ckpt_hooks.checkpoint_region` if ``recorded``.

    Returns:
        A handle. ``undo()``, or the end of a ``with`` block, restores the model. ``regions`` names the checkpointed modules.

    Raises:
        TypeError: If ``model`` is not a Transformers model, or an option has a value of another kind.
        ValueError: If the model has no layer to checkpoint or none is left, if a module calls torch's checkpoint by itself
            (Grounding DINO's decoder, CLVP's conditioning encoder), if an option is invalid, or if a block of the plan is no
            layer.
        RuntimeError: If the model has regions of this package already, or a switch that takes no function.

    Note:
        Tested with Transformers 4.46, 4.57, 5.0 and 5.24. ``every_n_layers``, ``keep_first`` and ``keep_last`` need 5.18. A
        deep copy of the model has regions too; the handle does not undo them. Input embeddings need not require grad: frozen
        layers below the first trained layer then keep nothing and take no part in backward.

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
    planning = {"margin": margin, "cost": cost}
    given = {**options, "policy": policy}
    refused = {"policy": policy is not None, "every_n_layers": every_n_layers != 1, "keep_first": keep[0], "keep_last": keep[1]}
    refused |= dict.fromkeys(options, True)
    machine = None
    if memory_budget is not None:
        check_none({"recorded": recorded, **refused})
        layers = [name for name, module in model.named_modules() if hasattr(module, FLAG) and calls_function(module)]
        plan = machine = planner().machine_of(model, memory_budget, layers, plan=plan, **planning)
    else:
        check_none({name: value is not None for name, value in planning.items()}, "without memory_budget. Pass it too.")
        if plan is not None:
            check_none(refused, "with plan, since the plan decides. Leave these out.")
    if not isinstance(chunked_loss, bool):
        chunked_loss = checked_integer(chunked_loss, "chunked_loss", "Pass True, or the number of slices.")
    planned = None if plan is None else planned_layers(plan, model, owner)
    taken = Taken(recorded or plan is not None, given, planned, keep)
    of = type(owner).__name__
    checked_runner(enable_in_transformers, taken.recorded, given, of=of, cut=())  # raises before the model changes
    flagged = {name: module for name, module in owner.named_modules() if hasattr(module, FLAG)}
    check_support(owner, flagged)
    for module in owner.modules():  # undo earlier handles, whose regions are off, or ``check_support`` would have raised
        earlier = vars(module).get(SWITCH)
        if type(earlier) is TakenSwitch and (before := earlier.handle()) is not None:
            before.undo()

    handle = EnabledCheckpointing(owner, flagged, every_n_layers, taken, machine)
    try:
        if chunked_loss:
            handle.chunk_loss(owner, 8 if chunked_loss is True else chunked_loss)
        handle.take_over()
    except BaseException:
        handle.undo()
        raise
    return handle


class EnabledCheckpointing(PlannedWhileTraining, OfThisProcess, Printed):
    """Checkpointing switched on in a Transformers model: the result of :func:`enable_in_transformers`.

    As a context manager, undoes itself at the end of the block. Holds no module. With a ``memory_budget`` prints as the plan,
    once there is one.
    """

    _no_plan = "There is no plan. Pass memory_budget and train a step: the plan is made when the step ends."

    def __init__(self, owner: Module, flagged: dict[str, Module], n: int, taken: Taken, machine: Any) -> None:
        self._machine = machine
        self._model = type(owner).__name__
        self._before = [
            (name, weakref.ref(module), {key: vars(module)[key] for key in (FLAG, FUNCTION) if key in vars(module)})
            for name, module in flagged.items()
        ]
        models = [(name, module) for name, module in owner.named_modules() if switch_of(module) is not None]
        self._switches = [TakenSwitch(module, name, n, taken) for name, module in models]

        self._undo_loss: Callable[[], None] = lambda: None

    def chunk_loss(self, owner: Module, chunks: int) -> None:
        from .chunked_logits import put_chunked_loss  # imported here, since few programs need the module

        self._undo_loss = put_chunked_loss(owner, chunks)

    def take_over(self) -> None:
        """Switches checkpointing on, and replaces the switches of the model and of models inside."""
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
        """Restores the model, except modules that were enabled again since. A second call does nothing."""
        if self._machine is not None:
            self._machine.undo()
        self._undo_loss()
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
        if not self._before:
            raise Misuse.UNDONE.error(kind=RuntimeError, name="This handle", call="`with enable_in_transformers(...):`")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def _headline(self) -> str:
        if self.plan is not None:
            return f"{self._model}, {self.plan._headline()}"
        regions = self.regions
        count = count_of(len(regions), "region") if regions else "switched off"
        suffix = f", {fold_names(names)} kept" if self._switches and (names := self._switches[0].kept) else ""
        return f"{self._model}, {count if self._before else 'undone'}{suffix}"

    def _tables(self) -> list[Table]:
        if self.plan is not None:
            return [*self.plan._tables()]
        rows = [(times(names), fold_names(names)) for names in alike(self.regions, name_pattern)]
        return [Table(["", "module"], rows, (0,), (1,))] if rows else []
