"""Functions that ``torch.compile`` has compiled, called inside of regions: bitwise as without regions."""

from __future__ import annotations

import functools
import itertools
import pathlib
import shutil
import threading

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch.fx.experimental.proxy_tensor import make_fx

import ckpt_hooks
from ckpt_hooks import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_chunks,
    checkpoint_loop,
    checkpoint_region,
    checkpoint_sequential,
    memory_ledger,
    policies,
    trace,
)
from ckpt_hooks._torch import compiling
from ckpt_hooks.offload import offload_saved_tensors
from tests.measure import CountOps, Watch, in_turns

pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        yield
    torch._dynamo.reset()


def recorded(function, x, **options):
    with checkpoint_region(**options):
        return function(x)


def within(block, call):
    with block():
        return call()


def in_ledger(function, x):
    found = []
    memory_ledger(lambda: found.append(checkpoint(function, x)))
    return found[0]


FORMS = {
    "frame": checkpoint,
    **{
        name: lambda f, x, name=name, value=value: checkpoint(**{name: value})(f)(x)
        for name, value in {
            "debug": True,
            "determinism_check": "values",
            "early_stop": False,
            "split_backward": True,
            "offload_inputs": True,
            "policy": policies.dots_saveable,
        }.items()
    },
    "region": recorded,
    "region with a policy": lambda f, x: recorded(f, x, policy=policies.dots_saveable),
    "chunks": lambda f, x: checkpoint_chunks(f, x, chunks=1),
    "nested": lambda f, x: checkpoint(lambda x: checkpoint(f, x), x),
    "frame in a region": lambda f, x: recorded(lambda x: checkpoint(f, x), x),
    "traced": lambda f, x: within(trace, lambda: checkpoint(f, x)),
    "in a ledger": in_ledger,
    "offloaded": lambda f, x: within(offload_saved_tensors, lambda: f(x)),
}


# What the compiler gives up, and Python runs


def gradients(run, function, parameters, *shape, backwards=2):
    torch.manual_seed(0)
    x = torch.randn(*shape, requires_grad=True)
    for parameter in parameters:
        parameter.grad = None
    y = run(function, x)
    for left in reversed(range(backwards)):
        y.square().sum().backward(retain_graph=left > 0)
    return [y.detach(), *(torch.zeros(()) if one.grad is None else one.grad for one in (x, *parameters))]


def all_equal(found, expected):
    return all(map(torch.equal, found, expected))


def plainly(function, x):
    return function(x)


def test_a_compiled_submodule_past_the_limit_of_recompiles(impl):
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parameters = list(block.parameters())
    expected = [gradients(plainly, block, parameters, rows, 8) for rows in range(2, 6)]
    for layer in block:
        layer.compile(backend="eager", dynamic=False)
    found = [gradients(impl, block, parameters, rows, 8) for rows in range(2, 6)]
    assert all(map(all_equal, found, expected))


@pytest.mark.parametrize("form", FORMS)
def test_hooks_of_regions_are_not_compiled(form):
    """Python runs a function that the compiler gave up, and the compiler still listens for calls of other functions."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    package, compiled, parameters = pathlib.Path(ckpt_hooks.__file__).parent, [], list(layer.parameters())

    def function(x):
        try:
            torch._dynamo.graph_break()
            h = torch.nn.functional.rrelu(layer(x.sin()), training=True).exp()
            with torch.enable_grad():  # a backward inside
                (gradient,) = torch.autograd.grad(h.cos().sum(), h, retain_graph=True)
            return h * gradient.detach()
        except ValueError:
            return x

    expected = gradients(plainly, function, parameters, 4, 8)
    hook = register_bytecode_hook(lambda code, _: compiled.append(pathlib.Path(code.co_filename)))
    try:
        found = gradients(FORMS[form], torch.compile(function, backend="eager"), parameters, 4, 8)
    finally:
        hook.remove()
    assert all_equal(found, expected)
    assert [path for path in compiled if package in path.parents] == []


# Views, of which compiled code saves something else than of other tensors


class Box:
    """An object with a tensor."""

    def __init__(self, x):
        self.x = x


def forgotten(function, x):
    """A closure over a variable that is another by then."""

    def call():
        return function(x)

    y = checkpoint(call)
    x = None
    return y


VIEWS = {
    "a part of a leaf": lambda x: x[:, :2],
    "a transposed result": lambda x: x.sin().transpose(0, 1),
    "one of several": lambda x: x.sin().chunk(2, 1)[1],
    "other sizes": lambda x: x.sin().view(2, 8, 8),
    "a part without grad": lambda x: x.detach()[:, :2],
}
OF_VIEWS = {
    **{
        name: FORMS[name]
        for name in ("frame", "debug", "offload_inputs", "split_backward", "policy", "region", "frame in a region")
    },
    "keyword": lambda f, x: checkpoint(lambda *, x: f(x), x=x),
    "list": lambda f, x: checkpoint(lambda box: f(box["x"][0]), {"x": [x]}),
    "attribute": lambda f, x: checkpoint(lambda box: f(box.x), Box(x)),
    "closure": forgotten,
    "nested": lambda f, x: checkpoint(lambda x: checkpoint(lambda x: checkpoint(f, x) * 1, x), x),
    "part in a frame": lambda f, x: checkpoint(lambda x: checkpoint(f, x.cos()[:1]), x),
    "part in a region": lambda f, x: recorded(lambda x: checkpoint(f, x.cos()[:1]), x),
    "under hooks": lambda f, x: within(torch.autograd.graph.save_on_cpu, lambda: checkpoint(f, x)),
    "chunks": lambda f, x: checkpoint_chunks(f, x, chunks=2),
    "sequential": lambda f, x: checkpoint_sequential([f, torch.sin], 2, x),
    "loop": lambda f, x: checkpoint_loop(lambda x: f(x).transpose(0, 1), x, 3, 2),
}
PLAINLY = {
    "part in a frame": lambda f, x: f(x.cos()[:1]),
    "part in a region": lambda f, x: f(x.cos()[:1]),
    "nested": lambda f, x: f(x) * 1,
    "chunks": lambda f, x: torch.cat([f(part) for part in x.chunk(2)]),
    "sequential": lambda f, x: f(x).sin(),
    "loop": lambda f, x: f(f(f(x).transpose(0, 1)).transpose(0, 1)).transpose(0, 1),
}


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("view", "form", "dynamic", "backwards"),
    [
        *in_turns(VIEWS, ["frame", "part in a frame"], [True, False, None], [1, 2]),
        *zip(itertools.cycle(VIEWS), OF_VIEWS, itertools.cycle([True, None]), itertools.cycle([2, 1, 1]), strict=False),
    ],
)
def test_a_compiled_function_of_a_view(view, form, dynamic, backwards):
    """It is neither compiled anew for a recompute, nor takes another graph."""
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    parameters = list(block.parameters())
    found = []
    for run in (PLAINLY.get(form, plainly), OF_VIEWS[form]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # A compiled backward that overwrites what was saved for it runs once.
        with torch._dynamo.config.patch(recompile_limit=8), torch._functorch.config.patch(donated_buffer=backwards == 1):
            compiled = torch.compile(block, backend="aot_eager", dynamic=dynamic)
            function = lambda f, x, run=run: run(f, VIEWS[view](x))  # noqa: E731
            found.append((gradients(function, compiled, parameters, 4, 4, 8, backwards=backwards), num_graphs()))
    (expected, graphs), (gradients_found, graphs_found) = found
    assert all_equal(gradients_found, expected)
    assert graphs_found == graphs


# Code of Inductor that is one operator

P = CheckpointPolicy
COMPILED = torch._higher_order_ops.wrap.inductor_compiled_code
#: Before 2.12 the operator is given a function, of which nothing tells whether it writes to its inputs: the results are kept.
Code = getattr(torch._higher_order_ops.wrap, "InductorCompiledCallable", None)


class Ran(Watch):
    """Counts how often the operator runs again, and how often a policy would be asked about it."""

    wants_operators = True

    def __init__(self):
        self.count = self.asked = 0

    def ran(self, region, operator):
        self.asked += operator.is_asked_about and operator.name == str(COMPILED)
        self.count += operator.in_recompute and operator.name == str(COMPILED)


ANSWERS = {P.MUST_SAVE: 0, P.PREFER_SAVE: 0, P.MUST_CPU_OFFLOAD: 0, P.PREFER_RECOMPUTE: 1, P.MUST_RECOMPUTE: 1}
SELECTIVE = {
    "call": lambda f, x, policy: checkpoint(policy=policy)(f)(x),
    "region": lambda f, x, policy: recorded(f, x, policy=policy),
    "in a region": lambda f, x, policy: recorded(lambda x: recorded(f, x, policy=policy) * 1, x),
    "replayed as a whole": lambda f, x, policy: recorded(f, x, policy=policy, replay_whole=True),
    "replayed one by one": lambda f, x, policy: recorded(f, x, policy=policy, replay_whole=False),
}


def answering(answer, asked):
    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return answer if op is COMPILED else P.PREFER_RECOMPUTE

    return policy


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
@pytest.mark.parametrize(("answer", "form"), [*zip(ANSWERS, SELECTIVE, strict=True), (P.PREFER_RECOMPUTE, "call")])
def test_a_policy_decides_on_code_of_inductor(answer, form):
    """As under torch's selective checkpoint, and bitwise, with a backward that overwrites what was saved for it."""
    block = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 8))
    parameters = [weight := nn.Parameter(torch.eye(8)), *block.parameters()]
    code = torch.compile(lambda x: (x @ weight).sin().exp().cos(), options={"wrap_inductor_compiled_regions": True})
    run, asked = SELECTIVE[form], {}

    def function(x):
        return (code(block(x)) * 2).add_(1).sin()

    def of_torch(function, x):
        policy = answering(answer, asked.setdefault("torch", []))
        contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, context_fn=contexts)

    expected = gradients(plainly, function, parameters, 4, 8, backwards=1)
    with Ran() as ran:
        found = gradients(
            lambda f, x: run(f, x, answering(answer, asked.setdefault("ours", []))), function, parameters, 4, 8, backwards=1
        )
    assert all_equal(found, expected)
    assert ran.count == (ANSWERS[answer] if Code else 0)
    assert ran.asked == 1
    gradients(of_torch, function, parameters, 4, 8, backwards=1)
    assert asked["ours"].count(COMPILED) == asked["torch"].count(COMPILED) == 1


GENERATED = "torch._inductor.runtime.compile_tasks.made"


def as_code(function, *examples, module=GENERATED):
    """Returns a function that calls another one as code of Inductor's is called: without gradients, by the operator."""
    graph = make_fx(function)(*examples)

    def call(inputs):
        given = [*inputs]
        inputs.clear()
        return function(*given)

    call.__module__ = module
    code = Code(call, graph) if Code else call

    def run(*inputs):
        with torch.no_grad():
            return COMPILED(code, [*inputs])

    return run


def of_a_result(x):
    """Its input is another one afterwards."""
    code = as_code(lambda h: (h.sin() * 3,), x.detach())
    h = x.detach() * 1
    (one,) = code(h)
    h.mul_(2)
    (other,) = code(h)
    h.add_(1)
    return (x * one).exp() * (x * other).sin() * h


def that_draws(x):
    code = as_code(lambda h: (torch.rand_like(h) * h, torch.rand(8)), x.detach())
    one, other = code(x.detach())
    return (x * one * torch.rand_like(x)).exp() * (x * other).sin()


TABLE = torch.linspace(-1, 1, 64).reshape(8, 8)


def that_returns_an_input(x):
    code = as_code(lambda h: (h.sin(), h, h.t(), 3, None), x.detach())
    one, same, turned, number, _ = code(x.detach() * 1)
    _, _, outside, _, _ = code(TABLE)
    return (x * one).exp() * (x * same).sin() * (x * turned.t()).cos() * (x * outside).sin() * number


def that_writes(x):
    """It is not to run again, whatever a policy says."""
    total = torch.zeros(8)

    def add(h, total):
        total.add_(h.sum(0).sin())
        return (h * total,)

    code = as_code(add, x.detach(), torch.zeros(8))
    (one,) = code(x.detach(), total)
    (other,) = code(x.detach().cos(), total)
    return (x * one).exp() * (x * other).sin() * total


def in_a_function(x):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            (result,) = code(h)
            ctx.save_for_backward(result)
            return result * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].cos()

    code = as_code(lambda h: (h * 2,), x.detach())
    return Double.apply(x.sin()).exp()


def that_returns_a_constant(x):
    """Each run returns the same memory, which the program writes to."""
    table = torch.ones(8)
    code = as_code(lambda h: (h.sin(), table), x.detach())
    one, same = code(x.detach())
    y = (x * one * same.clone()).exp()
    same.mul_(2)
    return y * same


def on_two_devices(x):
    """Nothing tells which generator it draws from."""
    code = as_code(lambda h: (h.sin() * torch.rand(8), torch.ones(2, device="meta")), x.detach())
    return (x * code(x.detach())[0]).exp()


def that_was_not_generated(x):
    """As a CUDA graph, which writes to the memory that it returned in its next run."""
    code = as_code(lambda h: (h.sin(),), x.detach(), module="torch._inductor.compile_fx")
    return (x * code(x.detach())[0]).exp()


#: Programs, and how often code runs again for one backward.
OF_CODE = {
    of_a_result: 2,
    that_draws: 1,
    that_returns_an_input: 2,
    that_writes: 0,
    in_a_function: 0,
    that_returns_a_constant: 0,
    on_two_devices: 0,
    that_was_not_generated: 0,
}


@pytest.mark.parametrize(
    ("program", "form", "answer"), in_turns(OF_CODE, SELECTIVE, [P.PREFER_RECOMPUTE, P.MUST_RECOMPUTE, P.MUST_SAVE])
)
def test_code_of_inductor_that_runs_again(program, form, answer):
    asked, times = [], OF_CODE[program] if Code and ANSWERS[answer] else 0
    expected = gradients(plainly, program, [], 8, 8)
    after = torch.get_rng_state()
    with Ran() as ran:
        found = gradients(lambda f, x: SELECTIVE[form](f, x, answering(answer, asked)), program, [], 8, 8)
    assert all_equal(found, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert ran.count == 2 * times
    assert COMPILED in asked or program is in_a_function


def test_a_graph_of_a_device_is_no_code_that_runs_again():
    """Nor is code of which a part was captured. What copies inputs that are not aligned is looked through."""
    from torch._inductor.compile_fx import cudagraphify
    from torch._inductor.utils import align_inputs_from_check_idxs

    def code(inputs):
        return inputs

    class Runner:
        __module__ = GENERATED
        partitions = ()

        def call(self, inputs):
            return inputs

    code.__module__ = Runner.call.__module__ = GENERATED
    captured = cudagraphify(code, device_index=0, stack_traces=[], is_backward=False, is_inference=False)
    partly = Runner()
    partly.partitions = [code, captured]
    aligned = [align_inputs_from_check_idxs(one, [0], set()) for one in (code, captured)]
    found = [compiling._is_generated(one) for one in (code, Runner().call, captured, partly.call, *aligned)]
    assert found == [True, True, False, False, True, False]


def is_seen():
    return torch.utils._python_dispatch._is_in_torch_dispatch_mode


def test_code_is_an_operator_in_regions_alone():
    """Whether a region ends by an error, on two threads that overlap, with a trace around, or a mode of the user's."""
    x = torch.randn(4, requires_grad=True)
    seen = []

    def failing(x):
        seen.append(is_seen())
        raise KeyError

    with pytest.raises(KeyError):
        recorded(failing, x)
    seen.append(is_seen())
    with trace(operators=True):
        recorded(torch.sin, x).sum().backward()
    seen.append(is_seen())
    inside, leave = threading.Event(), threading.Event()

    def waiting(x):
        inside.set()
        assert leave.wait(10)
        seen.append(is_seen())
        return x.sin()

    thread = threading.Thread(target=recorded, args=(waiting, x))
    thread.start()
    assert inside.wait(10)
    recorded(torch.sin, x)
    leave.set()
    thread.join()
    seen.append(is_seen())
    with CountOps():
        thread = threading.Thread(target=recorded, args=(torch.sin, x))
        thread.start()
        thread.join()
        seen.append(is_seen())
        recorded(torch.sin, x)
        seen.append(is_seen())
    seen.append(is_seen())
    assert seen == [True, False, False, True, False, True, True, False]
