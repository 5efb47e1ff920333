"""Spans: one region from a layer to another, in each call of the module around them."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections import Counter

import pytest
import torch
from torch import nn

from ckpt_hooks import (
    CheckpointError,
    apply_checkpointing,
    checkpoint,
    checkpoint_region,
    memory_ledger,
    remove_checkpointing,
    span,
)
from ckpt_hooks.policies import save_modules
from tests.measure import CountOps, Watch


def chain(count=8, width=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.GELU() if number % 2 else nn.Linear(width, width) for number in range(count)))


def results(model, x, call=None):
    """Returns the output and all gradients of a model, which ``call`` calls."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = (call or model)(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(one.grad for one in model.parameters())]


def check(model, x, select, **options):
    """Compares a model with spans and without, also in regions, and copied; afterwards all is as before."""
    before = [dict(vars(module)) for module in model.modules()]
    plain = results(model, x)
    with apply_checkpointing(model, select, **options) as applied:
        for call in (model, checkpoint()(model), checkpoint_region()(model)):
            assert all(map(torch.equal, results(model, x, call), plain))
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(map(torch.equal, results(one, x), plain))
    assert [dict(vars(module)) for module in model.modules()] == before
    return applied


class Entered(Watch):
    """Notes the path of each region that forward enters, and what ended it."""

    def __init__(self):
        self.paths, self.errors = [], []

    def entered(self, region):
        if not region.in_recompute:
            self.paths.append(region.path)

    def exited(self, region, error):
        if not region.in_recompute:
            self.errors.append(error)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "ends",
    [
        [("0", "3")],
        [("0", "3"), ("4", "7")],
        [("0", "7"), ("0", "3"), ("4", "7")],
        [("0", "1"), ("0", "5"), ("6", "7"), ("2", "3"), ("0", "7")],
        [("2", "2")],
    ],
)
def test_spans_are_bitwise_and_undone(ends):
    model = chain()
    applied = check(model, X, [span(*one) for one in ends])
    names = {" to ".join(one) for one in ends}
    assert {region.name for region in applied} == names
    assert {region.form for region in applied} == {"checkpoint_region"}
    with apply_checkpointing(model, [span(*one) for one in ends]), Entered() as entered:
        results(model, X)
    assert Counter(path[-1] for path in entered.paths) == Counter(names)
    assert all(set(path) <= names for path in entered.paths)


def test_wider_spans_are_around():
    model = chain()
    first = apply_checkpointing(model, span("0", "1"))
    second = apply_checkpointing(model, [span("0", "7"), span("4", "7")])
    third = apply_checkpointing(model, ["0", "7"])
    with Entered() as entered:
        results(model, X)
    assert entered.paths == [
        ("0 to 7",),
        ("0 to 7", "0 to 1"),
        ("0 to 7", "0 to 1", "0"),
        ("0 to 7", "4 to 7"),
        ("0 to 7", "4 to 7", "7"),
    ]
    second.undo()
    with Entered() as entered:
        results(model, X)
    assert entered.paths == [("0 to 1",), ("0 to 1", "0"), ("7",)]
    third.undo()
    first.undo()
    assert not any("forward" in vars(module) for module in model)


def test_what_a_span_drops_and_runs_again():
    model, x = chain(16, 64), torch.randn(512, 64)

    def peak():
        model.zero_grad()
        return memory_ledger(lambda: model(x).sum().backward()).peak.nbytes

    plain = peak()
    with apply_checkpointing(model, [span(f"{at}", f"{at + 3}") for at in range(0, 16, 4)]):
        assert peak() < 0.6 * plain
    for policy, products in ((None, 16), (save_modules("*"), 8)):
        with apply_checkpointing(model, span("0", "15"), policy=policy, replay_whole=False), CountOps() as ops:
            model(x).sum().backward()
        assert ops.counts["addmm"] == products


class Residual(nn.Module):
    """Layers of a list, with code between them."""

    def __init__(self, count=4):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(4), nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x).sin(), 0.3)
        return x


class Again(nn.Module):
    """Calls two layers several times, and itself between them."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, depth=1):
        for _ in range(3):
            x = self.one(self.one(x).sin())
            if depth:
                x = self(x, depth - 1)
            x = self.other(x).cos()
        return self.other(x)


def test_lists_of_layers_and_layers_called_again():
    torch.manual_seed(0)
    check(Residual(), X, span("layers.0", "layers.2"))
    check(Residual(), X, {span("norm", "layers.1"): None, span("layers.2", "layers.3"): save_modules("layers.*")})
    model = nn.Sequential(Residual(), Again())
    check(model, X, [span("0.layers.0", "0.layers.3"), span("1.one", "1.other"), span("0", "1")])
    with apply_checkpointing(model, span("1.one", "1.other")), Entered() as entered:
        results(model, X)
    assert Counter(map(len, entered.paths)) == {1: 3, 2: 9}


class Reversed(nn.Sequential):
    """Calls its layers from the last to the first."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


def test_ends_are_in_the_order_of_calls():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    check(nn.Sequential(one, nn.GELU(), other, one), X, span("2", "0"))
    check(Reversed(one, nn.GELU(), other), X, span("2", "0"))


def test_calls_by_others_are_plain():
    model = chain()
    with apply_checkpointing(model, span("0", "3")), Entered() as entered:
        model[3](model[2](model[1](model[0](X))))
        with torch.no_grad():
            model(X)
        assert entered.paths == []
        model(X)
    assert [*map(len, entered.paths)] == [1]


def test_threads_have_calls_of_their_own():
    model, found, paths = chain(), [], []
    plain = results(model, X)
    inside = threading.Barrier(2)
    model[1].register_forward_pre_hook(lambda module, args: (inside.wait(10), args)[1])

    def run():
        x = X.clone().requires_grad_()
        with Entered() as entered:  # which hears of this thread alone
            y = model(x)
            found.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
        paths.append([*map(len, entered.paths)])

    with apply_checkpointing(model, span("0", "3")):
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 2
    assert all(torch.equal(one, other) for result in found for one, other in zip(result, plain, strict=False))
    assert paths == [[1], [1]]


def test_hooks_of_the_ends_run_outside_and_once():
    model, entered = chain(), Entered()
    seen = entered.paths = entered.errors = []
    for at in ("0", "1", "3"):
        module = model.get_submodule(at)
        module.register_forward_pre_hook(lambda *_, at=at: seen.append(f"before {at}"))
        module.register_forward_hook(lambda *_, at=at: seen.append(f"after {at}"))
    with apply_checkpointing(model, span("0", "3")), entered:
        results(model, X)
    assert seen == ["before 0", ("0 to 3",), "after 0", "before 1", "after 1", "before 3", None, "after 3"]


class Program(nn.Module):
    """Runs a function with two layers."""

    def __init__(self, program):
        super().__init__()
        self.one, self.other, self.program = nn.Linear(4, 4), nn.Linear(4, 4), program

    def forward(self, x):
        return self.program(self, x)


def raising(model, x):
    model.one(x)
    raise ZeroDivisionError


def caught_before_the_end(model, x):
    x = model.one(x)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return model.other(x)


def first_fails(model, x):
    with contextlib.suppress(RuntimeError):
        x = model.one(x[:, :2])
    return model.other(model.one(x))


def test_exceptions():
    for program in (caught_before_the_end, first_fails):
        check(Program(program), X, span("one", "other"))
    model = Program(raising)
    with apply_checkpointing(model, span("one", "other")), Entered() as entered:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(X)
            assert isinstance(entered.errors[-1], ZeroDivisionError)
        model.program = caught_before_the_end
        results(model, X)
    assert entered.paths == [("one to other",)] * 3


def handled(model, x):
    x = model.one(x)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        return model.other(x)


def under_a_mode(model, x):
    x = model.one(x)
    with CountOps():
        return model.other(x)


def under_hooks(model, x):
    x = model.one(x)
    with torch.autograd.graph.save_on_cpu():
        return model.other(x)


def in_a_region(model, x):
    x = model.one(x)
    with checkpoint_region(name="inner"):
        return model.other(x)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            handled,
            # On Python 3.12 an exception stays handled after tests/test_interrupts.py has raised from a trace function.
            r"an exception is not the same at both ends: before the first layer (none|a \w+) is handled, after the last a Z",
        ),
        (under_a_mode, "the dispatch mode is not the same at both ends: before the first layer none, after the last Co"),
        (under_hooks, "a pair of saved-tensor hooks is not the same at both ends: before the first layer none, after the last"),
        (in_a_region, "the region around is not the same at both ends: before the first layer none, after the last inner"),
    ],
)
def test_ends_that_differ(program, words):
    model = Program(program)
    with apply_checkpointing(model, span("one", "other")):
        for _ in range(2):
            with pytest.raises(CheckpointError, match=f"region 'one to other': {words}") as caught:
                model(X)
            assert caught.value.region == ("one to other",)
        model.program = caught_before_the_end
        found = results(model, X)
    assert all(map(torch.equal, found, results(model, X)))


def test_options_of_spans():
    with pytest.raises(ValueError, match="early_stop"):
        apply_checkpointing(chain(), span("0", "1"), early_stop=False)
    model = chain()
    apply_checkpointing(model, span("0", "3"))
    with pytest.raises(ValueError, match="'0 to 3' and '0 to 3' overlap"):
        apply_checkpointing(model, span("0", "3"))
    remove_checkpointing(model[3])
    with Entered() as entered:
        results(model, X)
    assert not entered.paths
    remove_checkpointing(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert "0 to 3" in str(apply_checkpointing(model, span("0", "3")))


def test_replicas_have_spans_of_their_own():
    model = nn.Sequential(chain())
    apply_checkpointing(model, span("0.0", "0.3"))
    inner = model[0]._replicate_for_data_parallel()
    inner._modules = {name: one._replicate_for_data_parallel() for name, one in model[0].named_children()}
    for name, one in inner._modules.items():
        for own, parameter in model[0].get_submodule(name).named_parameters():
            setattr(one, own, parameter.detach().clone().requires_grad_())
    with Entered() as entered:
        y = inner(X)
        y.square().sum().backward()
    assert entered.paths == [("0.0 to 0.3",)]
    grads = [getattr(inner.get_submodule(at), name).grad for at in "0246" for name in ("weight", "bias")]
    expected = results(model, X)
    assert all(map(torch.equal, [y, *grads], [expected[0], *expected[2:]]))


@pytest.mark.compile
def test_spans_are_plain_in_compiled_code():
    model = chain()
    plain = results(model, X)
    with apply_checkpointing(model, span("0", "3")), Entered() as entered:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert all(map(torch.equal, results(model, X, compiled), plain))
    assert not entered.paths
