"""Ctrl-C between any two lines of the package leaves nothing behind on the thread."""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch
from torch import nn
from torch.autograd import grad

import ckpt_hooks
from ckpt_hooks import checkpoint, checkpoint_region, region
from ckpt_hooks._ambient.draws import num_draw_modes
from ckpt_hooks._core.modes import QuietDispatchMode
from ckpt_hooks._core.stack import stack
from ckpt_hooks._torch import num_dispatch_modes, num_function_modes, top_saved_tensors_hooks
from ckpt_hooks._torch.functions import AT_WORK
from tests.kernels import Inner

_PACKAGE = os.path.dirname(ckpt_hooks.__file__)
#: All events of all kinds take minutes.
_EVERY = int(os.environ.get("CKPT_HOOKS_INTERRUPT_EVERY", "41"))
MM = torch.ops.aten.addmm.default


def recorded(function, x):
    with checkpoint_region():
        return function(x)


KINDS = {
    "function": checkpoint,
    "recorded": recorded,
    "function of autograd's": lambda function, x: recorded(lambda x: Inner.apply(function(x) * 2), x),
    "policy": lambda function, x: checkpoint(policy=[MM])(function)(x),
    "values": lambda function, x: checkpoint(function, x, determinism_check="values"),
    "nested": lambda function, x: checkpoint(lambda x: checkpoint(function, x).sin(), x),
    "recorded in a function": lambda function, x: checkpoint(lambda x: recorded(function, x).sin(), x),
    "function in a recorded one": lambda function, x: recorded(lambda x: checkpoint(function, x).sin(), x),
}


def left():
    """Returns what regions have left on this thread."""
    return {
        "hooks": top_saved_tensors_hooks(False) is not None,
        "dispatch modes": num_dispatch_modes() > 0,
        "function modes": num_function_modes() > 0,
        "modes that are not asked": torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python),
        "frame": stack.innermost is not None,
        "entry": bool(region._entered.open),
        "draws": num_draw_modes() > 0,
        "gradients off": not torch.is_grad_enabled(),
        "watchers": bool(AT_WORK),
    }


class Interrupt:
    """Raises ``KeyboardInterrupt`` at the nth event in the package: a line, a call, or a return."""

    def __init__(self, at=None):
        self.count, self.at = 0, at

    def _trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        self.count += 1
        if self.count == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._trace

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(None)


@pytest.fixture
def _no_word_of_what_is_swallowed(monkeypatch):
    """A finaliser that is interrupted cannot raise."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def test_a_watcher_that_never_came_on_the_stack_of_modes_counts_no_more(monkeypatch):
    def interrupted(mode):
        raise KeyboardInterrupt

    monkeypatch.setattr(QuietDispatchMode, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorded(torch.sin, torch.rand(3, requires_grad=True))
    gc.collect()
    assert not AT_WORK


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("_no_word_of_what_is_swallowed")
def test_an_interrupt_anywhere_leaves_nothing_after_the_next_region(kind):
    torch.manual_seed(0)
    run, layer = KINDS[kind], nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3))
    x, scale = torch.rand(4, 3, requires_grad=True), 2.0

    def function(x):
        return layer(x).sin() * scale

    def step():
        torch.manual_seed(1)
        layer[1].reset_running_stats()
        return grad(run(function, x).sum(), [x, *layer.parameters()])

    for _ in range(6):  # until all that is learned is known
        expected = step()
    for _ in range(2):
        with Interrupt() as dry:
            step()
    interrupted = 0
    for at in range(1, dry.count + 1, _EVERY):
        try:
            with Interrupt(at):
                step()  # to its end where a finaliser swallows it
        except KeyboardInterrupt:
            interrupted += 1
        run(torch.sin, x)
        assert not any(left().values()), (at, left())
        assert all(map(torch.equal, step(), expected)), at
    assert interrupted > dry.count / _EVERY / 2
