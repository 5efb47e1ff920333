"""What errors and warnings say: each message of the package is provoked, and its form looked at.

:mod:`tests.messages` finds the messages in the code, so one that nothing here provokes shows.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt_hooks
from ckpt_hooks import (
    CheckpointError,
    DeterminismError,
    GraphExecGroup,
    apply_checkpointing,
    checkpoint,
    checkpoint_module,
    checkpoint_name,
    checkpoint_region,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    enable_in_transformers,
    every,
    memory_ledger,
    patch_torch,
    plan_memory,
    policies,
    trace,
    track_rng,
)
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._function.frame import FunctionFrame
from ckpt_hooks._torch.checkpoint import FUNCTION_OF_ENGINE
from ckpt_hooks.offload import offload_saved_tensors
from ckpt_hooks.planner import Plan
from ckpt_hooks.policies import save_every, save_only_these_names, save_ops
from ckpt_hooks.report import compare
from tests import fake_transformers
from tests.fake_device import fake_device
from tests.measure import Log, as_library, leaf
from tests.messages import messages, occurs, texts

aten = torch.ops.aten
MM, SIN = aten.mm.default, aten.sin.default


I1E = torch.ops.aten.special_i1e.default  # which no other list names: it is warned of a list once


def selective_pair():
    return create_selective_checkpoint_contexts([MM])


@contextlib.contextmanager
def within(context):
    with context:
        yield


PROVOCATIONS: dict[str, Callable[[], object]] = {}


def provokes(function):
    """Adds a function that ends in an error or a warning of the package."""
    PROVOCATIONS[function.__name__] = function
    return function


def backward(y):
    y.sum().backward()


def changing(*bodies, **options):
    """Calls a region that does one thing in forward and the next in each recompute, and runs backward."""
    todo = Log(bodies)

    def block(x):
        return (todo.pop(0) if len(todo) > 1 else todo[0])(x)

    backward(checkpoint(**options)(block)(leaf(3)))


class Doubling(TorchDispatchMode):
    """Makes products twice as large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is aten.mul.Tensor else output


# Recomputes that differ


@provokes
def saves_fewer():
    changing(lambda x: x.sin().cos().exp(), lambda x: x.sin().cos())


@provokes
def saves_fewer_with_the_logs():
    changing(lambda x: x.sin().cos().exp(), lambda x: x.sin().cos(), debug=True)


@provokes
def a_step_of_a_trace_in_a_region():
    with trace() as found, checkpoint_region():
        found.step()


@provokes
def a_ledger_read_too_early():
    with memory_ledger() as found:
        found.phases  # noqa: B018


@provokes
def a_ledger_of_no_step():
    memory_ledger(torch.ones(2))


@provokes
def a_ledger_in_a_ledger():
    with memory_ledger():
        memory_ledger(lambda: None)


@provokes
def a_ledger_beside_that_of_another_thread():
    begun, ended = threading.Event(), threading.Event()

    def other():
        with memory_ledger():
            begun.set()
            ended.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(10)
    try:
        memory_ledger(lambda: None)
    finally:
        ended.set()
        thread.join()


@provokes
def a_ledger_of_a_device_without_allocations():
    memory_ledger(lambda: torch.ones(2)).on("cuda:0")


def planned(step=None, budget=0.5, blocks=None, model=None):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())) if model is None else model
    return plan_memory(model, step or (lambda model: model(torch.ones(2, 4)).sum().backward()), budget, blocks=blocks)


@provokes
def a_plan_of_a_model_without_blocks():
    planned(model=nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@provokes
def a_plan_of_blocks_in_blocks():
    planned(blocks=["1", "1.*"])


@provokes
def a_budget_of_another_kind():
    planned(budget=[1])


@provokes
def a_budget_of_more_than_all():
    planned(budget=2.0)


@provokes
def a_budget_below_nothing():
    planned(budget=-3)


@provokes
def a_budget_without_a_unit():
    planned(budget="20 gibis")


@provokes
def a_budget_that_nothing_fits():
    planned(budget=1, blocks=["1"])


@provokes
def a_plan_of_a_step_without_a_backward():
    planned(step=lambda model: model(torch.ones(2, 4)))


@provokes
def a_plan_of_a_block_that_is_not_called():
    planned(step=lambda model: model[0](torch.ones(2, 4)).sum().backward(), blocks=["1"])


@provokes
def a_plan_of_another_cost():
    plan_memory(nn.Linear(2, 2), print, 0.5, cost="dollars")


@provokes
def a_plan_of_no_module():
    plan_memory(3, print, 0.5)


@provokes
def a_plan_of_no_step():
    plan_memory(nn.Linear(2, 2), 3, 0.5)


@provokes
def a_plan_of_a_compiled_model():
    model = nn.Linear(4, 4)
    model._orig_mod = None
    planned(model=model)


@provokes
def a_plan_of_a_model_without_memory():
    plan_memory(nn.LazyLinear(4), print, 0.5)


@provokes
def a_plan_whose_model_is_gone():
    planned(blocks=["1"]).apply()


@provokes
def a_front_of_a_plan_from_a_file():
    Plan.from_json(planned(blocks=["1"]).to_json()).pareto()


@provokes
def a_picture_of_no_ledgers():
    compare()


@provokes
def a_picture_without_matplotlib():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        memory_ledger(lambda: None).plot()


@provokes
def a_plan_with_a_margin_of_all():
    plan_memory(nn.Linear(2, 2), print, 0.5, margin=1.0)


@provokes
def a_budget_that_nothing_fits_with_a_margin():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    plan_memory(model, lambda model: model(torch.ones(2, 4)).sum().backward(), 1, blocks=["1"], margin=0.1)


@provokes
def a_plan_in_a_step_of_another_shape():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with planned(model=model, blocks=["1"]).apply(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(3, 4))


@provokes
def options_of_a_module_that_are_none():
    apply_checkpointing(nn.Sequential(nn.Linear(2, 2)), {"0": {"name": "first"}})


@provokes
def runs_of_a_module_without_a_name():
    policies.save_indices([(1, MM, 0)])


@provokes
def runs_without_numbers():
    policies.save_indices([("", MM, "first")])


@provokes
def runs_before_the_first():
    policies.save_indices([("", MM, -1)])


@provokes
def a_run_more_than_a_policy_expects():
    policy = policies.save_indices([("", SIN, 0)], counts={("", SIN): 1})
    checkpoint(policy=policy)(lambda x: x.sin().sin())(leaf(4))


@provokes
def saves_more():
    changing(lambda x: x.sin().cos(), lambda x: x.sin().cos().exp().tan(), early_stop=False)


@provokes
def saves_another_shape():
    changing(lambda x: x.sin().cos().exp(), lambda x: x[:2].sin().cos().exp())


@provokes
def a_replay_to_another_shape():
    x = torch.tensor([1.0, 2.0, -3.0], requires_grad=True)
    with checkpoint_region():
        y = x.sin()[(x > 0).nonzero()].exp()
    x.data.neg_()
    backward(y)


@provokes
def saves_other_values():
    changing(lambda x: (x.sin() * 2).exp(), lambda x: (x.sin() * 3).exp(), determinism_check="values")


@provokes
def saves_other_values_by_the_users_check():
    changing(
        lambda x: (x.sin() * 2).exp(), lambda x: (x.sin() * 3).exp(), determinism_check=lambda tensor: tensor.tolist() * 50
    )


@provokes
def a_frozen_parameter():
    layer = nn.Linear(3, 3)
    y = checkpoint(lambda x: layer(x).sin(), torch.rand(2, 3, requires_grad=True))
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    backward(y)


@provokes
def a_leaf_that_requires_grad_now():
    w = torch.rand(3)
    y = checkpoint(lambda x: (x.float() * w).sin(), leaf(3))
    w.requires_grad_()
    backward(y)


@provokes
def an_argument_that_requires_grad_now():
    w = torch.rand(3)
    y = checkpoint(lambda x, w: (x.float() * w).sin(), leaf(3), w)
    w.requires_grad_()
    backward(y)


@provokes
def a_region_inside_that_is_given_more():
    cache = types.SimpleNamespace(kept=Log())

    def function(x, cache):
        cache.kept.append(x.exp())
        return checkpoint(lambda kept, h: sum(kept, h).sin(), list(cache.kept), x.sin()).cos()

    backward(checkpoint(function, leaf(3), cache))


@provokes
def another_operator_under_a_policy():
    changing(lambda x: x.exp().sin() * x, lambda x: x.exp().cos() * x, policy=policies.nothing_saveable)


@provokes
def operators_that_are_missing_under_a_policy():
    changing(lambda x: x.exp().sin().cos() * x, lambda x: x.exp().sin() * x, policy=save_ops(SIN))


@provokes
def a_failure_under_a_policy():
    def fail(x):
        x.exp().sin()
        raise RuntimeError("mine")

    changing(lambda x: x.exp().sin().cos(), fail, policy=save_ops(SIN))


@provokes
def a_mode_around_forward():
    with Doubling():
        y = checkpoint(lambda x: (x * 3.0).sin().exp(), leaf(3))
    backward(y)


@provokes
def a_mode_around_a_recorded_region():
    x = leaf(3)
    with Doubling(), checkpoint_region():
        y = (x * 3.0).sin().exp()
    backward(y)


@provokes
def a_mode_around_backward():
    y = checkpoint(lambda x: (x * 3.0).sin().exp(), leaf(3), determinism_check="values")
    with Doubling():
        backward(y)


@provokes
def random_numbers_that_are_not_tracked():
    y = checkpoint(lambda x: (x.sin() * (random.random() > 2)).exp(), leaf(3), determinism_check="values")
    backward(y)


@provokes
def a_compiled_function_that_is_compiled_anew():
    torch._dynamo.reset()
    scale = Log([1.0])
    compiled = torch.compile(lambda x: x.sin().cos() * x.exp() if scale[0] == 1.0 else x.sin(), backend="aot_eager")
    y = checkpoint(lambda x: compiled(x.exp()), leaf(3))
    scale[0] = 2.0
    try:
        backward(y)
    finally:
        torch._dynamo.reset()


@provokes
def a_backward_in_a_recompute_within_a_backward_with_buffers():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, gradient):
            _ = ctx.input_grad_buffers
            _, w = ctx.saved_tensors
            return gradient * w, None

    if not hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers"):
        pytest.skip("not in this torch")

    def function(h):
        z = h.detach().requires_grad_()
        return Reads.apply(h, torch.autograd.grad((z * z).sum(), z)[0])

    h = leaf(3) * 1
    backward(checkpoint(function, h) + h.cos())


@provokes
def a_backward_in_a_recompute_with_respect_to_what_has_gone():
    def program(x):
        h = x.sin()
        loss = h.exp().sum()
        return checkpoint(lambda h, loss: torch.autograd.grad(loss, h, retain_graph=True)[0] * h.cos(), h, loss)

    backward(program(leaf(3)))


# Reports


@provokes
def a_look_at_a_function_without_tensors():
    ckpt_hooks.saved_residuals(lambda: 3)


@provokes
def a_look_at_a_result_without_tensors():
    ckpt_hooks.saved_tensors_report("loss")


# Tensors that are not what they were


@provokes
def an_argument_that_was_written_to():
    mask = torch.ones(3)
    y = checkpoint(lambda x, mask: (x * mask).sin(), leaf(3), mask)
    mask.zero_()
    backward(y)


@provokes
def an_argument_in_another_storage():
    w = leaf(3)
    with torch.autograd.graph.save_on_cpu():
        y = checkpoint(lambda x, w: (x * w).sin(), leaf(3) * 1, w)
    with torch.no_grad():
        w.set_(torch.zeros(3, dtype=torch.float64))
    backward(y)


@provokes
def an_argument_of_a_list_that_requires_no_grad_now():
    w = leaf(3)
    y = checkpoint(lambda x, given: (x * given["w"]).sin(), leaf(3), {"w": w})
    w.requires_grad_(False)
    backward(y)


@provokes
def an_optimizer_that_steps_too_early():
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.rand(2, 3, requires_grad=True)
    layer(x).sum().backward()
    y = checkpoint(lambda x: layer(x).sin(), x)
    optimizer.step()
    backward(y)


@provokes
def a_parameter_that_was_exchanged():
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.mul_(2)
    y = checkpoint(lambda x: layer(x).sin(), torch.rand(2, 3, requires_grad=True))
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.rand(3, 3)))
    backward(y)


@as_library
class Holder:
    """Holds a tensor where nothing looks."""

    __slots__ = ("tensor",)


@provokes
def a_tensor_that_was_bound_anew():
    holder = Holder()
    holder.tensor = torch.ones(3).mul_(2)
    y = checkpoint(lambda x: x.float() * holder.tensor, leaf(3))
    holder.tensor = torch.ones(3)
    backward(y)


@provokes
def another_tensor_at_a_higher_version():
    holder = Holder()
    holder.tensor = torch.ones(3)
    y = checkpoint(lambda x: x.float() * holder.tensor, leaf(3))
    holder.tensor = torch.ones(3).mul_(2)
    backward(y)


@provokes
def a_leaf_that_a_recorded_region_saved():
    x, w = leaf(3), leaf(3)
    with checkpoint_region():
        y = x * w
    with torch.no_grad():
        w.zero_()
    backward(y)


@provokes
def a_tensor_that_a_replay_needs():
    x, mask = leaf(3), torch.ones(3)
    with checkpoint_region():
        y = (x * mask).sin()
    mask.zero_()
    backward(y)


@provokes
def a_tensor_in_another_storage_within_a_region():
    x, w = leaf(4), leaf(4)
    with checkpoint_region():
        h = (x + w).exp().sin()
        w.data = torch.full((4,), 2.0, dtype=torch.float64)
        y = h * (x * w).sin()
    backward(y)


@provokes
def a_saved_tensor_that_a_region_writes_to():
    x = leaf(4)
    with checkpoint_region():
        h = x.exp()
        y = h * 2
        h.add_(1)
    backward(y)


@provokes
def memory_that_was_freed():
    x, w = leaf(4), torch.ones(4, dtype=torch.float64)
    with checkpoint_region():
        y = (x * w).sin()
    w.untyped_storage().resize_(0)
    backward(y)


@provokes
def a_tensor_on_the_host_that_was_written_to():
    with fake_device():
        h = leaf(16, 16) * 1
        with offload_saved_tensors(min_offload_size=0):
            y = h.sin()
        h.detach().zero_()
        backward(y)


@provokes
def a_tensor_that_stayed_and_was_written_to():
    h = leaf(3)
    with offload_saved_tensors():
        y = h.sin()
    with torch.no_grad():
        h.zero_()
    backward(y)


# Groups, bugs


@provokes
def two_backwards_that_overlap():
    y = checkpoint(lambda x: x.sin().cos(), leaf(3))
    with GraphExecGroup():
        y.sum().backward(retain_graph=True)
        backward(y)


@provokes
def groups_in_groups():
    with GraphExecGroup(), GraphExecGroup():
        pass


@provokes
def a_bug():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FunctionFrame, "recompute", lambda frame, wanted: [MISSING] * len(frame.numbers))
        backward(checkpoint(lambda x: x.sin().cos(), leaf(3)))


# Calls


class Lazy(nn.Module):
    """A module that is not made yet."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)

    def forward(self, x):
        return self.layer(x)


@contextlib.contextmanager
def suppressing():
    with contextlib.suppress(ZeroDivisionError):
        yield


def under_a_transform():
    torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(torch.rand(3))


def named_region(policy, name="other"):
    with checkpoint_region(policy=policy):
        checkpoint_name(leaf(3).sin(), name).exp()


def used_twice():
    contexts = create_selective_checkpoint_contexts([SIN])
    for _ in range(2):
        checkpoint(torch.sin, leaf(3), context_fn=lambda: contexts)


def generator(x):
    yield x


def with_class():
    with checkpoint_region:
        pass


def enabled(apply, *args):
    model = fake_transformers.Model()
    apply(model, *args)
    return model


block, x = nn.Linear(3, 3), torch.rand(2, 3)


@provokes
def a_result_of_a_recompute_in_backward():
    left = Log()

    def function(x):
        y = x.sin().exp()
        left.append(y.cos())
        return y

    backward(checkpoint(early_stop=False)(function)(leaf(3)))
    backward(left[1])


@provokes
def a_large_buffer_written_late():
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(5000))
    module.forward = lambda x, writes: (module.queue.add_(float(writes))[:3].clone() * x).sin() if writes else x.sin()
    checkpoint(module, leaf(3), False)
    checkpoint(module, leaf(3), True)


calls = {
    "a decorator without parentheses": lambda: checkpoint(block),
    "a tensor for a function": lambda: checkpoint(block(x)),
    "a tensor first": lambda: checkpoint(x, block),
    "a number for a function": lambda: checkpoint(3, x),
    "None for a function": lambda: checkpoint(None, x),
    "a tensor for the curried form": lambda: checkpoint()(block(x)),
    "the curried form with arguments": lambda: checkpoint()(block, x),
    "the curried form with an option that is none": lambda: checkpoint(nam="block"),
    "an option in a direct call": lambda: checkpoint(block, x, name="block"),
    "a policy in a direct call": lambda: checkpoint(lambda x, **options: x, x, policy=[MM]),
    "a generator function": lambda: checkpoint(generator, x),
    "an iterator": lambda: checkpoint(lambda x: x, iter([x])),
    "an operator for a policy": lambda: checkpoint(policy=MM),
    "a packet for a policy": lambda: checkpoint(policy=aten.mm),
    "a factory for a policy": lambda: checkpoint(policy=save_ops),
    "a string for a policy": lambda: checkpoint(policy="dots_saveable"),
    "a packet in a list": lambda: checkpoint(policy=[aten.mm]),
    "a string in a list": lambda: checkpoint(policy=["mm"]),
    "a policy that returns something else": lambda: checkpoint(policy=lambda *args: "save")(torch.sin)(leaf(3)),
    "a policy that counts": lambda: save_every(MM, 2)(None, MM),
    "a policy of names": lambda: create_selective_checkpoint_contexts(save_only_these_names("h")),
    "a count that is none": lambda: save_every(MM, 0),
    "a string for names": lambda: policies.save_and_offload_only_these_names(
        names_which_can_be_saved="a", names_which_can_be_offloaded=[]
    ),
    "numbers for names": lambda: save_only_these_names(3),
    "a name in both": lambda: policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"], names_which_can_be_offloaded=["a"]
    ),
    "operators that did not run": lambda: [
        checkpoint(policy=[torch.ops.aten.erfinv.default])(torch.sin)(leaf(3)) for _ in range(3)
    ],
    "views in a list": lambda: policies.save_ops([torch.ops.aten.view.default]),
    "two policies": lambda: checkpoint(policy=[MM], context_fn=selective_pair)(torch.sin)(leaf(3)),
    "contexts of which one is none": lambda: checkpoint(block, x, context_fn=lambda: (contextlib.nullcontext(), 3)),
    "contexts of two calls": lambda: checkpoint(block, x, context_fn=lambda: (selective_pair()[0], selective_pair()[1])),
    "a selective context within another": lambda: checkpoint(
        block, x, context_fn=lambda: (within(selective_pair()[0]), contextlib.nullcontext())
    ),
    "names that did not come": lambda: named_region(save_only_these_names("hidden")),
    "a slip in a name": lambda: named_region(save_only_these_names("hiden"), "hidden"),
    "contexts used twice": used_twice,
    "context_fn=None": lambda: checkpoint(block, x, context_fn=None),
    "a context_fn that returns one": lambda: checkpoint(block, x, context_fn=contextlib.nullcontext),
    "a context that suppresses": lambda: checkpoint(
        lambda x: x / 0 if x is None else 1 / 0, leaf(3), context_fn=lambda: (suppressing(), contextlib.nullcontext())
    ),
    "use_reentrant=True": lambda: checkpoint(block, x, use_reentrant=True),
    "use_reentrant='no'": lambda: checkpoint(block, x, use_reentrant="no"),
    "early_stop='yes'": lambda: checkpoint(block, x, early_stop="yes"),
    "determinism_check='all'": lambda: checkpoint(block, x, determinism_check="all"),
    "a lazy module": lambda: checkpoint(debug=True)(Lazy())(leaf(2, 3)),
    "a transform": under_a_transform,
    "a region as a class": with_class,
    "a region with a function": lambda: checkpoint_region(block),
    "a region with a tensor": lambda: checkpoint_region(x),
    "a region with a policy": lambda: checkpoint_region([MM]),
    "a region with a string": lambda: checkpoint_region("block"),
    "a name of a number": lambda: checkpoint_name(3, "h"),
    "a number for a name": lambda: checkpoint_name(x, 3),
    "a sequence with an option": lambda: checkpoint_sequential([block], 1, x, policy=[MM]),
    "a sequence with two inputs": lambda: checkpoint_sequential([block], 1, x, x),
    "a sequence in another order": lambda: checkpoint_sequential([block], x, 1),
    "a sequence with too many segments": lambda: checkpoint_sequential([block], 2, x),
    "a sequence of a module": lambda: checkpoint_sequential(block, 1, x),
    "an unknown source": lambda: track_rng("jax").__enter__(),
    "a number for a source": lambda: track_rng(3).__enter__(),
    "a size that is none": lambda: offload_saved_tensors("1 MB"),
    "a stash for nothing": lambda: offload_saved_tensors(max_fwd_stash_size=0),
    "a name that is not there": lambda: ckpt_hooks.nothing,
    "no model of Transformers": lambda: enable_in_transformers(block),
    "a model of Transformers inside": lambda: enable_in_transformers(nn.Sequential(fake_transformers.Model())),
    "a model of Transformers without support": lambda: enable_in_transformers(fake_transformers.Unsupported()),
    "a model of Transformers without effect": lambda: enable_in_transformers(fake_transformers.NothingToSwitch()),
    "a model of an old Transformers": lambda: enable_in_transformers(fake_transformers.OldModel(), recorded=True),
    "a model of Transformers without layers": lambda: enable_in_transformers(fake_transformers.StackModel(), every_n_layers=2),
    "a model of Transformers without a list": lambda: enable_in_transformers(fake_transformers.CallerWithoutList()),
    "Transformers by a plan of other modules": lambda: enable_in_transformers(
        model_of_layers := fake_transformers.Model(),
        plan=plan_memory(
            model_of_layers,
            lambda model: model(torch.zeros(64, 64, dtype=torch.int64)).sum().backward(),
            1.0,
            blocks=["layers.*.linear"],
        ),
    ),
    "Transformers by no plan": lambda: enable_in_transformers(fake_transformers.Model(), plan=3),
    "Transformers by a plan and options": lambda: enable_in_transformers(fake_transformers.Model(), plan=3, every_n_layers=2),
    "Transformers twice": lambda: enable_in_transformers(enabled(enable_in_transformers)),
    "Transformers on regions": lambda: enable_in_transformers(enabled(ckpt_hooks.apply_checkpointing, "layers.*")),
    "Transformers with a name": lambda: enable_in_transformers(fake_transformers.Model(), name="model"),
    "Transformers by every zeroth": lambda: enable_in_transformers(fake_transformers.Model(), every_n_layers=0),
    "a patch for a word": lambda: patch_torch(preserve_rng_state="yes"),
}
PROVOCATIONS.update(calls)


@provokes
def a_patch_entered_after_its_end():
    patch = patch_torch()
    patch.undo()
    patch.__enter__()


@provokes
def a_patch_of_what_another_program_has_put_there():
    with pytest.MonkeyPatch.context() as context:
        context.setattr(torch.utils.checkpoint, FUNCTION_OF_ENGINE, torch.sin)
        patch_torch()


@provokes
def a_reentrant_call_under_a_patch():
    with patch_torch():
        torch.utils.checkpoint.checkpoint(torch.sin, leaf(2), use_reentrant=True)


@provokes
def a_model_whose_own_checkpointing_is_on():
    model = fake_transformers.Model()
    model.gradient_checkpointing_enable()
    apply_checkpointing(model, "layers.*")


@provokes
def an_option_of_the_models_own_switch():
    model = fake_transformers.Model()
    enable_in_transformers(model)
    model.gradient_checkpointing_enable({"context_fn": torch.sin})


# Regions on modules


class Slotted(nn.Module):
    """Has an attribute outside of its dictionary."""

    __slots__ = ("extra",)


def _scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))


@provokes
def a_frozen_parameter_that_is_gone():
    layer = checkpoint_module(nn.Linear(2, 2).requires_grad_(False))
    y = layer(torch.ones(2, 2, requires_grad=True).sin())
    layer.bias = None
    backward(y)


@provokes
def a_checkpointed_module_that_is_scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(checkpoint_module(nn.Linear(2, 2)))


@provokes
def other_random_numbers():
    table = functools.lru_cache(torch.randn)
    checkpoint(lambda x: torch.dropout((x * table(2)).sin(), 0.5, True).exp(), leaf(2)).sum().backward()


def _forward_of_a_module_that_is_gone():
    checkpoint_module(nn.Linear(2, 2)).forward(torch.ones(2))


def _twice():
    checkpoint_module(checkpoint_module(nn.Linear(2, 2)))


PROVOCATIONS |= {
    "a_module_with_slots_as_a_region": lambda: checkpoint()(Slotted()),
    "no_module_as_a_region": lambda: checkpoint_module(torch.sin),
    "no_model": lambda: apply_checkpointing([nn.Linear(2, 2)], nn.Linear),
    "a_policy_beside_a_mapping": lambda: apply_checkpointing(nn.Linear(2, 2), {"": None}, policy=policies.dots_saveable),
    "a_name_for_many": lambda: apply_checkpointing(nn.Linear(2, 2), "", name="x"),
    "an_option_of_the_other_kind": lambda: checkpoint_module(nn.Linear(2, 2), recorded=True, early_stop=True),
    "a_scripted_module": lambda: checkpoint_module(_scripted()),
    "a_module_that_is_a_region": _twice,
    "a_module_without_forward": lambda: checkpoint_module(nn.ModuleList()),
    "a_module_that_is_gone": _forward_of_a_module_that_is_gone,
    "every_zeroth": lambda: every(0),
    "every_nth_of_every_nth": lambda: apply_checkpointing(nn.Linear(2, 2), every(2, of=every(2))),
    "nothing_selected": lambda: apply_checkpointing(nn.Linear(2, 2), nn.Conv2d),
    "no_name_like_it": lambda: apply_checkpointing(nn.Sequential(nn.Linear(2, 2)), "layers"),
    "no_pattern": lambda: apply_checkpointing(nn.Linear(2, 2), {3: None}),
    "no_selection": lambda: apply_checkpointing(nn.Linear(2, 2), 3),
}


class SavesLess(torch.autograd.Function):
    """Saves a smaller tensor each time."""

    sizes = (2, 1)

    @staticmethod
    def forward(ctx, x):
        size, *SavesLess.sizes = SavesLess.sizes
        ctx.save_for_backward(x[:size].clone())
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].sum()


def _function_with_other_results():
    with checkpoint_region(name="block"):
        y = SavesLess.apply(leaf(2) * 2)
    y.sum().backward()


PROVOCATIONS["a_function_with_other_results"] = _function_with_other_results


#: Parts of messages that nothing here provokes, and why.
NOT_PROVOKED = {
    "was called in a region by a name bound to": "on torch 2.15 alone, in tests/test_kernels.py",
    "a kernel of the custom function": "on a device that is not there, in tests/test_kernels.py",
    "ckpt_hooks does not support free-threaded Python": "by a test of the import, in a process of its own",
    "ran while a CUDA graph is being captured": "on a fake device, in tests/test_graph_capture.py",
    "was to draw random numbers in a checkpoint_region": "likewise",
    "had read ctx.input_grad_buffers": "by a provocation for those versions of torch that have it",
}


@functools.cache
def said(name):
    """Provokes an error or a warning; returns it."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            PROVOCATIONS[name]()
        except Exception as error:
            return error.with_traceback(None)
    assert len(caught) == 1, f"{name} was to end in one error or warning"
    return caught[0].message


@pytest.fixture(params=list(PROVOCATIONS))
def error(request):
    """What each provocation ends in."""
    return said(request.param)


#: What is written with dots and colons though it is no end of a sentence: code, names, what is in brackets.
_CODE = re.compile(
    r"`[^`]*`|'[^']*'|\"[^\"]*\"|\([^()]*\)|<[^<>]*>|\w*\[[^\[\]]*\](\.\w+)*"
    r"|\b(torch|ckpt_hooks|aten|contextlib|functools|policies|autograd|ctx|CheckpointPolicy)(\.\w+)+"
)
#: What a message tells its reader to do.
_FIX = re.compile(
    r"\b(bind|call|change|compile|enter|exchange|fill|give|hand|have|leave|let|make|modify|name|pack|pass|print|read|report|return|run"
    r"|select|step|take|track|use|write|apply|keep|come)\b",
    re.IGNORECASE,
)


def assert_well_formed(text):
    """Asserts that sentences are set apart by one space each, or by a new line; lines that begin with two spaces are lists."""
    for line in text.split("\n"):
        assert line == line.rstrip(), f"a space at the end: {line!r}"
        assert "  " not in line.lstrip(" "), f"two spaces: {line!r}"
        prose = line
        while _CODE.search(prose):
            prose = _CODE.sub(" code ", prose)
        assert not re.search(r"[.:;,?!][^\W\d]", prose), f"no space between two sentences: {line!r}"


def test_the_form_of_each_message(error):
    text = str(error)
    assert_well_formed(text if "Operators around it in" not in text else text.rpartition("\n\n")[2])
    assert not text.startswith((" ", "\n"))
    assert text.endswith(".") or isinstance(error, AttributeError)  # which Python writes without


def test_each_message_names_its_region_and_the_fix(error):
    text = str(error)
    if isinstance(error, CheckpointError) and error.region:
        assert f"region {'/'.join(error.region)!r}" in text
    if not isinstance(error, AttributeError):
        assert _FIX.search(text), text


def test_no_message_is_left_out():
    """Every message in the code is provoked here, or it says above why not."""
    provoked = [str(said(name)) for name in PROVOCATIONS if "buffers" not in name]
    left_out = [
        place
        for parts, place in messages().items()
        if not any(occurs(parts, text) for text in provoked)
        and not any(occurs((part,), "".join(parts)) for part in NOT_PROVOKED)
    ]
    assert left_out == []


def test_no_text_in_the_code_runs_together():
    """Not in the texts that no provocation reaches either."""
    for text in texts():
        for line in text.split("\n"):
            assert "  " not in line.strip(" "), line
            assert not re.search(r"[a-z)'`\]][.?!][A-Z]", _CODE.sub(" code ", line)), line


# What is said of some of them


def test_an_optimizer_that_steps_too_early_is_named():
    text = str(said("an_optimizer_that_steps_too_early"))
    assert "of Linear" in text
    assert "Usual causes: an optimizer's step before backward, and a hook of forward which writes to it." in text


def test_what_is_no_parameter_has_nothing_to_do_with_optimizers():
    for name in ("an_argument_that_was_written_to", "a_tensor_that_a_replay_needs", "another_tensor_at_a_higher_version"):
        assert "optimizer" not in str(said(name))


@pytest.mark.parametrize("name", ["a_tensor_that_was_bound_anew", "a_parameter_that_was_exchanged"])
def test_another_tensor_is_not_said_to_be_modified(name):
    error = said(name)
    assert error.found < error.expected
    assert f"is another tensor than forward saw: it is at version {error.found}; expected version {error.expected}" in str(
        error
    )
    assert "modified" not in str(error)
    assert "Bind or exchange it after backward" in str(error)


def test_a_tensor_that_may_be_another_one():
    assert "modified by an inplace operation since forward, or is another tensor than then: it is at version 1" in str(
        said("another_tensor_at_a_higher_version")
    )


def test_another_storage_is_not_said_to_be_a_modification():
    for name in ("an_argument_in_another_storage", "a_tensor_in_another_storage_within_a_region"):
        text = str(said(name))
        assert "given another storage" in text
        assert "inplace" not in text
    error = said("a_tensor_in_another_storage_within_a_region")
    assert (error.expected, error.found) == (None, None)


def test_a_compiled_function_is_named():
    error = said("a_compiled_function_that_is_compiled_anew")
    assert isinstance(error, DeterminismError)
    assert error.grad_fn == "CompiledFunctionBackward"
    assert "The region runs a function compiled by torch.compile." in str(error)
    assert "torch.compile" not in str(said("saves_fewer"))


HINT = "In forward, the variable 'w' had requires_grad=False, and it has True now. Change requires_grad after backward."


def test_a_leaf_that_explains_the_difference_is_named():
    assert HINT in str(said("a_leaf_that_requires_grad_now"))
    text = str(said("a_frozen_parameter"))
    for name in ("weight", "bias"):
        assert f"In forward, the parameter '{name}' of Linear had requires_grad=True, and it has False now." in text


@pytest.mark.parametrize("when", ["before forward", "after forward", "never"])
@pytest.mark.parametrize("bodies", ["fewer", "another shape"])
def test_a_leaf_that_explains_nothing_is_not_named(when, bodies):
    """One that required grad in forward as well, and got no gradient; or any, where the recompute saved less."""
    w, unused, count = torch.rand(3, dtype=torch.float64), nn.Parameter(torch.rand(3)), Log()
    w.requires_grad_(when == "before forward")

    def function(x):
        count.append(1)
        h = (x * w.detach()).sin()
        if len(count) == 1:
            return h.cos().exp()
        return h.cos() if bodies == "fewer" else h[:2].cos().exp() + unused.sum().detach()

    y = checkpoint(function, leaf(3))
    if when == "after forward" and bodies == "fewer":
        w.requires_grad_()
    with pytest.raises(DeterminismError) as caught:
        backward(y)
    assert "requires_grad" not in str(caught.value)
