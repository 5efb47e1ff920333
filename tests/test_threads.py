"""Rule 11, and settings that belong to one thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region, is_recomputing, set_checkpoint_early_stop
from ckpt_hooks._state import journal
from tests.measure import Calls, Log, Table, leaf

pytestmark = pytest.mark.usefixtures("no_gc")


def in_threads(*targets):
    """Runs functions at once, each in a thread, and raises what any of them raised."""
    errors = Log()

    def run(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_rule_11_two_backwards_over_one_frame_at_once():
    """Two threads in backward over one graph: one recompute each, one at a time, both right."""
    inside, most = [0], [0]

    def function(x):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        y = x.sin().exp().cos().tanh()
        inside[0] -= 1
        return y.neg()

    x = leaf(50)
    calls = Calls(function)
    y = checkpoint(calls, x, early_stop=False).sum()
    results = [None] * 4

    def backward(i):
        results[i] = grad(y, x, retain_graph=True)[0]

    for _ in range(20):
        in_threads(*(lambda i=i: backward(i) for i in range(4)))
        assert all(torch.equal(g, results[0]) for g in results)
    assert calls.count == 1 + 20 * 4
    assert most[0] == 1
    assert torch.equal(results[0], grad(x.sin().exp().cos().tanh().neg().sum(), x)[0])


def test_threads_have_stacks_of_their_own():
    barrier = threading.Barrier(4)

    def work():
        def function(x):
            barrier.wait(10)
            y = x.sin()
            barrier.wait(10)
            return y.exp()

        x = torch.linspace(-1, 1, 3).requires_grad_()  # without a draw
        y = checkpoint(function, x, early_stop=False)
        (g,) = grad(y.sum(), x)
        assert torch.equal(g, grad(x.sin().exp().sum(), x)[0])

    in_threads(*[work] * 4)


def test_operators_that_may_draw_may_wait_for_each_other():
    """As collectives of a library's own. Nothing tells that they draw nothing."""
    barrier = threading.Barrier(2)

    @torch.library.custom_op("ckpt_hooks_tests::meets", mutates_args=())
    def meets(x: torch.Tensor) -> torch.Tensor:
        barrier.wait(10)
        return x * 2

    def work():
        with checkpoint_region(preserve_rng_state=False):
            y = (leaf(3) * meets(leaf(3).detach())).sin()
        y.sum().backward()

    in_threads(work, work)


def test_is_recomputing_is_of_this_thread():
    seen = Table()

    def function(x):
        seen.setdefault(is_recomputing(), []).append(1)
        if is_recomputing():
            in_threads(lambda: seen.setdefault("other", is_recomputing()))
        return x.sin().exp()

    x = leaf(3)
    checkpoint(function, x).sum().backward()
    assert seen == {False: [1], True: [1], "other": False}
    assert not is_recomputing()


def test_settings_are_of_this_thread():
    tail = Calls(torch.neg)

    def work():
        x = leaf(3)
        checkpoint(lambda x: tail(x.sin()), x).sum().backward()

    with set_checkpoint_early_stop(False):
        in_threads(work)
    assert tail.count == 1


@pytest.mark.parametrize("changes", ["buffers", "attributes"])
def test_reruns_of_a_module_that_changes_come_one_after_the_other(changes):
    """The second waits for the first, and both find what forward found."""

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.calls = 0

        def forward(self, x):
            if changes == "buffers":
                self.count += 1
            else:
                self.calls += 1
            if is_recomputing() and not in_rerun.is_set():
                in_rerun.set()
                while not journal._turn._waiters:
                    assert not through.wait(0.001)
            return (x * (self.count + self.calls)).sin()

    module, x, in_rerun, through = Counts(), leaf(3), threading.Event(), threading.Event()
    first, second = checkpoint(module, x).sum(), checkpoint(module, x).sum()

    def other():
        assert in_rerun.wait(20)
        second.backward()
        through.set()

    in_threads(first.backward, other)
    assert through.wait(20)
    expected = x.cos() + 2 * (x * 2).cos()
    assert torch.equal(x.grad, expected) or torch.equal(x.grad, 2 * (x * 2).cos() + x.cos())
    assert (module.count, module.calls) == ((2, 0) if changes == "buffers" else (0, 2))


def test_a_rerun_that_waits_for_a_variable_goes_on_when_another_thread_is_through_with_it():
    """The variable is bound to what one of the two wants, so that one takes no lock, and tells the other at its end."""
    x, through = leaf(3), threading.Event()
    in_rerun = threading.Event()

    def function(x):
        if is_recomputing() and scale == 2.0:
            in_rerun.set()
            while not journal._turn._waiters:
                assert not through.wait(0.001)
        return (x * scale).sin()

    outputs = []
    for scale in (1.0, 2.0):  # noqa: B007 -- the function reads it
        outputs.append(checkpoint(function, x).sum())

    def other():
        assert in_rerun.wait(20)
        outputs[0].backward()
        through.set()

    threads = [threading.Thread(target=run, daemon=True) for run in (outputs[1].backward, other)]
    for thread in threads:
        thread.start()
    assert through.wait(20)
    for thread in threads:
        thread.join()
    assert torch.equal(x.grad, x.cos() + 2 * (x * 2).cos()) or torch.equal(x.grad, 2 * (x * 2).cos() + x.cos())


SHARED = 1.0


def by_closure():
    """Returns two functions of one cell, and what binds it anew."""
    scale = 1.0

    def bind(value):
        nonlocal scale
        scale = value

    return [lambda x, meet: meet((x * scale).sin()).exp(), lambda x, meet: meet((x + scale).sin()).exp()], bind


def by_closure_of_helpers():
    """The same by functions that those call, and one of them twice."""
    scale = 1.0

    def scaled(x):
        return (x * scale).sin()

    def bind(value):
        nonlocal scale
        scale = value

    return [lambda x, meet: meet(scaled(x)).exp()] * 2, bind


def by_global():
    def bind(value):
        global SHARED
        SHARED = value

    return [lambda x, meet: meet((x * SHARED).sin()).exp(), lambda x, meet: meet((x + SHARED).sin()).exp()], bind


@pytest.mark.parametrize("since", [1.0, 2.0], ids=["unchanged", "bound anew since"])
@pytest.mark.parametrize("share", [by_closure, by_closure_of_helpers, by_global])
def test_reruns_that_find_the_same_may_wait_for_each_other(share, since):
    """Two threads meet in the middle of the reruns of functions that share a cell. What forward found is the same for both."""
    functions, bind = share()
    barrier = threading.Barrier(2)

    def meet(y):
        if is_recomputing():
            barrier.wait(timeout=10)
        return y

    for _ in range(5):
        bind(1.0)
        xs = [leaf(3), leaf(3)]
        expected = [grad(function(x, meet).sum(), x)[0] for function, x in zip(functions, xs, strict=True)]
        outputs = [checkpoint(function, x, meet) for function, x in zip(functions, xs, strict=True)]
        bind(since)
        present = [function(torch.ones(3), meet) for function in functions]
        in_threads(*(y.sum().backward for y in outputs))
        assert [torch.equal(x.grad, g) for x, g in zip(xs, expected, strict=True)] == [True, True]
        assert [torch.equal(function(torch.ones(3), meet), y) for function, y in zip(functions, present, strict=True)] == [
            True
        ] * 2
