"""Regions whose values are compared: on request, or because a dispatch mode of the user's is active around the region.

Such a mode is not entered again for a recompute, since a counting mode would count twice. A mode which only watches does no
harm; a mode which changes results must be noticed. So the values of a region under any mode are compared, as by ``"values"``.
Nothing is compared while torch traces: there are no values then.

If forward and recompute differ, different surroundings of the two runs are the first suspect, so an error names these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from ckpt_hooks._ambient import untracked
from ckpt_hooks._core.modes import is_without_values, modes_in_words, users_modes
from ckpt_hooks._tensors.determinism import NOTHING, VALUES
from ckpt_hooks.errors import DeterminismError

from .options import RegionOptions

__all__ = ["Compared", "compared"]

_SOURCES = {"python": "Python's `random`", "numpy": "NumPy's global state"}


def compared(options: RegionOptions) -> tuple[RegionOptions, Compared]:
    """Returns the options of a region about to run, and a comparison of its values and surroundings."""
    check = options.check
    modes, on_request = users_modes(), check.fingerprint is not None
    if is_without_values():
        options = dataclasses.replace(options, check=dataclasses.replace(check, fingerprint=None))
    elif modes and not on_request and check is not NOTHING:
        options = dataclasses.replace(options, check=VALUES)
    return options, Compared(modes, on_request=on_request)


class Compared:
    """The surroundings of one forward.

    Attributes:
        modes: Names of dispatch modes of the user's.
    """

    __slots__ = ("_on_request", "modes")

    def __init__(self, modes: list[str], *, on_request: bool) -> None:
        self.modes = modes
        self._on_request = on_request

    def explain(self, error: DeterminismError, images: untracked.Images, region: tuple[str, ...]) -> None:
        """Adds differences between the surroundings of the two runs to an error of a recompute.

        Args:
            error: The error.
            images: The untracked random streams, as the recompute began.
            region: Names of the regions, outermost first.
        """
        if error.region == region:
            suspects = modes_in_words(self.modes, users_modes()) + _draws_in_words(untracked.moved_since(images))
            error.args = (f"{error}{suspects}",)

    def check(self, images: untracked.Images, region: tuple[str, ...]) -> None:
        """Checks an ended recompute whose values are as in forward.

        Args:
            images: The untracked random streams, as the recompute began.
            region: Names of the regions, outermost first.

        Raises:
            DeterminismError: If values are compared on request, and the recompute drew from an untracked stream: values may be
                the same, yet the stream is not where plain autograd leaves it.
        """
        if self._on_request and untracked.is_only_thread() and (moved := untracked.moved_since(images)):
            raise DeterminismError(
                f"region {'/'.join(region)!r}: the recompute has moved a random stream on.{_draws_in_words(moved)}",
                region=region,
                index=-1,
                expected="no random stream moved by the recompute",
                found=f"{' and '.join(_SOURCES[name] for name in moved)} moved by it",
            )


def _draws_in_words(moved: Collection[str]) -> str:
    if not moved:
        return ""
    sources = " and ".join(_SOURCES[name] for name in moved)
    blocks = " and ".join(f'`with ckpt_hooks.track_rng("{name}"):`' for name in moved)
    return (
        f" The function draws from {sources}, which is not tracked: the recompute draws other numbers than forward, and moves "
        f"the stream on. Run forward and backward in {blocks}."
    )
