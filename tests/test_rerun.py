"""The function frame as a context manager, its contexts, names, and what a transform does to a region."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
from torch.autograd import grad

import ckpt_hooks._checkpoint
from ckpt_hooks import checkpoint, is_recomputing
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.settings import observe
from ckpt_hooks._function.frame import FunctionFrame
from tests.measure import Calls, Log, leaf


def test_a_frame_around_a_forward_in_module_hooks():
    """A pre-forward hook enters a frame and a forward hook leaves it: the module becomes a region."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3, dtype=torch.float64), torch.nn.Tanh(), torch.nn.Tanh())
    forward = Calls(module.forward)
    module.forward = forward
    frames = Log()

    def before(module, args, kwargs):
        frame = FunctionFrame(module.forward, args, kwargs)
        frame.__enter__()
        frames.append(frame)

    def after(module, args, kwargs, output):
        frames.pop().__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
    x = leaf(2, 3)
    (g,) = grad(module(x).sum(), x)
    for handle in handles:
        handle.remove()
    assert forward.count == 2
    assert torch.equal(g, grad(module(x).sum(), x)[0])


def test_regions_are_named_by_their_path():
    """A path has the names of the regions around, in forward and in a rerun."""
    paths = Log()

    class Module(torch.nn.Module):
        def forward(self, x):
            paths.append(format_path(stack.innermost.path))
            return checkpoint(name="inner")(self.inner)(x)

        def inner(self, x):
            paths.append(format_path(stack.innermost.path))
            return x.sin().cos()

    x = leaf(3)
    y = checkpoint(Module(), x)
    module, inner = (Module.__qualname__,), (Module.__qualname__, "inner")
    assert paths == [module, inner]
    paths.clear()
    y.sum().backward()
    assert paths == [inner]  # the inner frame's rerun: its input is a leaf, which the outer one need not rerun for
    assert stack.innermost is None


def test_is_recomputing():
    seen = Log()
    x = leaf(3)
    y = checkpoint(lambda x: seen.append(is_recomputing()) or x.sin().cos(), x)
    y.sum().backward()
    assert seen == [False, True]
    assert not is_recomputing()


def test_events_in_order():
    """What an observer sees of one region in forward and backward."""

    class Log(Observer):
        def __init__(self):
            self.events = []

        def entered(self, region):
            self.events.append("entered")

        def saved(self, region, saved, tensor):
            self.events.append(f"{saved.fate.value} {saved.position}")

        def exited(self, region, error):
            self.events.append(f"exited {error!r}")

        def recomputing(self, region, *, in_order):
            self.events.append("recomputing")

        def recomputed(self, region, error):
            self.events.append(f"recomputed {error!r}")

        def restored(self, region, position, tensor):
            self.events.append(f"restored {position}")

    x, w, inner, outer = leaf(3), leaf(3), Log(), Log()
    with observe(outer):
        with observe(inner):
            y = checkpoint(lambda x, w: x.sin().exp() * w, x * 1, w)
        checkpoint(torch.neg, x)
        with pytest.raises(KeyError):
            checkpoint(lambda x: {}[0], x)
    y.sum().backward()
    forward = ["entered", "dropped 0", "dropped 1", "parameter 2", "dropped 3", "exited None"]
    backward = ["recomputing", "recomputed None", "restored 3", "restored 1", "restored 0"]
    assert inner.events == forward + backward
    others = ["entered", "exited None", "entered", "exited KeyError(0)"]
    assert outer.events == forward + others + backward


def test_an_observer_that_raises_leaves_no_hooks_behind():
    class Broken(Observer):
        def entered(self, region):
            raise KeyError

    x = leaf(3)
    with observe(Broken()), pytest.raises(KeyError):
        checkpoint(torch.exp, x)
    assert stack.innermost is None
    assert torch.equal(x.sin().grad_fn._saved_self, x)


def test_observers_see_a_failed_recompute():
    class Log(Observer):
        def recomputed(self, region, error):
            self.error = repr(error)

    calls = Calls(lambda x: x.sin().exp() if calls.count == 1 else {}[0])
    x, log = leaf(3), Log()
    with observe(log):
        y = checkpoint(calls, x)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert log.error == "KeyError(0)"


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jacrev"])
def test_under_a_transform_a_region_runs_unchecked(monkeypatch, transform):
    """Results are right, the function runs once, and one warning says what happened."""
    monkeypatch.setattr(ckpt_hooks._function.callables, "_warned_of_transform", False)
    calls = Calls(lambda x: x.sin().exp().sum())
    x = torch.randn(4, 3, dtype=torch.float64)
    run = {
        "grad": lambda: torch.func.grad(lambda x: checkpoint(calls, x))(x),
        "vjp": lambda: torch.func.vjp(lambda x: checkpoint(calls, x), x)[1](torch.ones((), dtype=torch.float64))[0],
        "jacrev": lambda: torch.func.jacrev(lambda x: checkpoint(calls, x))(x),
        "vmap": lambda: grad(torch.vmap(lambda x: checkpoint(calls, x))(x.requires_grad_()).sum(), x)[0],
    }[transform]
    with pytest.warns(UserWarning, match=r"torch\.func transform"):
        got = run()
    assert calls.count == 1
    y = x.detach().requires_grad_()
    assert torch.equal(got, grad(y.sin().exp().sum(), y)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.grad(lambda x: checkpoint(calls, x))(x.detach())


def test_where_hooks_are_disabled_the_users_message_is_raised():
    x = leaf(3)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"), pytest.raises(RuntimeError, match="no hooks here"):
        checkpoint(torch.sin, x)
    assert stack.innermost is None


def test_where_hooks_are_disabled_around_backward_the_users_message_is_raised():
    x = leaf(3)
    y = checkpoint(torch.exp, x).sum()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"), pytest.raises(RuntimeError, match="no hooks here"):
        y.backward()
    y.backward()
    assert torch.equal(x.grad, x.exp())


def test_a_recompute_context_is_entered_anew_each_time():
    """Also one made by ``contextlib.contextmanager``, which works once."""
    entered = []

    @contextlib.contextmanager
    def recompute_context():
        entered.append(is_recomputing())
        yield

    x = leaf(3)
    y = checkpoint(torch.exp, x, context_fn=lambda: (contextlib.nullcontext(), recompute_context())).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert entered == [True, True]


@pytest.mark.slow
def test_importing_and_a_first_step_leave_dynamo_alone():
    """Importing ``torch._dynamo`` costs more than a second; neither import nor a checkpointed step needs it."""
    program = (
        "import sys, torch, ckpt_hooks\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "f = lambda x: ckpt_hooks.checkpoint(torch.sin, x.exp())\n"
        "with torch.autocast('cpu'):\n"
        "    ckpt_hooks.checkpoint(f, x).sum().backward()\n"
        "with ckpt_hooks.set_checkpoint_debug_enabled(True):\n"
        "    ckpt_hooks.checkpoint(f, x).sum().backward()\n"
        "ckpt_hooks.checkpoint_sequential([torch.sin] * 4, 2, x).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_rerun_in_the_middle_of_forward_does_not_run_ahead(early_stop):
    """A backward inside asks for tensors before forward has come to the write below."""

    def found(form):
        x = torch.linspace(-1, 1, 8, requires_grad=True)
        h, log = x * 1.2, Log()

        def function():
            y = h * 0.25
            (inner,) = torch.autograd.grad(torch.nn.functional.celu(y).sum(), y, create_graph=True)
            h.view(2, 4)[0].mul_(-0.7)
            log.append(inner.detach())
            return h * inner

        result = form(function)
        return [result.detach(), h.detach(), *log]

    expected = found(lambda function: function())
    results = found(lambda function: checkpoint(early_stop=early_stop)(function)())
    assert list(map(torch.equal, results, expected)) == [True] * 3
