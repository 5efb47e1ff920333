"""Errors of a rerun, explained by objects changed in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ckpt_hooks._core.frame import Mark
from ckpt_hooks._core.paths import RegionPath, format_path
from ckpt_hooks.errors import CheckpointError, DeterminismError

from .arguments import Arguments
from .boundaries import NO_MARKS
from .collector import Collector
from .compare import TIP
from .handles import HandleFrame
from .state.reached_objects import ObjectNotes

__all__ = ["ExplainingFrame"]

_MOST = 6  # the largest number of changes in a message

_WAYS_OUT = (
    "Such objects are not put back for a recompute. Hand what the function reads over as a tensor, list, dict or dataclass, "
    "which is captured; have the function keep nothing (a cache of keys is of no use in training: `use_cache=False`); or write "
    "`with checkpoint_region():`, which runs Python once."
)

#: Exceptions of operators and containers given other values than in forward. No subclasses: an error of memory, of a device
#: or of a collective is none of these.
_SYMPTOMS = frozenset({RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError, AssertionError})


#: The reasons why a backward cannot run in a recompute, by words of torch's error.
_REFUSED = {
    "input_grad_buffers": "which a custom backward has set off after it had read ctx.input_grad_buffers. Torch allows no "
    "backward until that one returns. Read ctx.saved_tensors first",
    "appears to not have been used in the graph": "with respect to a tensor from outside of the region that has gone since "
    "forward: the recompute has another one on the same memory, without its history. Keep the tensor until backward",
}


class ExplainingFrame(HandleFrame):
    """A frame which notes explanations for the failure of a rerun.

    Attributes:
        explain: Turns an error of a rerun into an error with more words.
    """

    __slots__ = ("_arguments", "_marks", "_objects", "collector", "explain")

    explain: Callable[[DeterminismError], DeterminismError] | None
    _arguments: Arguments
    #: Of the running rerun.
    collector: Collector | None
    _marks: list[Mark]
    _objects: ObjectNotes | None

    def note_inside(self, count: int, path: RegionPath) -> None:
        """Leaves a mark; see :meth:`Frame.note_inside`."""
        collector = self.collector
        if collector is not None:
            collector.marks.append((len(collector.values), count, path))
        else:
            if self._marks is NO_MARKS:
                self._marks = []
            self._marks.append((len(self.numbers), count, path))

    def _region(self) -> tuple[str, ...]:
        return format_path(self.path)

    def _explain(self, found: DeterminismError) -> None:
        """Names the objects changed since forward began in an error; raises an error with more words, if ``explain`` is set."""
        changes = [] if self._objects is None else sorted(self._objects.changes(), key=lambda change: not change.matters())
        if changes:
            lines = [f"\n  {change.describe(self._arguments.path_of)}" for change in changes[:_MOST]]
            more = "" if len(changes) <= _MOST else f"\n  and {len(changes) - _MOST} more"
            found.args = (f"{found}\nChanged since forward began:{''.join(lines)}{more}\n{_WAYS_OUT}",)
        if self.explain is not None:
            raise self.explain(found) from found

    def _explain_failure(self, error: Exception, saved: int, *, selective: bool) -> None:
        """Raises an exception of the function as an error of its region, unless the function alone may be the cause.

        The region is the cause if an object reached by the function has changed, or if a policy hands out results of operators.

        Args:
            error: The exception of the function, raised in a rerun and not in forward.
            saved: The number of tensors saved by the rerun.
            selective: Whether a policy is active.
        """
        kind = type(error)
        if kind not in _SYMPTOMS or not self.complete:
            return
        if kind is RuntimeError:
            for words, reason in _REFUSED.items():
                if words in str(error):
                    self._refuse(error, reason)
        changes = [] if self._objects is None else self._objects.changes()
        if not (selective and kind is RuntimeError) and not any(change.matters() for change in changes):
            return
        region = self._region()
        found = DeterminismError(
            f"region {'/'.join(region)!r}: the recompute failed where forward did not, after {saved} saved tensors. "
            f"{kind.__name__}: {error}\n{TIP}",
            region=region,
            index=saved,
            expected="no exception",
            found=kind.__name__,
        )
        try:
            self._explain(found)
            raise found from error
        finally:
            del found, error  # their tracebacks hold this call, and this call would hold them: a cycle

    def _refuse(self, error: Exception, reason: str) -> NoReturn:
        """Raises the error for a recompute with an impossible backward inside.

        Raises:
            CheckpointError: In any case.
        """
        region = self._region()
        try:
            raise CheckpointError(
                f"region {'/'.join(region)!r}: its function runs backward, and so does its recompute, {reason}, or write "
                "`with checkpoint_region():`, which runs Python once.",
                region=region,
            ) from error
        finally:
            del error

    def _explain_leftovers(self, collector: Collector) -> None:
        """Raises an error if a rerun has gone on from the end of forward; see :mod:`.state.leftovers`."""
        leftovers = collector.leftovers
        change = None if leftovers is None else leftovers.changed_again()
        if leftovers is None or leftovers.first is None or change is None:
            return
        region, place = self._region(), change.place(self._arguments.path_of)
        found = DeterminismError(
            f"region {'/'.join(region)!r}: saved tensor {leftovers.first} of the recompute was computed from what forward left "
            f"in {place}, which the function changes in each call: the recompute read another state there than forward.",
            region=region,
            index=leftovers.first,
            expected=f"{place} as when forward began",
            found=f"{place} as forward left it",
        )
        self._explain(found)
        raise found
