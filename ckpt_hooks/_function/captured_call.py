"""The call of a region's function, captured for reruns: arguments, options, and what the function sees besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

import torch

from ckpt_hooks import _ambient
from ckpt_hooks._ambient.streams import seed_masks_anew
from ckpt_hooks._core.modes import is_without_values, users_modes
from ckpt_hooks._tensors import determinism
from ckpt_hooks.errors import DeterminismError

from .arguments import Arguments
from .contexts import ContextPair
from .journal import Journal, journal_of
from .options import RegionOptions
from .reach import variables_in

_NO_GENERATORS: Sequence[torch.Generator] = ()
_NO_LAYERS: Sequence[Any] = ()


class CapturedCall:
    """One call of a region's function; random streams, switches and context variables are unset until :meth:`capture`."""

    __slots__ = (
        "ambient",
        "arguments",
        "contexts",
        "explain",
        "function",
        "modes",
        "options",
        "state",
        "variables",
    )

    ambient: _ambient.Ambient
    variables: Sequence[tuple[ContextVar[Any], Any, Any]]

    def __init__(
        self, function: Callable[..., Any], arguments: Arguments, options: RegionOptions, contexts: ContextPair | None
    ) -> None:
        self.function, self.arguments, self.options, self.contexts = function, arguments, options, contexts
        # Names of the user's dispatch modes around forward, where values are compared.
        self.modes: list[str] | None = None
        # Turns an error of a rerun into one with more words.
        self.explain: Callable[[DeterminismError], DeterminismError] | None = None
        self.state: Journal | None = None

    def compare_values(self) -> None:
        """Has the values of reruns compared with those of forward: on request, and under dispatch modes of the user's."""
        # Such a mode is not entered again for a rerun, since a counting mode would count twice. A mode which only watches does
        # no harm; a mode which changes results must be noticed.
        check, modes = self.options.check, users_modes()
        if is_without_values():  # while torch traces
            check = dataclasses.replace(check, fingerprint=None)
        elif modes and check.fingerprint is None and check is not determinism.NOTHING:
            check = determinism.VALUES
        if check is not self.options.check:
            self.options = dataclasses.replace(self.options, check=check)
        self.modes = None if check.fingerprint is None else modes

    def capture(self) -> bool:
        """Notes the state before the call; returns False if a lazy module has not made parameters yet."""
        function, options = self.function, self.options
        generators, recurrent = _NO_GENERATORS, _NO_LAYERS
        context = copy_context()
        self.variables, others = variables_in(context) if context else ((), ())
        objects = (*self.arguments.objects, *others)
        state = journal_of(function, objects, preserve_buffers=options.preserve_buffers, is_needed=bool(self.variables))
        if state is False:
            return False
        if state is not None:
            self.state, generators = state, state.generators
            recurrent = [layer for tree in state.trees for layer in tree.recurrent]
        self.ambient = _ambient.capture(preserve_rng_state=options.preserve_rng_state, generators=generators)
        if recurrent and options.preserve_rng_state:
            seed_masks_anew(recurrent)
        return True

    def settle(self, *, failed: bool) -> tuple[torch.Tensor, int] | None:
        """Ends forward; returns a tensor that only this forward wrote to, not earlier forwards, and the version before."""
        self.arguments.close()
        return None if self.state is None else self.state.close(failed=failed)
