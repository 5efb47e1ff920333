"""State that one region reaches besides its arguments, as its forward found it: attributes and contents, together.

Attributes of modules are :mod:`.attributes`, contents of tensors :mod:`.module_state`, parameters that
must stay as they are :mod:`.parameters`. Attributes go back first, since tensors are written to where they are bound.
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
    """What one forward found.

    Attributes:
        generators: Random generators.
        parameters: Parameters, with their versions.
        plans: Those of the modules.
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
        """Returns which storages hold what may be rewound."""
        return frozenset() if self._contents is None else self._contents.storages()

    def close(self, *, failed: bool) -> None:
        """Ends forward.

        Args:
            failed: Whether it has ended by an exception, and may not have come to what it changes.
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
    """State put back for one rerun, and what undoes that."""

    __slots__ = ("_attributes", "_complain", "_contents", "_state")

    def __init__(self, state: ReachedState, complain: Complain) -> None:
        """Prepares for a rerun.

        Args:
            state: What forward found.
            complain: Returns an error for a tensor that has changed and the version that it had, which cannot be put back.
        """
        self._state, self._complain = state, complain
        self._attributes = AttributesUndo(complain, with_buffers=state._with_buffers)
        self._contents: StateUndo | None = None

    def put_back(self) -> frozenset[int | None]:
        """Puts back what forward found; returns which storages get another content for the rerun."""
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
        """Whether the rerun may write to tensors that forward has not written to, since hooks or flags are other ones.

        Raises:
            MutationError: If one was written to since forward began.
        """
        unwritten.check(self._complain)
        return self._attributes.may_initialise or not unwritten.hooks.hold()

    def restore(self) -> None:
        """Puts back what :meth:`put_back` found.

        Raises:
            MutationError: If the rerun initialised parameters once more. They are as they were before it. Or if it wrote to a
                tensor that forward has not written to.
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
    """Returns the state of a module that need not be looked at (:func:`.module_plan.idle_plan`)."""
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
    """Returns the state of what a function reaches; None where a lazy module has not made its parameters yet.

    What a lazy module's first forward does to itself cannot be done twice.

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
