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

__all__ = ["ExplainingFrame"]

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

    __slots__ = ("_arguments", "_marks", "collector", "explain")

    explain: Callable[[DeterminismError], DeterminismError] | None
    _arguments: Arguments
    #: Of the running rerun.
    collector: Collector | None
    _marks: list[Mark]

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
        """Raises an error with more words, if ``explain`` is set."""
        if self.explain is not None:
            raise self.explain(found) from found

    def _explain_failure(self, error: Exception, saved: int, *, selective: bool) -> None:
        """Raises an exception of an operator as an error of its region where a policy hands out results of operators.

        Args:
            error: The exception of the function, raised in a rerun and not in forward.
            saved: The number of tensors saved by the rerun.
            selective: Whether a policy is active.
        """
        if type(error) is not RuntimeError or not self.complete:
            return
        for words, reason in _REFUSED.items():
            if words in str(error):
                self._refuse(error, reason)
        if not selective:
            return
        region = self._region()
        found = DeterminismError(
            f"region {'/'.join(region)!r}: the recompute failed where forward did not, after {saved} saved tensors. "
            f"RuntimeError: {error}\n{TIP}",
            region=region,
            index=saved,
            expected="no exception",
            found="RuntimeError",
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
