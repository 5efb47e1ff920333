"""The state a function sees besides its arguments: captured at forward, restored around each recompute (Rule 7).

Random sources, switches, autocast and function modes each have ``capture``, ``enter``, which returns the undo, and ``leave``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._torch import hook_points
from ckpt_hooks._torch.modes import GLOBAL_DEVICE, num_function_modes

with hook_points():
    from . import devices, random, switches
    from .devices import TORCH_NAMES
    from .random import CPU, HEAD, TAIL, TRACKED
    from .switches import AUTOCAST, FUNCTION_MODES


class Ambient:
    __slots__ = ("casts", "has_sources", "is_simple", "modes", "random", "switches")

    def __init__(
        self, states: random.RandomStates, values: switches.SwitchValues, casts: Any = None, modes: Any = None
    ) -> None:
        self.random, self.switches, self.casts, self.modes = states, values, casts, modes
        #: Whether a recompute has to restore random sources besides torch's default generators.
        self.has_sources = bool(states[2])
        #: Whether the state consists only of switches of the process and states of torch's default generators.
        self.is_simple = states[0] is not None and not self.has_sources and casts is modes is None


_latest: Ambient | None = None


def capture(*, preserve_rng_state: bool, generators: Sequence[torch.Generator] = ()) -> Ambient:
    global _latest
    latest, (image, state) = _latest, CPU.seen
    if (
        latest is not None
        and preserve_rng_state
        and not (generators or TRACKED or num_function_modes() or GLOBAL_DEVICE.__dict__.get("device_context"))
        and latest.switches.is_set()
    ):
        if image != (HEAD.raw, TAIL.raw):
            state = CPU.state()
        of_devices = () if len(TORCH_NAMES) == devices.names_without_devices else random.read_devices()
        if latest.random[0] is not state or latest.random[1] is not of_devices:
            _latest = latest = Ambient((state, of_devices, ()), latest.switches)
        return latest
    states = random.capture(generators, preserve=preserve_rng_state)
    ambient = Ambient(states, switches.capture(), AUTOCAST.capture(), FUNCTION_MODES.capture())
    if ambient.is_simple:
        _latest = ambient
    return ambient


def enter(ambient: Ambient, *, default_generators: bool = True) -> Ambient | list[Any]:
    """Restores a captured state on this thread, where gradients are enabled already; returns the undo for :func:`leave`."""
    is_around = (
        ambient.is_simple
        # Torch's backward may hide the mode of the default device from the stack of function modes, so ask for it directly.
        # The lookup goes to this thread's dict, since a missing attribute would cost an exception.
        and not (num_function_modes() or GLOBAL_DEVICE.__dict__.get("device_context"))
        and ambient.switches.is_set()
    )
    if is_around and default_generators and not TRACKED and len(TORCH_NAMES) == devices.names_without_devices:
        image, state = CPU.seen
        if ambient.random[0] is state and image == (HEAD.raw, TAIL.raw):
            return ambient  # this thread already has the captured state
    undo: list[Any] = []
    try:
        undo.append(random.enter(ambient.random, defaults=default_generators))
        undo.append((ambient.switches, None) if is_around else switches.enter(ambient.switches))
        if not is_around:
            undo.append(AUTOCAST.enter(ambient.casts))
            undo.append(FUNCTION_MODES.enter(ambient.modes))
    except BaseException:
        leave(undo)
        raise
    return undo


_STATES: Sequence[Any] = (random, switches, AUTOCAST, FUNCTION_MODES)


def leave(undo: Ambient | list[Any]) -> None:
    """Restores the state of this thread before :func:`enter`, whatever happened since."""
    if isinstance(undo, Ambient):
        image, state = CPU.seen
        if undo.random[0] is not state or image != (HEAD.raw, TAIL.raw):
            CPU.write(undo.random[0])
        if not undo.switches.guard.check():
            undo.switches.write()
        return
    while undo:
        state, before = _STATES[len(undo) - 1], undo[-1]
        if state is AUTOCAST:
            undo[-1] = None  # autocast counts levels: after an exception, a second ``leave`` must not count down again
        state.leave(before)
        undo.pop()
