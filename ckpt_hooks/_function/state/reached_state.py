"""State reached by one region besides its arguments, as its forward found it: attributes and contents, together.

Attributes of modules are in :mod:`.attributes`, contents of tensors in :mod:`.module_state`, parameters, which must not change,
in :mod:`.parameters`. Attributes go back first, since contents are written to the bound tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attributes import AttributeNotes
from .closure_scan import Reached
from .lent_attributes import AttributesUndo
from .module_plan import ModulePlan, epoch, has_new_parts, plan_of
from .module_state import State, StateUndo, capture_state
from .noted_values import Complain
from .parameters import Noted, references_of
from .unwritten import Unwritten

__all__ = ["ReachedState", "Rewound", "state_of", "state_of_idle"]


class ReachedState:
    """The state found by one forward.

    Attributes:
        generators: Random generators.
        parameters: Parameters, with their versions.
        plans: The plans of the modules.
    """

    __slots__ = ("_attributes", "_contents", "_epoch", "_unwritten", "_with_buffers", "generators", "parameters", "plans")

    generators: Sequence[torch.Generator]
    parameters: Noted
    plans: Sequence[ModulePlan]
    _attributes: AttributeNotes
    _contents: State | None
    _epoch: int
    _unwritten: Sequence[Unwritten]
    _with_buffers: bool

    def storages(self) -> frozenset[int | None]:
        """Returns the storages of tensors which may be rewound."""
        return frozenset() if self._contents is None else self._contents.storages()

    def close(self, *, failed: bool) -> None:
        """Ends forward.

        Args:
            failed: Whether forward ended by an exception, perhaps before its writes.
        """
        contents, written = self._contents, _NO_TENSORS
        if contents is not None:
            if not contents.settle():
                self._contents = None
            elif contents.parameters:  # which a rerun finds as they were
                self.parameters.leave_out(contents.parameters)
            if any(plan.learning.is_learning() for plan in self.plans):
                written = contents.written()
        for plan in self.plans:
            plan.has_run(written, failed=failed)


class Rewound:
    """State put back for one rerun, with the means to undo this."""

    __slots__ = ("_attributes", "_complain", "_contents", "_state")

    def __init__(self, state: ReachedState, complain: Complain) -> None:
        """Prepares for a rerun.

        Args:
            state: The state found by forward.
            complain: Returns an error for a changed tensor that cannot be put back, and its version in forward.
        """
        self._state, self._complain = state, complain
        self._attributes = AttributesUndo(complain, with_buffers=state._with_buffers)
        self._contents: StateUndo | None = None

    def put_back(self) -> frozenset[int | None]:
        """Puts back the state found by forward; returns the storages with another content in the rerun."""
        state, attributes = self._state, self._attributes
        attributes.put_back(state._attributes, has_new_parts=has_new_parts(state._epoch))
        kept = [one for one in state._unwritten if self._may_be_written(one)] if state._unwritten else ()
        if state._contents is None and not (kept or attributes.may_initialise):
            return _NO_STORAGES
        undo = self._contents = StateUndo()
        if attributes.may_initialise:
            undo.watch_trained(state.plans, self._complain)
        for one in kept:
            undo.keep(one.tensors)
        if state._contents is not None:
            state._contents.rewind(undo, self._complain)
        return undo.storages()

    def _may_be_written(self, unwritten: Unwritten) -> bool:
        """Whether the rerun may write to tensors that forward has not written to, because hooks or flags have changed.

        Raises:
            MutationError: If such a tensor was written to since forward began.
        """
        unwritten.check(self._complain)
        return self._attributes.may_initialise or not unwritten.hooks.hold()

    def restore(self) -> None:
        """Restores the state from before :meth:`put_back`.

        Raises:
            MutationError: If the rerun initialised parameters once more, which are restored; or if the rerun wrote to a tensor
                that forward has not written to.
        """
        try:
            if self._contents is not None:
                self._contents.restore()
            for unwritten in self._state._unwritten:
                unwritten.check(self._complain)
        finally:
            self._attributes.restore()


_NO_STORAGES: frozenset[int | None] = frozenset()
_NO_TENSORS: Sequence[torch.Tensor] = ()
_NO_UNWRITTEN: Sequence[Unwritten] = ()
_NO_GENERATORS: Sequence[torch.Generator] = ()


def state_of_idle(plan: ModulePlan, *, preserve_buffers: bool) -> ReachedState:
    """Returns the state of an idle module (:func:`.module_plan.idle_plan`)."""
    unwritten, pack = plan.learning.unwritten, plan.learning.pack
    state = ReachedState()  # attributes one by one: half the cost of an ``__init__``
    state.plans = (plan,)
    state._epoch = plan.epoch
    state._attributes = plan.notes
    state._contents = None if pack is None or not preserve_buffers else State((), (pack,), ())
    state._unwritten = _NO_UNWRITTEN if unwritten is None or not preserve_buffers else (unwritten,)
    state._with_buffers = preserve_buffers
    state.parameters = Noted(plan.parameters)
    state.generators = _NO_GENERATORS
    return state


def state_of(reached: Reached, *, preserve_buffers: bool) -> ReachedState | None:
    """Returns the state reached by a function; None if a lazy module has not made its parameters yet.

    The first forward of a lazy module changes the module for good, and cannot be done twice.

    Args:
        reached: Modules, tensors and generators.
        preserve_buffers: Whether buffers, and other tensors, are put back.
    """
    plans = list(map(plan_of, reached.modules))
    if any(plan.is_lazy for plan in plans):
        return None
    state = ReachedState()
    state.plans = plans
    state._epoch = epoch()
    state._attributes = (
        plans[0].notes if len(plans) == 1 else AttributeNotes([note for plan in plans for note in plan.notes.notes])
    )
    state.parameters = Noted(references_of(plans, reached.tensors))
    state._with_buffers = preserve_buffers
    state._contents, generators = capture_state(plans, reached.tensors) if preserve_buffers else (None, [])
    found = [plan.learning.unwritten for plan in plans] if preserve_buffers else ()
    state._unwritten = [one for one in found if one is not None]
    state.generators = [*reached.generators, *generators]
    return state
