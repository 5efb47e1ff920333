"""State which one region reaches besides arguments, as forward found the state: attributes and contents, together.

Submodules are in :mod:`.submodules`, attributes of modules in :mod:`.attributes`, contents of tensors in :mod:`.contents`,
parameters, which must not change, in :mod:`.parameters`. Contents go back last, since they are written to the bound tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._core.mutation import Why, mutated

from .attributes import AttributeNotes, AttributesUndo
from .buffers import Complain
from .contents import Contents
from .contents_undo import ContentsUndo
from .module_plan import ModulePlan, epoch, has_new_parts, idle_plan, plan_of
from .notes import Lent
from .parameters import Noted, Rebound, references_of
from .reached_values import Walk
from .submodules import Before, Submodules
from .tensor_note import StandIns


class ReachedState:
    """The state found by one forward.

    Attributes:
        generators: Random generators.
        parameters: Parameters, with their versions.
        plans: The plans of the modules.
    """

    __slots__ = (
        "_attributes",
        "_contents",
        "_epoch",
        "_submodules",
        "_with_buffers",
        "generators",
        "parameters",
        "plans",
    )

    generators: Sequence[torch.Generator]
    parameters: Noted
    plans: Sequence[ModulePlan]
    _attributes: AttributeNotes
    _contents: Contents | None
    _epoch: int
    _submodules: Sequence[Submodules]
    _with_buffers: bool

    def storages(self) -> frozenset[int | None]:
        """Returns the storages of tensors which may be rewound."""
        return frozenset() if self._contents is None else self._contents.storages()

    def close(self, *, failed: bool) -> tuple[torch.Tensor, int] | None:
        """Ends forward.

        Args:
            failed: Whether forward ended by an exception, perhaps before its writes.

        Returns:
            A tensor to which forward wrote though earlier ones only read it, and its version before; None if there is none.
        """
        contents = self._contents
        if contents is not None:
            contents.settle(failed=failed)
            if contents.parameters:  # which a rerun finds as they were
                self.parameters.leave_out(contents.parameters)
        for plan in self.plans:
            plan.has_run(failed=failed)
        if contents is None or failed or not contents.uncopied:
            return None
        return next((one for one in contents.changed() if contents.note_written(one[0])), None)

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the tensors without a copy, parameters among them, which were written to since, with their versions then."""
        changed = self.parameters.changed()
        contents = self._contents
        return changed if contents is None or not (contents.uncopied or contents.freed) else changed + contents.changed()

    def note_written(self, tensor: torch.Tensor) -> bool:
        """Has later forwards copy a tensor, after a write to it; returns whether they will."""
        return self._contents is not None and self._contents.note_written(tensor)


class Rewound:
    """State put back for one rerun, with the means to undo this.

    Attributes:
        lent: The contents of containers and objects that are lent.
    """

    __slots__ = ("_attributes", "_complain", "_contents", "_epoch", "_parameters", "_state", "_submodules", "lent")

    def __init__(self, state: ReachedState, complain: Complain, stand_ins: StandIns) -> None:
        self._state, self._complain = state, complain
        self.lent = Lent(stand_ins)
        self._attributes = AttributesUndo(self.lent, with_buffers=state._with_buffers)
        self._parameters: Rebound | None = None
        self._submodules: list[tuple[Submodules, Before]] = []
        self._epoch: int | None = None
        self._contents: ContentsUndo | None = None

    def put_back(self) -> frozenset[int | None]:
        """Puts back the state found by forward; returns the storages with another content in the rerun."""
        state, attributes = self._state, self._attributes
        for submodules in state._submodules:  # first, and undone last: attributes take out submodules without a note
            self._submodules.append((submodules, submodules.bind()))
        attributes.put_back(state._attributes, has_new_parts=has_new_parts(state._epoch))
        self._parameters = state.parameters.bind()
        self._epoch = epoch()
        if state._contents is None and not attributes.may_initialise:
            return _NO_STORAGES
        undo = self._contents = ContentsUndo(self._complain)
        may_write = attributes.may_initialise
        for plan in state.plans:
            may_write = may_write or plan.buffers.has_other_hooks()
        if attributes.may_initialise:
            undo.watch_trained(state.plans)
        if state._contents is not None:
            state._contents.rewind(undo, may_write=may_write)
        return undo.storages()

    def lost(self, region: Callable[[], tuple[str, ...]]) -> list[tuple[torch.Tensor, int]]:
        """Returns the parameters in the places of forward's, which are gone, each with :data:`GONE` for a version.

        Args:
            region: Returns the names of the region, for an error.

        Raises:
            MutationError: If nothing stands in the place of one.
        """
        if self._parameters is None:
            return []
        if self._parameters.names:
            raise mutated(Why.PARAMETER_GONE, region(), detail=self._parameters.names[0])
        return self._parameters.lost

    def restore(self) -> None:
        """Restores the state from before :meth:`put_back`.

        Raises:
            MutationError: If the rerun initialised parameters once more, which are restored; or if the rerun wrote to a tensor
                that no forward has written to.
        """
        try:
            if self._contents is not None:
                self._contents.restore()
        finally:
            if self._state._contents is not None:
                self._state._contents.freed = ()
            # A function that binds a parameter moves the epoch.
            if self._parameters is not None or self._epoch not in (None, epoch()):
                self._state.parameters.unbind(self._parameters)
            self._attributes.restore()
            for submodules, before in reversed(self._submodules):  # a module may be in several plans
                if before or self._epoch != epoch():
                    submodules.unbind(before)
            self.lent.restore()


_NO_STORAGES: frozenset[int | None] = frozenset()
_NO_GENERATORS: Sequence[torch.Generator] = ()


def state_of_idle(module: Any, *, preserve_buffers: bool) -> ReachedState | None:
    """Returns the state of an idle module (:func:`.module_plan.idle_plan`); None if this is another function."""
    plan = idle_plan(module)
    submodules = None if plan is None else plan.submodules()
    if plan is None or submodules is None:
        return None
    state = ReachedState()  # attributes one by one: half the cost of an ``__init__``
    state.plans = (plan,)
    state._epoch = plan.epoch
    state._attributes, state._submodules = plan.notes, (submodules,)
    state._contents = Contents((plan,), (), []) if preserve_buffers and plan.notes.tensors else None
    state._with_buffers = preserve_buffers
    state.parameters = Noted(plan.parameters)
    state.generators = _NO_GENERATORS
    return state


def state_of(walk: Walk, *, preserve_buffers: bool) -> ReachedState | None:
    """Returns the state reached by a function; None if a lazy module has not made its parameters yet.

    The first forward of a lazy module changes the module for good, and cannot be done twice.

    Args:
        walk: The finds of a walk from the function, to which those of the functions of its modules are added.
        preserve_buffers: Whether buffers, and other tensors, are put back.
    """
    plans = list(map(plan_of, walk.modules))
    if any(plan.is_lazy for plan in plans):
        return None
    # Modules to which these functions lead are left out: a hook may be a method of the whole model.
    for function in [function for plan in plans for one in plan.functions if (function := one()) is not None]:
        walk.look(function)
    state = ReachedState()
    state.plans = plans
    state._epoch = epoch()
    state._submodules = [submodules for plan in plans if (submodules := plan.submodules()) is not None]
    state._attributes = (
        plans[0].notes if len(plans) == 1 else AttributeNotes([note for plan in plans for note in plan.notes.notes])
    )
    state.parameters = Noted(references_of(plans, walk.tensors))
    state._with_buffers = preserve_buffers
    generators = list(walk.generators)
    state._contents = None
    if preserve_buffers and not torch.is_inference_mode_enabled():
        contents = Contents(plans, [(tensor, walk.refer_to(tensor)) for tensor in walk.tensors], generators)
        state._contents = None if contents.is_empty() else contents
    state.generators = generators
    return state
