"""Moving saved tensors to the host between forward and backward, by :mod:`ckpt_hooks._tensors.transfers`."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from ._core.misuse import NeedsParentheses, OfThisProcess, checked_bytes, checked_integer
from ._core.mutation import Why, mutated
from ._tensors.transfers import DEFAULT_MIN_OFFLOAD_SIZE, MAX_STASH_SIZE, Moved, Shared, transfers_for
from ._torch.autograd import sequence_number
from ._torch.compiling import skipped
from ._torch.modes import is_traced, num_dispatch_modes, num_function_modes
from ._torch.tensors import counted_detach, is_kept_anyway

__all__ = ["DEFAULT_MIN_OFFLOAD_SIZE", "offload_saved_tensors"]


class offload_saved_tensors(  # noqa: N801 -- used like a function
    OfThisProcess, torch.autograd.graph.saved_tensors_hooks, metaclass=NeedsParentheses
):
    """Moves tensors that autograd saves in a block to host memory and back for backward, without recomputation.

    Parameters, their views, autocast's casts, small tensors and tensors on the host stay where they are. A tensor that several
    operators save is moved once. Under ``make_fx`` nothing is moved.

    Cost: the device holds at most ``max_fwd_stash_size`` tensors in transit; to send another, the compute stream waits for the
    oldest copy. Backward fetches as many ahead. Pinned host memory comes in blocks of 2, 4, 8, ... bytes, so it may take twice
    the size of the tensors.

    Args:
        min_offload_size: Tensors below this size stay on the device: bytes, or a string such as ``"1MiB"``. The default is
            256 KiB, where copying takes about as long as starting two copies.
        max_fwd_stash_size: The number of tensors in transit to the host, and fetched ahead. Larger numbers overlap copies and
            computation better and take more memory.

    Raises:
        ValueError: If ``min_offload_size`` is not a number of bytes, or ``max_fwd_stash_size`` is below 1.
        TypeError: If ``min_offload_size`` is neither a number nor a string.
        MutationError: In backward, if a saved tensor was modified in place, as plain autograd raises too.

    Example:
        >>> import torch
        >>> from ckpt_hooks.offload import offload_saved_tensors
        >>> x = torch.ones(2, requires_grad=True)
        >>> with offload_saved_tensors():
        ...     y = x.sin().cos()
        >>> y.sum().backward()
    """

    @skipped
    def __init__(
        self, min_offload_size: int | str = DEFAULT_MIN_OFFLOAD_SIZE, max_fwd_stash_size: int = MAX_STASH_SIZE
    ) -> None:
        min_size = checked_bytes(min_offload_size, "min_offload_size")
        advice = f"Pass 1 for the least memory, or leave the argument out for the default of {MAX_STASH_SIZE}."
        stash_size = checked_integer(max_fwd_stash_size, "max_fwd_stash_size", advice)
        waiting = self._waiting = _Waiting()
        shared = self._shared = Shared()

        def pack(tensor: torch.Tensor) -> Any:
            if (num_dispatch_modes() or num_function_modes()) and is_traced():
                # Tracing began in the block. The tensor itself stays, since the tracer knows it; an alias or a copy would be a
                # constant of the traced graph.
                return [tensor, tensor._version]
            if waiting.saved and waiting.sequence != sequence_number():
                waiting.send(shared)
            if is_kept_anyway(tensor):
                return [tensor, tensor._version]
            transfers = transfers_for(tensor, min_size)
            if transfers is None:
                # Detached, since an operator may save the tensor that it returns: its node would then own itself.
                return [counted_detach(tensor) if tensor.requires_grad else tensor, tensor._version]
            if not tensor.requires_grad:
                saved = Moved(tensor, transfers, stash_size)
                waiting.add(saved)
                return saved
            moved = shared.find(tensor)
            if moved is None:
                moved = Moved(tensor, transfers, stash_size)
                moved.send(shared)
            return moved

        super().__init__(pack, _bring_back)

    def __enter__(self) -> None:
        traced = bool(num_dispatch_modes() or num_function_modes()) and is_traced()
        self._waiting.traced.append(traced)
        if not traced:
            super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        if not self._waiting.traced.pop():
            super().__exit__(*exc_info)
            self._waiting.send(self._shared)


class _Waiting(threading.local):
    """Tensors saved on this thread that their operator may still fill, as ``rrelu`` fills its noise."""

    # These tensors require no gradient. They are complete once another operator saves a tensor, or the block ends.

    def __init__(self) -> None:
        self.saved: list[weakref.ref[Moved]] = []
        self.sequence = -1
        #: For each open block of this thread, whether a tracer was active at its entry. Such a block does nothing.
        self.traced: list[bool] = []

    def add(self, saved: Moved) -> None:
        self.saved.append(weakref.ref(saved))
        self.sequence = sequence_number()

    def send(self, shared: Shared) -> None:
        waiting, self.saved = self.saved, []
        for reference in waiting:
            saved = reference()
            if saved is not None:
                saved.send(shared)


@skipped
def _bring_back(packed: Any) -> torch.Tensor:
    """Returns a moved tensor, or a tensor that stayed if its version is the same."""
    if type(packed) is not list:
        moved: torch.Tensor = packed.get()
        return moved
    tensor: torch.Tensor
    tensor, version = packed
    if tensor._version != version:
        raise mutated(Why.OFFLOADED, (), tensor, version)
    return tensor
