"""Errors for an exception which the function raised in a rerun, and not in forward."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable

from ckpt_hooks.errors import CheckpointError, DeterminismError

from .compare import TIP
from .explain import SEE_MORE

__all__ = ["explain_failure"]

#: The reasons why a backward cannot run in a recompute, by words of torch's error, which torch tells apart in no other way.
_REFUSED = {
    "input_grad_buffers": "which a custom backward has set off after it had read ctx.input_grad_buffers. Torch allows no "
    "backward until that one returns. Read ctx.saved_tensors first",
    "appears to not have been used in the graph": "with respect to a tensor from outside of the region that has gone since "
    "forward: the recompute has another one on the same memory, without its history. Keep the tensor until backward",
}

#: The exceptions of an iterator, a file or a queue that is used up, or of a list that is empty.
_OF_WHAT_IS_TAKEN = (StopIteration, EOFError, IndexError, queue.Empty, ValueError)
#: What a rerun cannot have again.
_TAKEN = (
    "An iterator, a generator, a file or a queue gives a recompute its next item: take the item before the region, and pass it "
    "as an argument."
)


def explain_failure(
    error: Exception,
    region: tuple[str, ...],
    saved: int,
    explain: Callable[[DeterminismError], None] | None,
    *,
    is_debugged: bool,
) -> None:
    """Raises an exception of an operator as an error of its region where torch or a policy is the cause.

    Exceptions of what is used up get a note.

    Args:
        error: The exception.
        region: Names of the regions, outermost first.
        saved: The number of tensors saved by the rerun.
        explain: Raises an error with more words. None without a policy, which may hand out results of other operators.
        is_debugged: Whether both runs are logged.

    Raises:
        CheckpointError: For a backward in the recompute which torch refuses.
        DeterminismError: For another failure under a policy.
    """
    if type(error) is not RuntimeError:
        note = f"Raised by the recompute of region {'/'.join(region)!r}, where forward raised nothing. {_TAKEN}"
        if isinstance(error, _OF_WHAT_IS_TAKEN) and note not in getattr(error, "__notes__", ()):
            with contextlib.suppress(AttributeError):  # before Python 3.11
                add_note: Callable[[str], None] = getattr(error, "add_note")  # noqa: B009
                add_note(note)
        return
    found: CheckpointError
    for words, reason in _REFUSED.items():
        if words in str(error):
            found = CheckpointError(
                f"region {'/'.join(region)!r}: its function runs backward, and so does its recompute, {reason}, or write "
                "`with checkpoint_region():`, which runs Python once.",
                region=region,
            )
            break
    else:
        if explain is None:
            return
        found = DeterminismError(
            f"region {'/'.join(region)!r}: the recompute failed where forward did not, after {saved} saved tensors. "
            f"RuntimeError: {error}\n{TIP}{'' if is_debugged else ' ' + SEE_MORE}",
            region=region,
            index=saved,
            expected="no exception",
            found="RuntimeError",
        )
    try:
        if explain is not None and isinstance(found, DeterminismError):
            explain(found)
        raise found from error
    finally:
        del found, error  # their tracebacks hold this call, and this call would hold them: a cycle
