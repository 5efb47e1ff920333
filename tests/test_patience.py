"""A thread of autograd's engine waits for a rerun, but not for one that waits for that thread."""

from __future__ import annotations

import _thread
import threading
from queue import SimpleQueue

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import CheckpointError, checkpoint, is_recomputing
from ckpt_hooks._core import patience
from tests.measure import leaf
from tests.test_current import install  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("no_gc")

WEIGHT = torch.tensor(2.0)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Has a wait end after five looks, a hundredth of a second apart."""
    monkeypatch.setattr(patience, "INTERVAL", 0.01)
    monkeypatch.setattr(patience, "LOOKS", 5)


def on_thread_of_engine(function):
    """Runs a function on a thread that :mod:`threading` has not started; returns what waits for it and returns its error."""
    ended = SimpleQueue()

    def run():
        try:
            function()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    _thread.start_new_thread(run, ())
    return ended.get


class Region:
    """A function whose next recompute runs backward, which lasts until it is told to go on.

    The inner backward waits in C, as it does for the thread of another device: a hook is the ``get`` of a queue, which takes
    the gradient, a number that is not 0, for whether to block. There are two outputs, since autograd itself has two backwards
    take turns at one node.
    """

    def __init__(self):
        self.next = threading.Event()
        self.began = threading.Event()
        self.go_on = SimpleQueue()

    def __call__(self, x):
        inner = x.detach().sum().requires_grad_()
        scaled = inner * 2
        if is_recomputing() and self.next.is_set():
            self.next.clear()
            scaled.register_hook(self.go_on.get)
            self.began.set()
        (slope,) = grad(scaled.exp(), inner)
        h = x * slope
        return h.sin(), h.cos()


def gradient_beside(function, output, x, other):
    """Returns a gradient, while whose rerun stands still something else happens on a thread, and what that returns."""

    def beside():
        assert function.began.wait(60)
        try:
            found.append(other())
        finally:
            function.go_on.put(None)

    found = []
    function.next.set()
    thread = threading.Thread(target=beside)
    thread.start()
    (gradient,) = grad(output, x, retain_graph=True)
    thread.join()
    return gradient, *found


def plain(x, output=0):
    """Returns the gradient of one of the outputs without regions."""
    return grad(Region()(x)[output].sum(), x)[0]


def test_a_wait_for_a_rerun_that_waits_is_an_error(install):  # noqa: F811
    install(2)
    x = leaf(3)
    function = Region()
    first, second = (y.sum() for y in checkpoint(name="both")(function)(x))
    gradient, error = gradient_beside(
        function, first, x, lambda: on_thread_of_engine(lambda: grad(second, x, retain_graph=True))(timeout=60)
    )
    assert torch.equal(gradient, plain(x))
    assert type(error) is CheckpointError
    assert error.region == ("both",)
    assert "both" in str(error)
    assert "for 0.05 seconds" in str(error)
    assert torch.equal(grad(second, x)[0], plain(x, 1))  # nothing is lost


class Counting(torch.nn.Module):
    """A module with a buffer that it writes, so that its reruns come one after another."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.count += 1
        return self.function(x)[0] * self.count.clone()


def test_a_wait_for_a_module_that_another_region_runs(install):  # noqa: F811
    install(2)
    x = leaf(3)
    function = Region()
    module = Counting(function)
    first, second = (checkpoint(module, x).sum() for _ in range(2))
    gradient, error = gradient_beside(
        function, first, x, lambda: on_thread_of_engine(lambda: grad(second, x, retain_graph=True))(timeout=60)
    )
    assert torch.equal(gradient, plain(x))
    assert type(error) is CheckpointError
    assert torch.equal(grad(second, x)[0], grad((Region()(x)[0] * module.count).sum(), x)[0])
    assert module.count == 2


FUNCTION: list[Region] = []


def scaled(x):
    """Reads a variable that is another one in each forward."""
    return FUNCTION[0](x)[0] * WEIGHT


def test_a_wait_for_variables_that_another_region_has_lent(install, monkeypatch):  # noqa: F811
    install(2)
    x = leaf(3)
    function = Region()
    monkeypatch.setattr("tests.test_patience.FUNCTION", [function])
    monkeypatch.setattr("ckpt_hooks._function.state.loans.INTERVAL", patience.INTERVAL)
    outputs = []
    for weight in (2.0, 3.0, 5.0):
        monkeypatch.setattr("tests.test_patience.WEIGHT", torch.tensor(weight))
        outputs.append(checkpoint(scaled, x).sum())
    first, second, _ = outputs
    gradient, error = gradient_beside(
        function, first, x, lambda: on_thread_of_engine(lambda: grad(second, x, retain_graph=True))(timeout=60)
    )
    assert torch.equal(gradient, grad((Region()(x)[0] * 2).sum(), x)[0])
    assert type(error) is CheckpointError
    assert torch.equal(grad(second, x)[0], grad((Region()(x)[0] * 3).sum(), x)[0])


def test_threads_of_the_users_wait_on(install):  # noqa: F811
    """No backward needs a thread that Python started: the rerun will end."""
    install(2)
    x = leaf(3)
    function = Region()
    first, second = (y.sum() for y in checkpoint(function, x))
    found = []
    other = threading.Thread(target=lambda: found.append(grad(second, x, retain_graph=True)[0]))

    def beside():
        other.start()
        other.join(0.2)  # four times the limit
        return other.is_alive()

    gradient, waits = gradient_beside(function, first, x, beside)
    assert waits
    other.join()
    assert torch.equal(gradient, plain(x))
    assert torch.equal(found[0], plain(x, 1))


def test_a_rerun_that_works_is_waited_for(install):  # noqa: F811
    """It calls backward again and again: each call is another one."""
    install(2)
    x = leaf(3)
    stands_still, entered, go_on = (threading.Event() for _ in range(3))

    def function(x):
        if is_recomputing() and stands_still.is_set():
            stands_still.clear()
            entered.set()
            while not go_on.wait(0.001):
                inner = torch.ones((), requires_grad=True)
                grad(inner * 2, inner)
        h = x * 2
        return h.sin(), h.cos()

    first, second = (y.sum() for y in checkpoint(function, x))
    found = []

    def beside():
        assert entered.wait(60)
        wait = on_thread_of_engine(lambda: found.append(grad(second, x, retain_graph=True)[0]))
        threading.Event().wait(0.2)
        go_on.set()
        found.append(wait())

    stands_still.set()
    thread = threading.Thread(target=beside)
    thread.start()
    (gradient,) = grad(first, x, retain_graph=True)
    thread.join()
    assert torch.equal(gradient, grad((x * 2).sin().sum(), x)[0])
    assert torch.equal(found[0], grad((x * 2).cos().sum(), x)[0])
    assert found[1] is None
