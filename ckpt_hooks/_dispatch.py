"""What all dispatch modes of the package have in common: the compiler has no business in them, nor they in compiled code."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["QuietDispatchMode"]


class QuietDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that neither imports Dynamo nor keeps compiled functions from running compiled."""

    # Without this Dynamo would be imported to wrap the handler.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    # A compiled function that runs under this mode stays compiled.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
