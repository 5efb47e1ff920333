"""``patch_torch``: programs that call ``torch.utils.checkpoint`` run on this package's engine, and on torch's afterwards."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import checkpoint as imported_early
from torch.utils.checkpoint import checkpoint_sequential as sequential_of_torch

import ckpt_hooks
from ckpt_hooks import patch_torch
from ckpt_hooks.report import Reason
from tests.measure import Log, Watch, leaf
from tests.test_threads import in_threads

aten = torch.ops.aten

#: The function that all calls of torch's engine come to; from torch 2.14 on it is another one.
FUNCTION_OF_ENGINE = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{FUNCTION_OF_ENGINE}_impl"):
    FUNCTION_OF_ENGINE += "_impl"
ENGINE = getattr(torch.utils.checkpoint, FUNCTION_OF_ENGINE)
HAS_CURRIED = inspect.signature(imported_early).parameters["function"].default is None


class Count(Watch):
    """Counts regions of this package, and their recomputes."""

    def __init__(self):
        self.names, self.recomputes = [], 0

    def entered(self, region):
        self.names.append(region.path[-1])
        self.frame = region.frame

    def recomputing(self, region, *, in_order):
        self.recomputes += 1


class Block(nn.Module):
    """Whatever a recompute may get wrong: random numbers and buffers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU())

    def forward(self, x, scale=1.0):
        return self.inner(x) * scale + x


def cosine(x):
    return x.cos()


def block():
    torch.manual_seed(1)
    return Block().double()


def composable_checkpoint(module, **options):
    from torch.distributed._composable import checkpoint

    return checkpoint(module, **options)


def wrapper(module, **options):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module, **options)


def reentrant_wrapper(module, **options):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

    return wrapper(module, checkpoint_impl=CheckpointImpl.REENTRANT, **options)


def curried(module, **options):
    if not HAS_CURRIED:
        pytest.skip("torch 2.14 has added the curried form")
    return torch.utils.checkpoint.checkpoint(use_reentrant=False, **options)(module)


def sequential(module, preserve_rng_state=True):
    functions = [module.inner[0], module.inner[1], module.inner[2], module.inner[3]]

    def call(x):
        return sequential_of_torch(functions, 2, x, use_reentrant=False, preserve_rng_state=preserve_rng_state) + x

    return call


# Each returns a callable, of the module and options of torch's.
FORMS = {
    "early": lambda module, **options: functools.partial(imported_early, module, use_reentrant=False, **options),
    "late": lambda module, **options: (
        lambda *args, **kwargs: torch.utils.checkpoint.checkpoint(module, *args, use_reentrant=False, **options, **kwargs)
    ),
    "curried": curried,
    "wrapper": wrapper,
    "composable": composable_checkpoint,
}
WITH_SEQUENTIAL = {**FORMS, "sequential": sequential}


@pytest.fixture(autouse=True)
def _undone():
    """Each test leaves torch as it was."""
    state = state_of_torch()
    yield
    assert state_of_torch() == state


def state_of_torch():
    module = torch.utils.checkpoint
    return (
        (module.checkpoint, module.CheckpointFunction, ENGINE, getattr(module, FUNCTION_OF_ENGINE)),
        (ENGINE.__code__, ENGINE.__defaults__, ENGINE.__kwdefaults__, dict(vars(ENGINE))),
        dict(vars(CheckpointFunction)),
        set(vars(module)),
    )


def step(module, call):
    """Everything a training step leaves: output, gradients, buffers, random state."""
    torch.manual_seed(2)
    x = leaf(4, 8)
    y = call(x)
    y.sum().backward()
    left = [y.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers(), torch.get_rng_state()]
    return [tensor.clone() for tensor in left]


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def same_as_plain(found):
    module = block()
    assert_same(found, step(module, module))


@pytest.mark.parametrize("form", WITH_SEQUENTIAL)
def test_every_form_runs_here_bit_for_bit_and_on_torch_afterwards(form):
    module, count = block(), Count()
    with count, patch_torch():
        found = step(module, WITH_SEQUENTIAL[form](module))
    assert (len(count.names), count.recomputes) == (1, 1)
    same_as_plain(found)
    module = block()
    with count:
        step(module, WITH_SEQUENTIAL[form](module))
    assert len(count.names) == 1


@pytest.mark.parametrize("form", WITH_SEQUENTIAL)
def test_what_was_made_before_the_patch_runs_here_too(form):
    module, count = block(), Count()
    call = WITH_SEQUENTIAL[form](module)
    with count, patch_torch():
        found = step(module, call)
    assert (len(count.names), count.recomputes) == (1, 1)
    same_as_plain(found)


@pytest.mark.parametrize("form", WITH_SEQUENTIAL)
def test_the_patch_brings_back_random_numbers_that_the_caller_gives_up(form):
    """As Accelerate does for FSDP2; the gradients of dropout are wrong without a word."""
    module = block()
    with patch_torch():
        wrong = step(module, WITH_SEQUENTIAL[form](module, preserve_rng_state=False))
    module = block()
    with patch_torch(preserve_rng_state=True):
        found = step(module, WITH_SEQUENTIAL[form](module, preserve_rng_state=False))
    same_as_plain(found)
    assert form == "sequential" or not torch.equal(wrong[1], found[1])  # there the last segment is plain, and has the dropout
    module = block()
    with patch_torch(preserve_rng_state=False):
        again = step(module, WITH_SEQUENTIAL[form](module))
    assert_same(again, wrong)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whose", ["theirs", "ours", "patch"])
def test_selective_policies(form, whose):
    """The linear layer runs in forward alone."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        keep = op is aten.addmm.default
        return ckpt_hooks.CheckpointPolicy.MUST_SAVE if keep else ckpt_hooks.CheckpointPolicy.PREFER_RECOMPUTE

    of = torch.utils.checkpoint if whose == "theirs" else ckpt_hooks
    options = {} if whose == "patch" else {"context_fn": functools.partial(of.create_selective_checkpoint_contexts, policy)}
    module, count = block(), Count()
    with count, patch_torch(policy=policy if whose == "patch" else None):
        call = FORMS[form](module, **options)
        found = step(module, call)
        y = call(leaf(4, 8)).sum()
        kept = [holding for holding in count.frame().held() if holding.reason is Reason.POLICY]
        y.backward(retain_graph=True)
        y.backward()  # which single-use contexts of torch would not survive
    assert count.recomputes == 3
    assert len(kept) == 1
    assert aten.addmm.default in asked
    same_as_plain(found)


# Reentrant calls, and calls without the flag


def without_flag(module):
    return functools.partial(imported_early, module)


REENTRANT = {
    "flag": lambda module: functools.partial(imported_early, module, use_reentrant=True),
    "no flag": without_flag,
    "function": lambda module: lambda x: CheckpointFunction.apply(module, True, x),
    "wrapper": reentrant_wrapper,
}


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant:UserWarning")
@pytest.mark.parametrize("form", REENTRANT)
def test_reentrant_calls_stay_torchs(form):
    count, module = Count(), block()
    with count, patch_torch(reentrant=False):
        found = step(module, REENTRANT[form](module))
    assert count.names == []
    module = block()
    assert_same(found, step(module, REENTRANT[form](module)))


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant:UserWarning")
@pytest.mark.parametrize("form", REENTRANT)
def test_the_first_reentrant_call_that_stays_torchs_is_warned_of(form):
    with patch_torch():
        imported_early(cosine, leaf(3), use_reentrant=False)
        with torch.no_grad():
            CheckpointFunction.apply(cosine, True, leaf(3))
        for step_number in range(2):
            module = block()
            call = REENTRANT[form](module)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(module, call)
            told = [one for one in caught if "patch_torch(reentrant=True)" in str(one.message)]
            assert [one.filename for one in told] == [__file__] * (step_number == 0)


def test_reentrant_wrapper_with_keyword_arguments():
    count, module = Count(), block()
    with count, patch_torch(reentrant=True):
        call = reentrant_wrapper(module)
        found = step(module, lambda x: call(x, scale=3.0))
    assert count.recomputes == 1
    expected = block()
    assert_same(found, step(expected, lambda x: expected(x, scale=3.0)))


def test_torchs_warning_of_the_missing_flag_stays():
    with patch_torch(reentrant=True), pytest.warns(UserWarning, match="use_reentrant"):
        imported_early(torch.sin, leaf(3))


def test_the_latest_patch_decides_about_reentrant_calls():
    count = Count()
    with count, patch_torch(reentrant=True):
        with patch_torch(reentrant=False):
            imported_early(cosine, leaf(3), use_reentrant=True)
        assert count.names == []
        imported_early(cosine, leaf(3), use_reentrant=True)
    assert count.names == ["cosine"]


# Applied, undone


def runs_here():
    """Whether a call runs on this package's engine."""
    count = Count()
    with count:
        imported_early(torch.sin, leaf(3), use_reentrant=False)
    return bool(count.names)


def test_in_any_order():
    first, second = patch_torch(), patch_torch(preserve_rng_state=True)
    first.undo()
    assert runs_here()
    assert (first.active, second.active) == (False, True)
    second.undo()
    assert not runs_here()
    first, second = patch_torch(), patch_torch()
    second.undo()
    assert runs_here()
    first.undo()
    assert not runs_here()


def test_a_patch_that_nobody_keeps_stays():
    weak = weakref.ref(_forgotten())
    gc.collect()
    assert weak() is not None
    assert runs_here()
    weak().undo()


def _forgotten():
    class Policy:  # something to refer to weakly
        def __call__(self, ctx, op, *args, **kwargs):
            return ckpt_hooks.CheckpointPolicy.PREFER_RECOMPUTE

    policy = Policy()
    policy.undo = patch_torch(policy=policy).undo
    return policy


def test_a_region_of_before_is_recomputed_after():
    x, count = leaf(3), Count()
    with count, patch_torch():
        y = imported_early(lambda x: x.sin().cos(), x, use_reentrant=False)
    y.sum().backward()
    assert count.recomputes == 1
    plain = x.detach().requires_grad_()
    plain.sin().cos().sum().backward()
    assert torch.equal(x.grad, plain.grad)
    y = imported_early(lambda x: x.sin().cos(), x, use_reentrant=False)
    with count, patch_torch():
        y.sum().backward()  # torch's
    assert count.recomputes == 1
    assert torch.equal(x.grad, 2 * plain.grad)


def test_repr_says_what_and_whether():
    with patch_torch(preserve_rng_state=True) as patch:
        assert repr(patch) == "<patch_torch(reentrant=None, preserve_rng_state=True, policy=None), active>"
    assert repr(patch).endswith(", undone>")


# Threads


def test_patches_come_and_go_while_others_call(no_gc):
    """A call runs here or on torch's engine, right in both cases."""
    failures, done = [], threading.Event()

    def come_and_go():
        try:
            while not done.is_set():
                with patch_torch(reentrant=True):
                    pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            x = leaf(3)
            imported_early(lambda x: x.sin().cos(), x, use_reentrant=False).sum().backward()
            plain = x.detach().requires_grad_()
            assert torch.equal(x.grad, torch.autograd.grad(plain.sin().cos().sum(), plain)[0])
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []


# Nested regions


def test_regions_of_both_packages_in_each_other():
    module, count = nn.Sequential(block(), block()), Count()

    def ours_around(x):
        return ckpt_hooks.checkpoint(lambda x: imported_early(module, x, use_reentrant=False), x)

    def theirs_around(x):
        return imported_early(lambda x: ckpt_hooks.checkpoint(module, x), x, use_reentrant=False)

    for call in (ours_around, theirs_around):
        module = nn.Sequential(block(), block())
        with count, patch_torch():
            found = step(module, call)
        plain = nn.Sequential(block(), block())
        assert_same(found, step(plain, plain))


@pytest.mark.parametrize("first", ["forward", "backward"])
def test_nested_regions_under_a_patch_for_half_of_the_step_are_right_or_an_error(first):
    def inner(x, y):
        return (x.sin() * y).cos()

    def outer(x, y):
        return imported_early(inner, x.exp(), y.exp(), use_reentrant=False).sin()

    x, y = leaf(3), leaf(3)
    patch = patch_torch() if first == "forward" else None
    z = imported_early(outer, x, y, use_reentrant=False)
    if patch is not None:
        patch.undo()
    else:
        patch = patch_torch()
    expected = torch.autograd.grad(inner(x.exp(), y.exp()).sin().sum(), (x, y))
    try:
        assert_same(torch.autograd.grad(z.sum(), (x, y)), expected)
    except torch.utils.checkpoint.CheckpointError:
        pass
    finally:
        patch.undo()


def count_of_runs(**options):
    runs = Log()

    def function(x):
        y = x.sin().cos()
        runs.append("end")
        return y + 1

    imported_early(function, leaf(3), use_reentrant=False, **options).sum().backward()
    return len(runs)


def test_early_stop_by_torchs_setting_and_by_the_call():
    theirs, ours = torch.utils.checkpoint.set_checkpoint_early_stop, ckpt_hooks.set_checkpoint_early_stop
    with patch_torch():
        assert count_of_runs() == 1
        assert count_of_runs(early_stop=False) == 2
        with theirs(False):
            assert count_of_runs() == 2
            with ours(True):
                assert count_of_runs() == 1
        with theirs(True):
            assert count_of_runs(early_stop=False) == 1


# Torch's settings, options and errors


@pytest.mark.skipif("respect_saved_tensors_hooks" not in inspect.signature(imported_early).parameters, reason="2.14")
def test_hooks_around_a_region_are_respected_as_the_call_says():
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    def run(respect):
        packed.clear()
        context_fn = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [aten.sin.default])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            imported_early(
                lambda x: x.sin().cos(),
                leaf(3),
                use_reentrant=False,
                context_fn=context_fn,
                respect_saved_tensors_hooks=respect,
            ).sum().backward()
        return len(packed)

    with patch_torch():
        assert run(True) == run(None) == run(False) + 1


def test_without_gradients_the_function_is_called_plainly():
    count = Count()
    with count, patch_torch(reentrant=True), torch.no_grad():
        assert torch.equal(imported_early(torch.sin, torch.ones(3), use_reentrant=False), torch.ones(3).sin())
        assert torch.equal(imported_early(torch.sin, torch.ones(3), use_reentrant=True), torch.ones(3).sin())
    assert count.names == []


def test_under_transforms_torch_runs_the_call():
    """Torch's engine refuses those of gradients, with and without the patch."""

    def run():
        torch.func.grad(lambda x: imported_early(torch.sin, x, use_reentrant=False).sum())(torch.ones(3))

    with pytest.raises(RuntimeError, match="hooks") as plain:
        run()
    count = Count()
    with count, patch_torch(), pytest.raises(RuntimeError, match="hooks") as patched:
        run()
    mapped = torch.func.vmap(lambda x: imported_early(torch.sin, x, use_reentrant=False))
    with contextlib.suppress(RuntimeError):  # torch 2.11 maps no checkpoint
        mapped(leaf(2, 3))
        with count, patch_torch():
            mapped(leaf(2, 3))
    assert count.names == []
    assert str(patched.value) == str(plain.value)


def test_under_a_tracer_torch_runs_the_call():
    from torch.fx.experimental.proxy_tensor import make_fx

    def program(x):
        return imported_early(lambda x: x.sin().cos(), x, use_reentrant=False).sum()

    count = Count()
    with count, patch_torch():
        found = make_fx(program)(leaf(3))
    assert count.names == []
    assert found.code == make_fx(program)(leaf(3)).code


class FailsFirst(nn.Module):
    """Is interrupted until it is told not to be."""

    fails = True

    def forward(self, x):
        x = x.sin()
        if self.fails:
            raise KeyboardInterrupt
        return x.cos()


def test_ctrl_c_in_a_composable_module_is_made_good_by_the_next_call():
    """Hooks of modules do not hear of Ctrl-C; the next call closes the region that was left open, as with torch's engine."""
    module, count = composable_checkpoint(FailsFirst()), Count()
    with count, patch_torch():
        with pytest.raises(KeyboardInterrupt):
            module(leaf(3))
        module.fails = False
        x = leaf(3)
        module(x).sum().backward()
    assert count.recomputes == 1
    plain = x.detach().requires_grad_()
    assert torch.equal(x.grad, torch.autograd.grad(plain.sin().cos().sum(), plain)[0])
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_region_left_open_is_not_closed_in_place_of_another():
    """As where the next call of an interrupted module is inside another region. The one left open ends with its thread."""
    inner, x, count = composable_checkpoint(FailsFirst()), leaf(3), Count()
    outer = composable_checkpoint(nn.Sequential(nn.Tanh(), inner, nn.Tanh()))

    def program():
        with pytest.raises(KeyboardInterrupt):
            inner(leaf(3))
        inner.fails = False
        with count:
            outer(x).sum().backward()

    with patch_torch():
        in_threads(program)
    assert (count.names, count.recomputes) == (["Sequential", "FailsFirst", "FailsFirst"], 2)
    plain = x.detach().requires_grad_()
    assert torch.equal(x.grad, torch.autograd.grad(plain.tanh().sin().cos().tanh().sum(), plain)[0])


# Programs that patch as well


def test_a_program_that_replaces_checkpoint_keeps_its_function():
    """As Unsloth does, which keeps the old one aside."""
    old = torch.utils.checkpoint.checkpoint

    def theirs(function, *args, **kwargs):
        return old(function, *args, **kwargs)

    for before in (True, False):
        patch = None if before else patch_torch()
        torch.utils.checkpoint.checkpoint = theirs
        try:
            patch = patch or patch_torch()
            count = Count()
            with count:
                torch.utils.checkpoint.checkpoint(cosine, leaf(3), use_reentrant=False)
            assert count.names == ["cosine"]
            patch.undo()
            assert torch.utils.checkpoint.checkpoint is theirs
            with count:
                torch.utils.checkpoint.checkpoint(cosine, leaf(3), use_reentrant=False)
            assert count.names == ["cosine"]
        finally:
            torch.utils.checkpoint.checkpoint = old
            patch.undo()


def test_a_program_that_replaces_the_reentrant_function(monkeypatch):
    class Theirs(CheckpointFunction):
        pass

    monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", Theirs)
    with patch_torch(reentrant=True):
        count = Count()
        with count:
            imported_early(cosine, leaf(3), use_reentrant=True)
        assert count.names == ["cosine"]
        assert "apply" in vars(Theirs)
        theirs = staticmethod(lambda *args: "theirs")
        Theirs.apply = theirs
    assert vars(Theirs)["apply"] is theirs  # put there after the patch
    with patch_torch(reentrant=True):
        assert vars(Theirs)["apply"] is not theirs
    assert vars(Theirs)["apply"] is theirs  # and before
    monkeypatch.undo()


def plain_lambda(module):
    return lambda x: imported_early(lambda x: module(x).sin(), x, use_reentrant=False)


def selective(module):
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [aten.addmm.default])
    return lambda x: imported_early(lambda x: module(x).sin(), x, use_reentrant=False, context_fn=contexts)


def compiled(program, patched, **options):
    """Runs two steps; returns the results, the number of graph breaks and that of regions of this package."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    module, x, count = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True), Count()
    function = torch.compile(program(module), **options)
    with count, patch_torch() if patched else contextlib.nullcontext():
        for _ in range(2):
            y = function(x)
            y.sum().backward()
    found = [tensor.clone() for tensor in (y.detach(), x.grad, *(p.grad for p in module.parameters()))]
    return found, sum(counters["graph_break"].values()), len(count.names)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [plain_lambda, selective, wrapper], ids=lambda program: program.__name__)
def test_a_compiler_understands_the_calls_as_torchs(program):
    """In one graph; nothing is left for an engine to do."""
    options = {"backend": "aot_eager", "fullgraph": True}
    expected, *_ = compiled(program, False, **options)
    found, breaks, regions = compiled(program, True, **options)
    assert_same(found, expected)
    assert (breaks, regions) == (0, 0)


@pytest.mark.slow
def test_dynamo_is_not_imported_by_the_patch():
    program = (
        "import sys, ckpt_hooks\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "with ckpt_hooks.patch_torch(reentrant=True): pass\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert not any(name.startswith('torch.distributed._composable') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
