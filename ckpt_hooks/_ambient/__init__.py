"""What a function sees besides its arguments: captured at forward, restored around each recompute (Rule 7).

Each module knows one kind of state. All of them follow one scheme: ``capture`` answers a value that is cheap to hold (None
where there is nothing out of the ordinary), ``enter`` makes the present equal to such a value and answers what is needed to
undo that (None where nothing had to be touched), ``leave`` undoes it. Whether there is anything out of the ordinary is asked
here, in the cheapest way there is, before any of them is called.
"""

from __future__ import annotations

from ckpt_hooks._torch import is_any_autocast_enabled, num_function_modes

from . import autocast, default_device, rng

__all__ = ["Ambient"]


class Ambient:
    """The state around one forward."""

    __slots__ = ("_autocast", "_default_device", "_rng")

    def __init__(self, *, preserve_rng_state: bool) -> None:
        """Captures the state of this thread.

        Args:
            preserve_rng_state: Whether random generators are part of it. If not, a recompute draws what comes next, but
                still leaves the streams outside where it found them.
        """
        self._autocast = autocast.capture() if is_any_autocast_enabled() else None
        self._default_device = default_device.capture() if num_function_modes() else None
        self._rng = rng.capture() if preserve_rng_state else None

    def forward_ended(self) -> None:
        """Lets go of what forward turned out not to need: the state of generators that it did not draw from."""
        if self._rng is not None:
            self._rng = rng.drawn_from(self._rng)

    def enter(self) -> Undo:
        """Makes this thread's state equal to the captured one; the answer goes to :meth:`leave`."""
        return (
            rng.enter(self._rng),
            autocast.enter(self._autocast) if self._autocast is not None or is_any_autocast_enabled() else None,
            default_device.enter(self._default_device) if self._default_device is not None or num_function_modes() else None,
        )

    @staticmethod
    def leave(undo: Undo) -> None:
        """Makes this thread's state what it was before :meth:`enter`, whatever happened since."""
        rng_undo, autocast_undo, device_undo = undo
        if device_undo is not None:
            default_device.leave(device_undo)
        if autocast_undo is not None:
            autocast.leave(autocast_undo)
        rng.leave(rng_undo)


Undo = tuple[rng.Snapshot, "autocast.Snapshot | None", "default_device.Undo | None"]
