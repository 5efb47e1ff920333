"""What errors and warnings say: a table of programs that end in one, its class, its fields, and phrases of its message.

The messages are also looked for in the code, so one that no row provokes shows.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import pickle
import re
import runpy
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt_hooks
import ckpt_hooks.errors
from ckpt_hooks import (
    BudgetTooSmallError,
    CheckpointError,
    CheckpointPolicy,
    DeterminismError,
    GraphExecGroup,
    InternalError,
    MutationError,
    OverlapError,
    apply_checkpointing,
    checkpoint,
    checkpoint_chunks,
    checkpoint_loop,
    checkpoint_module,
    checkpoint_name,
    checkpoint_region,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    enable_in_transformers,
    every,
    is_recomputing,
    memory_ledger,
    noop_context_fn,
    patch_torch,
    plan_memory,
    policies,
    remove_checkpointing,
    span,
    trace,
)
from ckpt_hooks._core.misuse import Misuse
from ckpt_hooks._core.mutation import Why, _HowChanged
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._function import frame, words
from ckpt_hooks._recorded import frame as recorded
from ckpt_hooks._torch.checkpoint import FUNCTION_OF_ENGINE
from ckpt_hooks.losses import chunked_cross_entropy
from ckpt_hooks.offload import offload_saved_tensors
from ckpt_hooks.planner import Plan
from ckpt_hooks.policies import save_every, save_only_these_names, save_ops
from ckpt_hooks.report import compare
from tests import fake_transformers as fake
from tests.fake_device import fake_device
from tests.measure import CountOps, Log, as_library, is_a_test, leaf

aten = torch.ops.aten
MM, SIN, ERFINV = aten.mm.default, aten.sin.default, aten.erfinv.default  # the last is in no other list: a list warns once


class Row(NamedTuple):
    """A program, and what it ends in: patterns that are in the message, one that is not, and fields of the error."""

    program: Callable[[], object]
    kind: type[Exception]
    phrases: tuple[str, ...] = ()
    without: str = ""
    fields: dict[str, Any] = {}  # noqa: RUF012


TABLE: dict[str, Row] = {}


def says(kind, *phrases, without="", **fields):
    """Adds a program to the table."""

    def add(program):
        TABLE[program.__name__] = Row(program, kind, phrases, without, fields)
        return program

    return add


def backward(y):
    y.sum().backward()


def changing(*bodies, **options):
    """Calls a region that does one thing in forward and the next in each recompute, and runs backward."""
    todo = Log(bodies)

    def block(x):
        return (todo.pop(0) if len(todo) > 1 else todo[0])(x)

    backward(checkpoint(**options)(block)(leaf(3)))


def selective_pair():
    return create_selective_checkpoint_contexts([MM])


def torchs_pair():
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([MM])


@contextlib.contextmanager
def within(context):
    with context:
        yield


class Doubling(TorchDispatchMode):
    """Makes products twice as large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is aten.mul.Tensor else output


# Recomputes that differ


@says(DeterminismError, "forward: 3.*recomputation: 2.*debug=True", index=2, expected="3 tensors", found="2 tensors")
def saves_fewer():
    changing(lambda x: x.sin().cos().exp(), lambda x: x.sin().cos())


@says(DeterminismError, r"the recompute first differs at test_messages\.py", index=2)
def saves_fewer_with_the_logs():
    changing(lambda x: x.sin().cos().exp(), lambda x: x.sin().cos(), debug=True)


@says(DeterminismError, "during forward: 2.*debug=True", index=2, expected="2 tensors", found="3 tensors or more")
def saves_more():
    changing(lambda x: x.sin().cos(), lambda x: x.sin().cos().exp().tan(), early_stop=False)


@says(DeterminismError, "at position 1:.*debug=True", index=1, expected="float64[3] on cpu", found="float32[2] on cpu")
def saves_another_shape():
    changing(lambda x: x.sin().cos().exp(), lambda x: x[:2].float().sin().cos().exp())


@says(
    DeterminismError,
    'self-check in pass 1.*track_rng.*"metadata"',
    index=1,
    expected="float64[3] on cpu",
    grad_fn="SinBackward0",
)
def other_values():
    todo, module = Log([2, 3]), nn.Module()  # a new one each time, whose first pass is compared
    module.forward = lambda x: ((todo.pop(0) if len(todo) > 1 else todo[0]) * x.sin()).sin()
    backward(checkpoint(module, leaf(3)))


@says(DeterminismError, r"NumPy, DLPack, `\.data`.*saved by MulBackward0\. Found by the self-check", region=("block",), index=1)
def memory_written_behind_a_region():
    factor = torch.ones(3, dtype=torch.float64)
    with checkpoint_region(name="block"):
        y = leaf(3).sin() * (factor + 1)
    factor.data.mul_(2)
    backward(y)


@says(DeterminismError, "'outer/inner'", region=("outer", "inner"))
def a_region_inside_that_saves_fewer():
    todo = Log([lambda x: x.sin().cos().exp(), lambda x: x.sin().cos()])
    inner = checkpoint(name="inner")(lambda x: (todo.pop(0) if len(todo) > 1 else todo[0])(x))
    backward(checkpoint(name="outer", determinism_check="metadata")(lambda x: inner(x * 2).tan())(leaf(3)))


@says(DeterminismError, region=("outer",), grad_fn="TanBackward0")
def a_region_inside_whose_argument_is_of_another_shape():
    """The inner region asks the outer one for its input, which fails: the tensor is one of the outer region's operators."""
    shorter = threading.Event()

    def outer(x):
        h = (x[:2] if shorter.is_set() else x).sin().tan()
        return checkpoint(name="inner")(lambda h: h.cos().exp())(h)

    y = checkpoint(name="outer")(outer)(leaf(3))
    shorter.set()
    backward(y)


@says(DeterminismError, "returned another shape than forward", routing=("aten.nonzero.default",))
def a_replay_to_another_shape():
    x = torch.tensor([1.0, 2.0, -3.0], requires_grad=True)
    with checkpoint_region():
        y = x.sin()[(x > 0).nonzero()].exp()
    x.data.neg_()
    backward(y)


@says(DeterminismError, "Recomputed values differ", without="dispatch mode")
def saves_other_values():
    changing(lambda x: (x.sin() * 2).exp(), lambda x: (x.sin() * 3).exp(), determinism_check="values")


@says(DeterminismError, "requires_grad of a tensor that changed between forward and backward")
def a_frozen_parameter_of_a_class():
    class Models:
        layer = nn.Linear(3, 3)

    y = checkpoint(lambda x: Models.layer(x).sin(), torch.rand(2, 3, requires_grad=True))
    Models.layer.requires_grad_(False)
    backward(y)


@says(DeterminismError, "differ in requires_grad from the tensors saved in forward")
def a_tensor_that_requires_grad_in_the_rerun_alone():
    w = torch.rand(3)
    backward(checkpoint(lambda x: (x.float() * (w.clone().requires_grad_() if is_recomputing() else w)).sin(), leaf(3)))


@says(DeterminismError, "given other tensors")
def a_region_inside_that_is_given_more():
    cache = types.SimpleNamespace(kept=Log())

    def function(x, cache):
        cache.kept.append(x.exp())
        return checkpoint(lambda kept, h: sum(kept, h).sin(), list(cache.kept), x.sin()).cos()

    backward(checkpoint(function, leaf(3), cache))


@says(DeterminismError, "Forward ran under dispatch mode Doubling")
def a_mode_around_forward():
    with Doubling():
        y = checkpoint(lambda x: (x * 3.0).sin().exp(), leaf(3))
    backward(y)


@says(DeterminismError, "a mode around the region changes results")
def a_mode_around_a_recorded_region():
    x = leaf(3)
    with Doubling(), checkpoint_region():
        y = (x * 3.0).sin().exp()
    backward(y)


@says(DeterminismError, "the recompute under dispatch mode Doubling.*inside the region")
def a_mode_around_backward():
    y = checkpoint(lambda x: (x * 3.0).sin().exp(), leaf(3), determinism_check="values")
    with Doubling():
        backward(y)


@says(
    MutationError,
    "is updated by forward and again by its recompute",
    "self-check in pass 1",
    "buffer of a module",
    expected=None,
)
def an_update_where_no_walk_looks():
    count = torch.zeros(4)
    hidden = [types.MappingProxyType({"update": lambda: count.add_(1)})]
    checkpoint(lambda x: (x.sin(), hidden[0]["update"]())[0].exp(), leaf(2)).sum().backward()


@says(DeterminismError, "has drawn other random numbers", index=-1)
def other_random_numbers():
    table = functools.lru_cache(torch.randn)
    checkpoint(lambda x: torch.dropout((x * table(2)).sin(), 0.5, True).exp(), leaf(2)).sum().backward()


@says(UserWarning, "give that thread a generator of its own")
def another_thread_that_draws():
    def beside(x):
        drawing = threading.Thread(target=torch.rand, args=(2 + is_recomputing(),))
        drawing.start()
        drawing.join()
        return x.sin().exp()

    words.other_threads_draw = False  # or an earlier test has had it
    waiting = threading.Event()
    idle = threading.Thread(target=waiting.wait)
    idle.start()
    try:
        backward(checkpoint(beside, leaf(3)))
    finally:
        waiting.set()
        idle.join()


@says(DeterminismError, "another graph of a function compiled by torch.compile", grad_fn="CompiledFunctionBackward")
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


class Spanned(nn.Module):
    """Calls a layer, and another one without gradients, or not at all."""

    def __init__(self, is_called, one="one", other="other"):
        super().__init__()
        self.one, self.other, self.is_called = nn.Linear(3, 3), nn.Linear(3, 3), is_called
        apply_checkpointing(self, span(one, other))

    def forward(self, x):
        x = self.one(x)
        with torch.no_grad():
            return self.other(x) if self.is_called else x


@says(CheckpointError, "the grad mode is not the same at both ends: before the first layer on", region=("one to other",))
def a_span_whose_ends_differ():
    Spanned(True)(torch.ones(2, 3))


@says(CheckpointError, "without calling the span's last layer after the first", region=("one to other",))
def a_span_without_an_end():
    Spanned(False)(torch.ones(2, 3))


@says(CheckpointError, "the last layer of the span has run before the first", region=("other to one",))
def a_span_in_another_order_than_the_calls():
    Spanned(True, "other", "one")(torch.ones(2, 3))


@says(CheckpointError, "a tensor that a recompute of the region stored outside")
def a_result_of_a_recompute_in_backward():
    left = Log()

    def function(x):
        y = x.sin().exp()
        left.append(y.cos())
        return y

    backward(checkpoint(early_stop=False)(function)(leaf(3)))
    backward(left[1])


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


@says(DeterminismError, "the custom function `SavesLess.apply` ran again", region=("block",))
def a_function_with_other_results():
    with checkpoint_region(name="block"):
        y = SavesLess.apply(leaf(2) * 2)
    y.sum().backward()


@says(CheckpointError, "is not open on this thread: it was exited before", "once for each __enter__", region=("block",))
def a_region_left_twice():
    with checkpoint_region(name="block") as region:
        region.__exit__(None, None, None)


def one_step():
    with checkpoint_region(name="block"):
        yield


@says(CheckpointError, "was entered on another thread", "Run a generator .* on one thread", region=("block",))
def a_region_entered_on_another_thread():
    generator = one_step()
    thread = threading.Thread(target=next, args=(generator,))
    thread.start()
    thread.join()
    next(generator)


@says(CheckpointError, "without exiting region 'outer/block'", "to its end, or close it", region=("outer",))
def a_function_that_leaves_a_region_open():
    with contextlib.closing(one_step()) as generator:
        checkpoint(name="outer")(lambda x: next(generator))(leaf(2))


# Tensors that are not what they were

MODIFIED = r"has been modified by an inplace operation: it is at version 1; expected version 0 instead\. Backward needs"
REPLACED = r"is another tensor than forward saw: it is at version 0; expected version \d instead\..*Assign or exchange it after"
USUAL = r"Usual causes: an optimizer's step before backward, and a hook of forward which writes to it\."


def weighted(x, mask):
    return (x * mask).sin()


@says(MutationError, rf": args\[1\], a float.* tensor, {MODIFIED}", without="optimizer", tensor="args[1]", expected=0, found=1)
def an_argument_that_was_written_to():
    mask = torch.ones(3)
    y = checkpoint(weighted, leaf(3), mask)
    mask.zero_()
    backward(y)


@says(MutationError, r"args\[1\], a float.* was given other memory", "Assign a new tensor", expected=None)
def an_argument_with_other_memory():
    mask = torch.ones(3)
    y = checkpoint(weighted, leaf(3), mask)
    mask.data = torch.zeros(3)
    backward(y)


@says(MutationError, MODIFIED, region=("weighted",), tensor="kwargs['mask']")
def an_argument_in_a_partial():
    """A partial lends a region no name: the function in it does."""
    mask = torch.ones(3)
    y = checkpoint(functools.partial(weighted, mask=mask), leaf(3))
    mask.zero_()
    backward(y)


@says(MutationError, "the parameter '(weight|bias)' of Linear, a float32", USUAL, expected=1, found=2)
def an_optimizer_that_steps_too_early():
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.rand(2, 3, requires_grad=True)
    layer(x).sum().backward()
    y = checkpoint(lambda x: layer(x).sin(), x)
    optimizer.step()
    backward(y)


@says(MutationError, REPLACED, without="modified", tensor="the parameter 'weight' of Linear", expected=2, found=0)
def a_parameter_that_was_exchanged():
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.mul_(2)
    y = checkpoint(lambda x: layer(x).sin(), torch.rand(2, 3, requires_grad=True))
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.rand(3, 3)))
    backward(y)


@says(MutationError, "region 'Linear': the parameter 'bias' is gone", tensor="the parameter 'bias'", expected=None, found=None)
def a_frozen_parameter_that_is_gone():
    layer = checkpoint_module(nn.Linear(2, 5000).requires_grad_(False))
    y = layer(torch.ones(2, 2, requires_grad=True).sin())
    layer.bias = None
    backward(y)


@as_library
class Holder:
    """Holds a tensor where nothing looks."""

    __slots__ = ("tensor",)


@says(MutationError, REPLACED, without="modified", expected=1, found=0)
def a_tensor_that_was_bound_anew():
    holder = Holder()
    holder.tensor = torch.ones(3).mul_(2)
    y = checkpoint(lambda x: x.float() * holder.tensor, leaf(3), determinism_check="metadata")
    holder.tensor = torch.ones(3)
    backward(y)


@says(MutationError, MODIFIED, "Or the function saved another tensor in forward than", without="optimizer")
def another_tensor_at_a_higher_version():
    holder = Holder()
    holder.tensor = torch.ones(3)
    y = checkpoint(lambda x: x.float() * holder.tensor, leaf(3))
    holder.tensor = torch.ones(3).mul_(2)
    backward(y)


@says(MutationError, "forward has written to the buffer 'queue'", "first restore the tensor", region=("Module",))
def a_large_buffer_written_late():
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(5000))
    module.forward = lambda x, writes: (module.queue.add_(float(writes))[:3].clone() * x).sin() if writes else x.sin()
    checkpoint(module, leaf(3), False)
    checkpoint(module, leaf(3), True)


@says(MutationError, "Or run the step again: the next forward copies it", tensor="the buffer 'queue' of Module")
def a_large_buffer_written_to_between():
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(5000))
    module.forward = lambda x: (module.queue[:3] * x).sin()
    y = checkpoint(module, leaf(3))
    module.queue.add_(1)
    backward(y)


@says(MutationError, rf"a float64\[3\] leaf that region 'region' saved {MODIFIED}", USUAL, region=("region",))
def a_leaf_that_a_recorded_region_saved():
    x, w = leaf(3), leaf(3)
    with checkpoint_region():
        y = x * w
    with torch.no_grad():
        w.zero_()
    backward(y)


@says(
    MutationError,
    rf"a float32\[3\] tensor that region 'region' needs \(from outside of the region\) {MODIFIED}.*Or keep what was computed",
    without="optimizer",
    tensor="a float32[3] tensor",
)
def a_tensor_that_a_replay_needs():
    x, mask = leaf(3), torch.ones(3)
    with checkpoint_region():
        y = (x * mask).sin()
    mask.zero_()
    backward(y)


@says(MutationError, r"has been modified by an inplace operation \(aten\.add_\.Tensor\) later", tensor="a saved tensor")
def a_saved_tensor_that_a_region_writes_to():
    x = leaf(4)
    with checkpoint_region():
        h = x.exp()
        y = h * 2
        h.add_(1)
    backward(y)


@says(MutationError, "was freed after forward and not filled again", expected=None, found=None)
def memory_that_was_freed():
    x, w = leaf(4), torch.ones(4, dtype=torch.float64)
    with checkpoint_region():
        y = (x * w).sin()
    w.untyped_storage().resize_(0)
    backward(y)


@says(MutationError, rf"^a float64\[16, 16\] tensor that was saved in a block of offload_saved_tensors {MODIFIED}", region=())
def a_tensor_on_the_host_that_was_written_to():
    with fake_device():
        h = leaf(16, 16) * 1
        with offload_saved_tensors(min_offload_size=0):
            y = h.sin()
        h.detach().zero_()
        backward(y)


@says(MutationError, MODIFIED, "use a clone of it in the block", region=())
def a_tensor_that_stayed_and_was_written_to():
    h = leaf(3)
    with offload_saved_tensors():
        y = h.sin()
    with torch.no_grad():
        h.zero_()
    backward(y)


# Groups, bugs


@says(OverlapError, "Performing two backward calls that overlap")
def two_backwards_that_overlap():
    y = checkpoint(lambda x: x.sin().cos(), leaf(3))
    with GraphExecGroup():
        y.sum().backward(retain_graph=True)
        backward(y)


@says(RuntimeError, "cannot be nested")
def groups_in_groups():
    with GraphExecGroup(), GraphExecGroup():
        pass


@says(InternalError, "This is a bug in ckpt_hooks")
def a_bug():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "rerun", lambda frame, wanted: [MISSING] * len(frame.numbers))
        backward(checkpoint(lambda x: x.sin().cos(), leaf(3)))


# Reports and plans


@says(RuntimeError, "where a step cannot end")
def a_step_of_a_trace_in_a_region():
    with trace() as found, checkpoint_region():
        found.step()


@says(RuntimeError, "was read while its block runs")
def a_ledger_read_too_early():
    with memory_ledger() as found:
        found.phases  # noqa: B018


@says(RuntimeError, "while a profiler runs on this thread")
def a_ledger_in_a_ledger():
    with memory_ledger():
        memory_ledger(lambda: None)


@says(RuntimeError, "on another thread")
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


@says(ImportError, "Pictures need matplotlib")
def a_picture_without_matplotlib():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        memory_ledger(lambda: None).plot()


def two_blocks():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def lists():
    model = nn.Module()
    model.layers, model.tail = nn.ModuleList([nn.Tanh(), nn.Tanh(), nn.Tanh()]), nn.ModuleList([nn.Tanh()])
    return model


SPANS = [span("0", "1"), span("1", "2")]


def planned(step=None, budget=0.5, blocks=None, model=None, **options):
    model = two_blocks() if model is None else model
    step = step or (lambda model: model(torch.ones(2, 4)).sum().backward())
    return plan_memory(model, step, budget, blocks=blocks, **options)


GUARDED = two_blocks()


def within_a_region(call):
    with checkpoint_region(name="block"):
        call()


def nested():
    """Returns the values of a plan with plans in its plans of other shapes, 10,000 deep."""
    found = values = planned(blocks=["1"]).to_json()
    for _ in range(10_000):
        found = {**values, "others": [found]}
    return found


def guarded(step, limit=1):
    with planned(model=GUARDED).guard(GUARDED, limit=limit) as guard:
        guard(step, GUARDED)


def written_to(model):
    with torch.no_grad():
        model[0].weight.mul_(2)
    raise ValueError("later")


@says(CheckpointError, "a parameter or the state of an optimizer, outside of any", region=())
def a_weight_written_to_outside_of_an_optimizer():
    guarded(written_to, None)


@says(ValueError, "is compiled")
def a_plan_of_a_compiled_model():
    model = nn.Linear(4, 4)
    model._orig_mod = None
    planned(model=model)


def budgeted(**options):
    return apply_checkpointing(two_blocks(), memory_budget=0.5, **options)


@says(ValueError, "There is no plan yet. Train a step first")
def a_plan_of_a_budget_before_the_first_step():
    budgeted().to_json()


@says(ValueError, "There is no plan. Pass memory_budget and train a step")
def a_plan_of_a_model_without_a_budget():
    enable_in_transformers(fake.Model()).to_json()


class Early(fake.CausalModel):
    """Has no setter of the loss."""

    loss_function = property(lambda self: fake.ForCausalLMLoss)


def other_loss(model):
    model.loss_function = nn.functional.mse_loss
    return model


def in_slices(look):
    model, ids = fake.CausalModel(), torch.zeros(2, 3, dtype=torch.long)
    enable_in_transformers(model, chunked_loss=True)
    loss, logits = model(ids, labels=ids)
    look(model, loss, logits)
    return logits.sum()


def stepped(model, loss, _):
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


@says(RuntimeError, "hidden states or weights of the head were written to since forward. Look at logits before")
def logits_after_the_step():
    in_slices(stepped)


@says(UserWarning, "chunked_loss: logits were read before the loss was computed")
def logits_before_the_loss():
    model = fake.CausalModel(lambda logits: logits[:, :2])
    with enable_in_transformers(model, chunked_loss=True):
        model(torch.zeros(2, 3, dtype=torch.long))


@says(ValueError, "policy cannot be used with memory_budget, since the plan decides. Leave these out")
def a_budget_and_a_policy():
    budgeted(policy=[SIN])


@says(ValueError, "margin cannot be used without memory_budget. Pass it too.")
def a_margin_without_a_budget():
    apply_checkpointing(two_blocks(), "1", margin=0.1)


@says(TypeError, "a Plan, or the result of an earlier to_json\\(\\), but got 3 of type int. Leave out plan to make a new plan")
def a_budget_with_a_plan_that_is_none():
    budgeted(plan=3)


@says(ValueError, "spans around blocks, or chunks, which memory_budget does not support")
def a_budget_with_a_plan_of_chunks():
    budgeted(plan=planned(chunks={"0": (1, 2)}))


@says(UserWarning, "has measured no step in which block '1' gets")
def a_plan_in_a_step_of_another_shape():
    model = two_blocks()
    with planned(model=model, blocks=["1"]).apply(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(3, 4))


@says(UserWarning, "but the operator ran once more")
def a_run_more_than_a_policy_expects():
    policy = policies.save_indices([("", SIN, 0)], counts={("", SIN): 1})
    checkpoint(policy=policy)(lambda x: x.sin().sin())(leaf(4))


# Models of Transformers, and torch's function under a patch


def enabled(apply, *args):
    model = fake.Model()
    apply(model, *args)
    return model


@says(ValueError, "is not a layer of the checkpointing switch of Model")
def transformers_by_a_plan_of_other_modules():
    def step(model):
        model(torch.zeros(64, 64, dtype=torch.int64)).sum().backward()

    model = fake.Model()
    enable_in_transformers(model, plan=plan_memory(model, step, 1.0, blocks=["layers.*.linear"]))


@says(UserWarning, "Both recompute")
def a_model_whose_own_checkpointing_is_on():
    model = fake.Model()
    model.gradient_checkpointing_enable()
    apply_checkpointing(model, "layers.*")


@says(UserWarning, "with the options context_fn")
def an_option_of_the_models_own_switch():
    enabled(enable_in_transformers).gradient_checkpointing_enable({"context_fn": torch.sin})


@says(RuntimeError, "This patch was undone before this `with` block.*patch_torch")
def a_patch_entered_after_its_end():
    entered_twice(patch_torch())


@says(RuntimeError, "This handle was undone before this `with` block.*apply_checkpointing")
def regions_entered_after_their_end():
    entered_twice(apply_checkpointing(two_blocks(), "*"))


@says(RuntimeError, "This handle was undone before this `with` block.*enable_in_transformers")
def a_switch_entered_after_its_end():
    entered_twice(enable_in_transformers(fake.Model()))


def entered_twice(handle):
    for _ in range(2):
        with handle:
            pass


@says(RuntimeError, "but found")
def a_patch_of_what_another_program_has_put_there():
    with pytest.MonkeyPatch.context() as context:
        context.setattr(torch.utils.checkpoint, FUNCTION_OF_ENGINE, torch.sin)
        patch_torch()


@says(UserWarning, "is reentrant")
def a_reentrant_call_under_a_patch():
    with patch_torch():
        torch.utils.checkpoint.checkpoint(torch.sin, leaf(2), use_reentrant=True)


# Calls


class Lazy(nn.Module):
    """A module that is not made yet."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)

    def forward(self, x):
        return self.layer(x)


class Slotted(nn.Module):
    """Has an attribute outside of its dictionary."""

    __slots__ = ("extra",)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))


@says(TypeError, "torch.jit.script cannot compile a checkpointed Linear")
def a_checkpointed_module_that_is_scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(checkpoint_module(nn.Linear(2, 2)))


@contextlib.contextmanager
def suppressing():
    with contextlib.suppress(ZeroDivisionError):
        yield


def named_region(policy, name="other"):
    with checkpoint_region(policy=policy):
        checkpoint_name(leaf(3).sin(), name).exp()


def with_contexts(contexts, function=None):
    checkpoint(function or block, x, context_fn=lambda: contexts)


def save_or_offload(saved, offloaded):
    policies.save_and_offload_only_these_names(names_which_can_be_saved=saved, names_which_can_be_offloaded=offloaded)


def generator(x):
    yield x


def with_class():
    with checkpoint_region:
        pass


def decorated():
    class Block:
        @checkpoint
        def forward(self, x, scale=2):
            return x


def policy_in_a_plain_region():
    recorded._has_warned = False  # tests begin as if it had been said
    checkpoint(name="outer")(lambda x: checkpoint(name="inner", policy=policies.dots_saveable)(block)(x.sin()))(leaf(3).float())


def wrapped_after(model, select):
    applied = apply_checkpointing(model, select)
    forward = model[1].forward
    model[1].forward = lambda x: forward(x)
    applied.undo()


def scaled(x, *, scale=2):
    return (x * scale).sin()


block, x = nn.Linear(3, 3), torch.rand(2, 3)

RIGHT = r".*`checkpoint\(block, x\)`, and not `checkpoint\(block\(x\)\)`"
BLOCK = r"`with checkpoint_region\(\):` around its call, or `checkpoint_region\(\)\(\w+\)\(\*args\)`.*`@checkpoint_region\(\)`"

#: Wrong calls with a function in the wrong place, by a pattern of the message: noticed with gradients and without.
FUNCTIONS = {
    r"takes \(self, x, scale=2\).*`@checkpoint\(\)`": decorated,
    r"'Linear', which takes \(input.*`checkpoint\(Linear, \*args\)`": lambda: checkpoint(block),
    r"no arguments for the function 'scaled'": lambda: checkpoint(scaled, early_stop=False),
    rf"a tensor, float32\[2, 3\] on cpu{RIGHT}": lambda: checkpoint(block(x)),
    rf"takes a function first, but got a tensor{RIGHT}": lambda: checkpoint(x, block),
    r"`checkpoint\(function, \*args\)`": lambda: checkpoint(None, x),
    r"`checkpoint\(\.\.\.\)\(block\)\(x\)`, and not": lambda: checkpoint(early_stop=False)(block(x)),
    r"`checkpoint_region\(\)\(block\)\(x\)`, and not": lambda: checkpoint_region()(block(x)),
    r"only a function, but got 1 more, the first a tensor.*\(scaled\)\(\*args\)`": lambda: checkpoint(name="a")(scaled, x),
}


def looped(step=lambda h, row: (h * row, None), **options):
    """Runs two steps, on rows of ones if no others are given."""
    return checkpoint_loop(step, torch.ones(2), slots=2, **{"xs": torch.ones(2, 2), **options})


def chunked(function=torch.sin, *args, chunks=2, **options):
    """Calls a function on slices of three rows and of two, of ones and twos."""
    rows = torch.tensor([[1.0], [1.0], [1.0], [2.0], [2.0]]).expand(5, 2)
    return checkpoint_chunks(function, rows, *args, chunks=chunks, **options)


def of_head(shape=(5, 2), words=(3, 2), labels=None, bias=None, dtype=torch.float32, **options):
    """Calls the cross entropy of a head: five tokens, and three words."""
    labels = torch.zeros(5, dtype=torch.long) if labels is None else labels
    return chunked_cross_entropy(torch.ones(shape), torch.ones(words, dtype=dtype), labels, bias, **options)


#: Wrong calls, by the class and a pattern of the message.
CALLS = {
    TypeError: {
        "group should be a process group with this process, but got 3": lambda: planned(group=3),
        "step should be a function to run, but got 3": lambda: planned(model=GUARDED).guard(GUARDED)(3),
        "offload_saved_tensors refers to live objects of this process": lambda: pickle.dumps(offload_saved_tensors()),
        # Options
        r"determinsm='none' .*write `checkpoint\(determinism_check=\.\.\.\)\(f.* options are .*policy, ": (
            lambda: checkpoint(block, x, determinsm="none")
        ),
        r"write `checkpoint\(name=\.\.\.\)\(function\).* with functools\.partial": lambda: checkpoint(block, x, name="block"),
        "returns a generator or coroutine": lambda: checkpoint(generator, x),
        r"args\[0\] is an iterator": lambda: checkpoint(lambda x: x, iter([x])),
        "context_fn should return two context managers.* but returned <": lambda: with_contexts(contextlib.nullcontext()),
        "two context managers.* but one of them is 3": lambda: with_contexts((noop_context_fn()[0], 3)),
        "use_reentrant should be None or False, but got": lambda: checkpoint(block, x, use_reentrant="no"),
        "swapped, or not from one call": lambda: with_contexts((selective_pair()[0], selective_pair()[1])),
        "and a _CachedTorchDispatchMode": lambda: with_contexts((selective_pair()[0], torchs_pair()[1])),
        "within another context": lambda: with_contexts((within(selective_pair()[0]), contextlib.nullcontext())),
        "change should be the index of a change": lambda: memory_ledger(lambda: None).holders_at("last"),
        r"Write `with checkpoint_region\(\):`, or `checkpoint\(\.\.\.\)\(function": lambda: checkpoint(name="x").__enter__(),
        "got 'GELU'. Make a module of the class first: `GELU": lambda: checkpoint()(nn.GELU),
        "allow_cache_entry_mutation should be True": lambda: ckpt_hooks.create_selective_checkpoint_contexts(
            [aten.mm.default], allow_cache_entry_mutation="no"
        ),
        "Pass the function, not its result": lambda: checkpoint(context_fn=noop_context_fn()),
        "path should be the path of a file, but got 3": lambda: memory_ledger(lambda: None).plot(3),
        "plain should be a ledger, but got 3": lambda: compare(plain=3),
        "got 3 of type int. Pass the model of the plan": lambda: planned(blocks=["1"]).apply(3),
        r"path should be the path of a file.*'front\.svg'": lambda: planned(blocks=["1"]).pareto().plot(3),
        "a function first, but got a tensor, .*`saved_residuals\\(block, x\\)`": lambda: ckpt_hooks.saved_residuals(x),
        r"context_fn is called with \(\), but .* takes \(x\)": lambda: checkpoint(context_fn=lambda x: noop_context_fn()),
        r"determinism_check is called with \(tensor\)": lambda: checkpoint(determinism_check=lambda: None),
        "first should be a string, but got 0": lambda: span(0, "1"),
        # Policies
        r"policy of ckpt_hooks\.policies, but got aten\.mm\.default\. Write a list": lambda: checkpoint(policy=MM),
        r"aten\.mm\. Write a list of operators: policy=": lambda: checkpoint(policy=aten.mm),
        r"Call it: policy=save_ops\(\.\.\.\)": lambda: checkpoint(policy=save_ops),
        r"Call it: policy=offload_ops\(\.\.\.\)": lambda: checkpoint(policy="offload_ops"),
        r"policy must be .* got 'dot_saveable' of type str\. Is 'dots_saveable' .*meant\? .*these names: .*dots_saveable, ": (
            lambda: checkpoint(policy="dot_saveable")
        ),
        r"one must .* got 'save_op' .*Is save_ops\(\.\.\.\) .*meant": lambda: policies.save_from_both_policies("save_op", MM),
        r"got 'aten\.mm' of type str\. Give one of these names: ": lambda: checkpoint_region(policy="aten.mm"),
        "returned 'save' of type str for aten.sin.default": lambda: checkpoint(policy=lambda *args: "save")(torch.sin)(leaf(3)),
        "each region needs a count of its own": lambda: save_every(MM, 2)(None, MM),
        "saved should be a list of names, but got 'a' of": lambda: save_or_offload("a", []),
        "a name in names should be a string, but got 3": lambda: save_only_these_names(3),
        r"dots_saveable is a policy.*`policy=dots_saveable`": lambda: checkpoint(policy=policies.dots_saveable()),
        r"policies, but got 'list'\. Write policy=": lambda: checkpoint(policy=list),
        r"policy is called with \(ctx, op, .* takes \(op\)\. Write `def policy\(ctx, op, \*args, \*\*kwargs\):`": (
            lambda: checkpoint(policy=lambda op: False)
        ),
        r"select is called with \(name, module\), but .* takes \(m\)": lambda: apply_checkpointing(block, lambda m: True),
        "a region has one": lambda: checkpoint(policy=[MM], context_fn=selective_pair)(torch.sin)(leaf(3)),
        "a submodule in runs should be a string, but got 1": lambda: policies.save_indices([(1, MM, 0)]),
        "runs and counts should be \\(module, operator, run\\) triples": lambda: policies.save_indices([3]),
        "takes names and classes of modules, but got a module, Linear": lambda: policies.save_modules(block),
        # Regions as blocks, and sequences
        r"`with checkpoint_region\(\):`, with parentheses": with_class,
        r"offload_saved_tensors is a class": lambda: contextlib.ExitStack().enter_context(offload_saved_tensors),
        r"checkpoint_region is a class.*with parentheses": lambda: contextlib.ExitStack().enter_context(checkpoint_region),
        rf"got 'scaled'.*{BLOCK}": lambda: checkpoint_region(scaled),
        "around the lines that compute it": lambda: checkpoint_region(x),
        r"dots_saveable.*`checkpoint_region\(policy=\.\.\.\)`": lambda: checkpoint_region(policies.dots_saveable),
        r"'dots_saveable' .*`checkpoint_region\(policy=\.\.\.\)`": lambda: checkpoint_region("dots_saveable"),
        r"`checkpoint_region\(name='block'\)`": lambda: checkpoint_region("block"),
        "tensor should be a tensor, or .*, but got 3 of type int": lambda: checkpoint_name(3, "h"),
        r"tensor should .* got \[None, {'a': 2}\] of type list": lambda: checkpoint_name([None, {"a": 2}], "h"),
        "name should be a string, but got 3 of type int. Pass a name from": lambda: checkpoint_name(x, 3),
        "name should be a string, but got 3 of type int. Pass a name for": lambda: checkpoint(name=3),
        r"functions\[1\] should be a function or a module, but got None": lambda: checkpoint_sequential([block, None], 2, x),
        r"a module, ModuleDict.*`\[\*functions.values\(\)\]`": lambda: checkpoint_sequential(nn.ModuleDict({"a": block}), 1, x),
        "checkpoint_sequential takes one input": lambda: checkpoint_sequential([block], 1, x, x),
        r"got a module, Linear\..*`checkpoint\(function, x\)`": lambda: checkpoint_sequential(block, 1, x),
        # Functions on slices
        "checkpoint_chunks takes a function first, but got a tensor": lambda: chunked(x),
        r"lambda.* returns a generator or coroutine": lambda: chunked(lambda x: (yield x)),
        r"The argument to cut should be a tensor, but got \[1\] of type list": lambda: checkpoint_chunks(torch.sin, [1]),
        r"hidden should be a floating point tensor \[\.\.\., hidden size\], but got a tensor, float32\[\]": lambda: of_head(()),
        "labels should be a tensor of integers, but got .*, and not prob": lambda: of_head(labels=torch.ones(5)),
        r"weight should be a tensor, but got \[1\] of type list. Pass hidden": lambda: chunked_cross_entropy(x, [1], x),
        "The argument to cut should be a tensor, but got None": lambda: checkpoint_module(nn.Tanh(), chunks=2)(),
        "return tensors for each slice, in the same places .* but returned {'y': 1}": lambda: chunked(lambda x: {"y": 1}),
        "but returned a tuple of 2. Return tensors, or None in all": lambda: chunked(lambda x: (x, 1)),
        r"return \(sum, count\) of its slice, but returned a tensor": lambda: chunked(torch.sum, reduce="mean"),
        # Loops
        r"step is called with \(state\), but .* takes \(h, x\)": lambda: checkpoint_loop(lambda h, x: h, x, 2),
        r"step is called with \(state, x\), but .* takes \(h\)": lambda: looped(lambda h: h),
        r"xs should be a list, a tensor, or .* but got 3 of type int\. Write a list .*list\(\.\.\.\)": lambda: looped(xs=3),
        r"a step of checkpoint_loop should return \(state, y\), but step 0 returned a tensor.* Return \(state, N": lambda: (
            looped(lambda h, row: h * row)
        ),
        r"alike in all steps, but step 1 returned \(1,\) of type tuple.*the first step \{'a': 0\}": lambda: looped(
            lambda h, t: (h, (t,) if t else {"a": t}), xs=[0, 1]
        ),
        r"alike in all steps, but step 1 returned None of type NoneType, and the first step a tensor": lambda: looped(
            lambda h, t: (h, None if t else h), xs=[0, 1]
        ),
        # Modules
        "cannot make a subclass of Slotted": lambda: checkpoint()(Slotted()),
        "module should be a torch.nn.Module, but got 'sin'": lambda: checkpoint_module(torch.sin),
        "model should be a torch.nn.Module, but got .* of type list": lambda: apply_checkpointing([block], nn.Linear),
        r"every\(n=2, of=None\)\. Write one `every`": lambda: apply_checkpointing(block, every(2, of=every(2))),
        "module should be a torch.nn.Module, but got 'm' of type str": lambda: remove_checkpointing("m"),
        "write its name, or `checkpoint_module": lambda: apply_checkpointing(two_blocks(), block),
        r"select should be module classes.* but got <dots_saveable: .*Pass a policy as": lambda: apply_checkpointing(
            two_blocks(), policies.dots_saveable
        ),
        r"select should be .* got \[<OpOverload.* type list\. Pass a policy": lambda: apply_checkpointing(two_blocks(), [MM]),
        r"The result of select\('0', module\) should be True or False, but got 'no' of type str": lambda: apply_checkpointing(
            two_blocks(), lambda name, module: "no" if name else False
        ),
        r"The result of of\('', module\) should be True or False, but got <CheckpointPolicy": lambda: apply_checkpointing(
            two_blocks(), every(2, of=lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE)
        ),
        r"The result of blocks\('0', module\) should be True or False, but got None": lambda: planned(
            blocks=lambda *given: None
        ),
        "root should be a torch.nn.Module, but got 3": lambda: policies.save_indices([("", MM, 0)], root=3),
        "a key of select should be a name pattern, .* but got 3.5 of type float": lambda: apply_checkpointing(
            block, {3.5: None}
        ),
        "select should be module classes.* but got 3.5 of type float. Write a name": lambda: apply_checkpointing(
            two_blocks(), 3.5
        ),
        r"select should be module classes.* but got 3 of type int.* \[3\] for one layer, or every\(3\)": lambda: (
            apply_checkpointing(two_blocks(), 3)
        ),
        r"select should be module classes.* but got \[\] of type list": lambda: apply_checkpointing(block, []),
        "a key of select should be .* but got 'Tensor'": lambda: apply_checkpointing(block, {torch.Tensor: None}),
        "a Transformers model, but got a module, Linear. Pass other modules": lambda: enable_in_transformers(block),
        r"`enable_in_transformers\(model\.0\)`": lambda: enable_in_transformers(nn.Sequential(fake.Model())),
        "plan should be a Plan of .* but got 3 of type int": lambda: enable_in_transformers(fake.Model(), plan=3),
        "plan should be a Plan of .* but got 'Plan'": lambda: enable_in_transformers(
            fake.Model(), plan=ckpt_hooks.planner.Plan
        ),
        # Reports and plans
        r"step should be a function to run, but got None .* not `memory_ledger\(step\(\)\)`": lambda: memory_ledger(None),
        "saved_residuals reads the graph of the function's result, but int has no": lambda: ckpt_hooks.saved_residuals(
            lambda: 3
        ),
        r"reads the graph of tensors, but got \['str'\]": lambda: ckpt_hooks.saved_tensors_report("loss"),
        r"memory_budget should be a number of bytes, a fraction .* but got \[1\] of type list": lambda: planned(budget=[1]),
        "model should be a torch.nn.Module, but got 3 of type int": lambda: plan_memory(3, print, 0.5),
        "step should be a function of the model, but got 3 of type int": lambda: plan_memory(block, 3, 0.5),
        r"step is called with \(model\), but 'function' takes \(\).*`def step\(model\):`": lambda: planned(step=lambda: None),
        "chunks should be a mapping of module names to numbers of slices, but got 8": lambda: planned(chunks=8),
    },
    ValueError: {
        # Options and policies
        r"segments should be an integer from 1 to .*, but got a tuple of 2": lambda: checkpoint_sequential([block], (x, x), 2),
        r"arguments: nam\. Without a function, checkpoint takes .*policy, .*\. Write name for nam": lambda: checkpoint(
            nam="block"
        ),
        r"arguments: early_stop\. checkpoint_region takes .*\. Pass no others": lambda: checkpoint_region(early_stop=True),
        r"policy has no operator\..*nothing_saveable": lambda: checkpoint_region(policy=[]),
        "save_only_these_names got no names": save_only_these_names,
        "determinism_check should be one of 'default', 'metadata', 'none'": lambda: checkpoint(
            block, x, determinism_check="all"
        ),
        "min_offload_size should be a number of bytes, but got '1 meg'": lambda: offload_saved_tensors("1 meg"),
        "update the OpOverloadPacket": lambda: checkpoint(policy=[aten.mm]),
        r"got: 'mm' of type str\. Write one of: torch\.ops\.aten\.mm\.default": lambda: checkpoint(policy=["mm"]),
        r"got: 'torch.ops.aten.mm' of type str\. Write one of: .*\.aten\.mm\.default": lambda: save_ops("torch.ops.aten.mm"),
        r"got: 'mm'\. Write one of: torch\.ops\.aten\.mm\.default": lambda: save_ops([MM, torch.mm]),
        r"got: '' of type str\. Write operators like": lambda: save_ops([""]),
        "save_modules got no modules. Name some": lambda: policies.save_modules(()),
        "got: .*view.* of type list": lambda: save_ops([[aten.view.default]]),
        "n should be a positive integer, but got 0 of type int. Pass 2 to keep": lambda: save_every(MM, 0),
        "no name in common": lambda: save_or_offload(["a"], ["a"]),
        "save_modules got no modules": policies.save_modules,
        "a number in runs should be an integer from 0, but got -1": lambda: policies.save_indices([("", MM, -1)]),
        # Sequences and modules
        "this engine is non-reentrant": lambda: checkpoint_sequential([block], 1, x, use_reentrant=True),
        r"from 1 to the number of functions \(2\), but got 3": lambda: checkpoint_sequential([block, block], 3, x),
        "policy. checkpoint_sequential takes .* call each": lambda: checkpoint_sequential([block], 1, x, policy=[MM]),
        "chunks should be a positive integer, but got 0 of type int": lambda: chunked(chunks=0),
        r"n should be an integer from 0, but got None.* or the inputs of the steps as xs": lambda: looped(torch.sin, xs=None),
        r"n should be the number of inputs \(2\), but got 3 of type int\. Leave it out": lambda: looped(n=3),
        r"xs should be tensors with equal numbers of rows, .* but got a tuple of 2\. Put": lambda: looped(xs=(x, x[:1])),
        r"alike in all steps, but step 1 returned a tensor, float32\[1\].*shapes": lambda: looped(
            lambda h, t: (h, torch.ones(t)), xs=[2, 1]
        ),
        "chunk_size should be a positive integer, but got 0 of type int": lambda: chunked(chunks=None, chunk_size=0),
        "chunks and chunk_size both say how large": lambda: chunked(chunk_size=3),
        "dim is an option of chunks, but the number of chunks is missing. Write chunks=8": lambda: checkpoint_module(
            nn.Tanh(), dim=1
        ),
        r"of the tensor to cut \(a tensor, float32\[5, 2\] on cpu\), but got 2": lambda: chunked(dim=2),
        r"policy. checkpoint_chunks takes .* write `checkpoint_chunks\(checkpoint\(policy=": lambda: chunked(
            lambda x: x, policy=[]
        ),
        "model should be a model with a module '1'": lambda: planned(blocks=["1"]).apply(nn.Linear(3, 3)),
        "For the model, write `checkpoint_module": lambda: ckpt_hooks.apply_checkpointing(nn.Linear(3, 3), "*"),
        r"weight should be a tensor \[vocabulary, 2\].*as torch.nn.Linear": lambda: of_head(words=(2, 3)),
        "weight should be of the dtype of hidden.*`weight.to": lambda: of_head(dtype=torch.bfloat16),
        "ignore_index should be an integer of 64 bits": lambda: of_head(ignore_index=None),
        r"bias should be a tensor \[3\], a value for each row.*float32\[2\]": lambda: of_head(bias=torch.ones(2)),
        r"labels should be a tensor \[1, 5\], a label for each row.*int64\[5\].*shift labels": lambda: of_head((1, 5, 2)),
        "reduction should be 'mean', 'sum' or 'none', but got 'max'": lambda: of_head(reduction="max"),
        "label_smoothing should be a fraction from 0.0 to 1.0, but got 1.5": lambda: of_head(label_smoothing=1.5),
        "softcap should be a positive number, or None, but got 0": lambda: of_head(softcap=0),
        "reduce should be None, 'sum' or 'mean', but got 'max'": lambda: chunked(reduce="max"),
        "chunked has 'mask' of type str, but 'sin' got no argument": lambda: chunked(chunked="mask"),
        r"y should be a tensor with 5 rows in dimension 0.*float32\[3\]": lambda: chunked(scaled, chunked="y", y=torch.ones(3)),
        "For a slice of 3 rows in dimension 0 the function": lambda: chunked(torch.sum),
        r"return 3 rows, but returned a tensor, float32\[2, 2\]": lambda: chunked(lambda x: x[1:]),
        r"the shape \(3,\), but got a tensor, float32\[2\]": lambda: chunked(lambda x: x.sum(1), reduce="sum"),
        "returns other values for 2 rows of dimension 0": lambda: chunked(lambda x: x.cumsum(0), check_rows=True),
        r"select=\[4\] is out of range\. Layers: the model has 2\. Give": lambda: apply_checkpointing(two_blocks(), [0, 4]),
        r"blocks=\[-3\] is out of range\. Layers: the model has 2\. Give": lambda: planned(blocks=[-3]),
        r"select=slice\(5, 9, None\) is out .* layers has 3 and tail has 1": lambda: apply_checkpointing(lists(), slice(5, 9)),
        r"of=\[3\] is out of range\. Layers: the model has no torch\.nn\.ModuleList": lambda: apply_checkpointing(
            nn.Linear(2, 2), every(2, of=range(3, 5))
        ),
        "select=ReLU selects no module, or only modules inside .* other selected classes": lambda: apply_checkpointing(
            two_blocks(), {nn.Linear: None, nn.ReLU: None}
        ),
        "Write the policy into the mapping": lambda: apply_checkpointing(block, {"": None}, policy=policies.dots_saveable),
        "early_stop. With recorded=True": lambda: checkpoint_module(nn.Tanh(), recorded=True, early_stop=True),
        "is a TorchScript module": lambda: checkpoint_module(scripted()),
        "whose forward is a property": lambda: checkpoint_module(type("Made", (nn.Tanh,), {"forward": property(repr)})()),
        "is checkpointed already": lambda: checkpoint_module(checkpoint_module(nn.Tanh())),
        "which has no forward": lambda: checkpoint_module(nn.ModuleList()),
        "n should be a positive integer, but got 0 of type int. Pass 2 to select": lambda: every(0),
        "selects no module. Select among these classes: Linear": lambda: apply_checkpointing(block, nn.Conv2d),
        "a span of two modules that the same module calls": lambda: apply_checkpointing(two_blocks(), span("0", "1.0")),
        r"a span whose last layer runs after its first, but got span\(first='1', last='0'\).*Write span\('0', '1'\)": (
            lambda: apply_checkpointing(two_blocks(), span("1", "0"))
        ),
        "The spans .* overlap. Pass": lambda: apply_checkpointing(nn.Sequential(*two_blocks(), block), SPANS),
        "is a span, whose arguments": lambda: apply_checkpointing(two_blocks(), span("0", "1"), chunks=2),
        "Write a module's name": lambda: apply_checkpointing(two_blocks(), "layers"),
        "write policy='dots_saveable' after the modules": lambda: apply_checkpointing(two_blocks(), "dots_saveable"),
        r"Write a module's name, such as 'layers\.\*'\.": lambda: apply_checkpointing(fake.Model(), "layer.*"),
        "To select by class, pass the class Layer itself": lambda: apply_checkpointing(fake.Model(), "Layer"),
        r"keep_frist\. apply_checkpointing takes .*policy, .*keep_last, .*chunks, dim, .* Write keep_first for keep_frist": (
            lambda: apply_checkpointing(block, "", keep_frist=1)
        ),
        r"chunk\. With .* takes (?!.*\b(\w+), .*\b\1,).*replay_whole, chunks, dim, .* Write chunks for chunk": (
            lambda: checkpoint_module(nn.Tanh(), recorded=True, chunk=1)
        ),
        r"every_n\. enable_in_transformers takes .*every_n_layers, .*keep_last, .*early_stop": lambda: enable_in_transformers(
            fake.Model(), every_n=2
        ),
        "chunks. enable_in_transformers takes": lambda: enable_in_transformers(fake.Model(), chunks=2),
        "name. apply_checkpointing, for '0', takes": lambda: apply_checkpointing(two_blocks(), {"0": {"name": "first"}}),
        "leave no region: 2 modules": lambda: apply_checkpointing(two_blocks(), ["0", "1"], keep_first=1, keep_last=1),
        "leave no region: 1 modules": lambda: apply_checkpointing(two_blocks(), ["0"], keep_last=1),
        "does not support the checkpointing switch": lambda: enable_in_transformers(fake.Unsupported()),
        "switches nothing on": lambda: enable_in_transformers(fake.NothingToSwitch()),
        "cannot select layers": lambda: enable_in_transformers(fake.StackModel(), every_n_layers=2),
        r"TorchCaller calls torch\.utils\.checkpoint itself. Call .*patch_torch": lambda: enable_in_transformers(
            fake.TorchCaller()
        ),
        "chunked_loss should be a positive integer": lambda: enable_in_transformers(fake.CausalModel(), chunked_loss=0),
        "Model has no output embedding. Leave": lambda: enable_in_transformers(fake.Model(), chunked_loss=True),
        "Early has a loss that cannot be set": lambda: enable_in_transformers(Early(), chunked_loss=True),
        "CausalModel has the loss mse_loss": lambda: enable_in_transformers(other_loss(fake.CausalModel()), chunked_loss=True),
        "policy, every_n_layers, preserve_buffers cannot be used with plan": lambda: enable_in_transformers(
            fake.Model(), plan=3, policy=[], every_n_layers=2, preserve_buffers=False
        ),
        "policy, every_n_layers, preserve_buffers cannot be used with memory_budget": lambda: enable_in_transformers(
            fake.Model(), memory_budget=3, policy=[], every_n_layers=2, preserve_buffers=False
        ),
        "every_n_layers should be a positive integer": lambda: enable_in_transformers(fake.Model(), every_n_layers=0),
        # Reports and plans
        "device should be one of cpu, but got 'cuda:0'": lambda: memory_ledger(lambda: torch.ones(2)).on("cuda:0"),
        "compare got no ledgers": compare,
        "device should be a device type without an index, but got 'gpuu'": (
            lambda: ckpt_hooks.DefaultDeviceType.set_device_type("gpuu")
        ),
        "No blocks were found": lambda: planned(model=nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
        "blocks='dots_saveable' selects .* Write a module's": lambda: planned(blocks="dots_saveable"),
        "No blocks were found in Seq": lambda: planned(model=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), chunks={"0": (1, 2)}),
        "Block '1.0' is inside of block '1'": lambda: planned(blocks=["1", "1.*"]),
        "memory_budget should be a fraction from 0.0 to 1.0, but got 2.0": lambda: planned(budget=2.0),
        "memory_budget should be a number of bytes, .* but got -3": lambda: planned(budget=-3),
        r"plan should be an object with blocks, budget": lambda: Plan.from_json({"version": 1}),
        "blocks=.* selects no module": lambda: planned(blocks=""),
        "blocks has a policy for '0'.*Write None in place of it": lambda: planned(blocks={"*": "dots_saveable"}),
        "chunks='lost' selects no module.*Write a module's name, such as '0'": lambda: planned(chunks={"lost": (1, 8)}),
        r"chunks should be modules inside or outside of blocks, .* but got \['0', '1'\].*Name modules inside": lambda: planned(
            chunks={"*": (1, 2)}
        ),
        r"chunks should be modules inside or outside of blocks, .* but got \['1'\].* or pass other blocks": lambda: planned(
            chunks={"*": (1, 2)}, blocks=["1"]
        ),
        "plan should be a plan whose `others` have no `others`, but got": lambda: Plan.from_json(nested()),
        "rows. chunks takes chunks, dim": lambda: planned(chunks={"0": {"chunks": (1, 2), "rows": 1}}),
        "The step ran no backward": lambda: planned(step=lambda model: model(torch.ones(2, 4))),
        "never calls '1'": lambda: planned(step=lambda model: backward(model[0](torch.ones(2, 4))), blocks=["1"]),
        r"cost should be one of \('operations', 'seconds'\), but got 'dollars'": lambda: planned(cost="dollars"),
        "without memory": lambda: planned(model=nn.LazyLinear(4)),
        "The model of this plan is gone": lambda: planned(blocks=["1"]).apply(),
        "cost should be a value for fake tensors, but got 'seconds'": lambda: planned(cost="seconds", dry_run=True),
        "The step calls aten.nonzero.default": lambda: planned(
            lambda model: backward(model(torch.ones(2, 4))[torch.ones(2).nonzero()]), dry_run=True
        ),
        "memory_budget should be bytes, or a fraction from 0.0 to 1.0, but got 'auto'": lambda: planned(budget="auto"),
        "This plan has no profile": lambda: Plan.from_json(planned(blocks=["1"]).to_json()).pareto(),
    },
    BudgetTooSmallError: {
        r"No plan fits 1 bytes: the least peak .*, outside of any block, in backward of 0 Linear\.": lambda: planned(
            budget=1, blocks=["1"]
        ),
        "of which margin leaves 10.0% free": lambda: planned(budget=1, blocks=["1"], margin=0.1),
        "The tightest plan does not fit": lambda: guarded(lambda model: backward(model(torch.ones(2, 4)))),
    },
    RuntimeError: {
        "a plan or an estimate would run inside of region 'block'.*outside of regions": lambda: within_a_region(planned),
        "would run inside of region 'block', and the region changes": lambda: within_a_region(
            lambda: ckpt_hooks.estimate_memory(block, lambda model: None)
        ),
        "The guard is not entered": lambda: planned(model=GUARDED).guard(GUARDED)(len, ()),
        "context_fn suppressed an exception": lambda: with_contexts((suppressing(), noop_context_fn()[0]), lambda x: 1 / 0),
        "lacks the parameter gradient_checkpointing_func": lambda: enable_in_transformers(fake.OldModel()),
        "already a region, made by enable_in_transformers": lambda: enable_in_transformers(enabled(enable_in_transformers)),
        "a region, made by apply_checkpointing": lambda: enable_in_transformers(enabled(apply_checkpointing, "layers.*")),
    },
    CheckpointError: {
        "reaches lazy modules": lambda: checkpoint(debug=True)(Lazy())(leaf(2, 3)),
    },
    ReferenceError: {"holds its module weakly": lambda: checkpoint_module(nn.Tanh()).forward(x)},
    AttributeError: {"no attribute 'nothing'": lambda: ckpt_hooks.nothing},
    UserWarning: {
        r"check_rows could not compare rows: 'rand_like' draws": lambda: chunked(torch.rand_like, check_rows=True),
        r"<dots_saveable: .*> of region 'inner' spares nothing: region 'outer' .*`recorded=True`": policy_in_a_plain_region,
        r"The forward of '1', a Sequential, was replaced .*`del module\.forward`": lambda: wrapped_after(two_blocks(), "1"),
        "under a torch.func transform": lambda: torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(torch.rand(3)),
        "names operators that none of the first 3 regions under it had": lambda: [
            checkpoint(policy=[ERFINV])(torch.sin)(leaf(3)) for _ in range(3)
        ],
        "names tensors that none .* had: hidden. Name a tensor by checkpoint_name": lambda: [
            named_region(policy) for policy in [save_only_these_names("hidden")] * 3
        ],
    },
}


def without_lock(**of_sys: Any) -> None:
    """Imports the package where ``sys`` says that Python is free-threaded."""
    with mock.patch.multiple(sys, create=True, **of_sys):
        runpy.run_path(ckpt_hooks.__file__)


CALLS[ImportError] = {
    "does not support free-threaded Python.*default build": lambda: without_lock(version="3.14.0 free-threading build"),
    "reference counts which saved tensors are still needed": lambda: without_lock(_is_gil_enabled=lambda: False),
}
CALLS[ValueError]["level should be 'error', 'warn' or False, but got 'none'"] = lambda: ckpt_hooks.set_self_check("none")

TABLE |= {phrase: Row(program, TypeError, (phrase,)) for phrase, program in FUNCTIONS.items()}
TABLE |= {phrase: Row(program, kind, (phrase,)) for kind, calls in CALLS.items() for phrase, program in calls.items()}

#: Parts of messages that are provoked elsewhere, and the tests which do.
NOT_PROVOKED = {
    "ckpt_hooks works with ": "tests/test_packaging.py::test_other_versions_of_torch",
    "saved-tensor hooks as they are since 2.11": "tests/test_packaging.py::test_other_versions_of_torch",
    "ckpt_hooks is tested with ": "tests/test_packaging.py::test_other_versions_of_torch",
    "was called in a region by a name bound to": "tests/test_kernels.py::test_a_call_by_an_early_name_is_seen",
    "a kernel of the custom function": "tests/test_kernels.py::test_a_device_is_not_waited_for",
    "CKPT_HOOKS_SELF_CHECK": "tests/test_self_check.py::test_the_environment_sets_the_level",
    "ran while a CUDA graph is being captured": "tests/test_graph_capture.py::test_a_function_region_says_what_to_do",
    "torch forbids reading": "tests/test_graph_capture.py::test_a_random_operator_in_a_recorded_region_says_what_to_do",
    "failed while the ranks planned together": "tests/planner/test_ranks.py::test_a_rank_fails_in_apply",
    "the timeout of the process group. All ranks": "tests/planner/test_ranks.py::test_a_rank_which_never_comes",
    "Ranks that plan together have to run the same": "tests/planner/test_ranks.py::test_ranks_that_differ",
}


@functools.cache
def said(name):
    """Returns the error or warning in which a program ends."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            TABLE[name].program()
        except Exception as error:
            return error.with_traceback(None)
    assert len(caught) == 1, f"{name} was to end in one error or warning"
    return caught[0].message


# The form of messages

#: What is written with dots and colons though it is no end of a sentence: code, names, what is in brackets.
_CODE = re.compile(
    r"`[^`]*`|'[^']*'|\"[^\"]*\"|\([^()]*\)|<[^<>]*>|\w*\[[^\[\]]*\](\.\w+)*"
    r"|\w+\.py:\d+|\b(torch|ckpt_hooks|aten|contextlib|functools|policies|autograd|ctx|plan|CheckpointPolicy)(\.\w+)+"
)
#: What a message tells its reader to do.
_FIX = re.compile(
    r"\b(bind|call|change|compile|enter|exchange|fill|give|hand|have|leave|let|make|modify|name|pack|pass|print|put|read|report|return|run"
    r"|select|step|store|take|track|update|use|write|apply|keep|come)\b",
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


@pytest.mark.parametrize("name", TABLE)
def test_a_message(name):
    """Its class, fields and phrases; it is well formed, and names its region and what to do."""
    error, row = said(name), TABLE[name]
    text = str(error)
    assert type(error) is row.kind
    for phrase in row.phrases:
        assert re.search(phrase, text, re.DOTALL), text
    assert not row.without or not re.search(row.without, text), text
    assert {field: getattr(error, field) for field in row.fields} == row.fields
    assert_well_formed(text if "Operators around it in" not in text else text.rpartition("\n\n")[2])
    assert not text.startswith((" ", "\n"))
    if isinstance(error, CheckpointError) and row.fields.get("region") != ():
        assert error.region
        assert f"region {'/'.join(error.region)!r}" in text
    if row.kind is not AttributeError:  # which Python writes
        assert text.endswith(".")
        assert _FIX.search(text), text


def takes_a_tensor(tensor, ctx, op, *args, **kwargs):
    yield tensor


SECRET = torch.full((2,), 1234.5)
HOLDERS = {
    "a dict": {"x": [SECRET]},
    "a partial": functools.partial(takes_a_tensor, SECRET),
    "a parameter": (3, [nn.Parameter(SECRET)]),
    "an object": types.SimpleNamespace(x=SECRET),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    "call",
    [
        lambda value: checkpoint(block, x, determinism_check=value),
        lambda value: checkpoint(block, x, debug=value),
        lambda value: apply_checkpointing(block, value),
        lambda value: checkpoint_chunks(torch.sin, value),
        lambda value: with_contexts((value,)),
        lambda value: with_contexts((contextlib.nullcontext(), value)),
        lambda value: save_ops(value),
        lambda value: checkpoint(functools.partial(takes_a_tensor, value), None, MM)(x),
        lambda value: policies.save_from_both_policies(value, 3),
        lambda value: plan_memory(block, lambda model: None, value),
        lambda value: Plan.from_json({"version": value}),
    ],
)
def test_messages_have_no_contents_of_tensors(call, holder):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(HOLDERS[holder])
    assert "1234" not in str(caught.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_calls_are_noticed_without_gradients(name):
    """And have no cause of their own."""
    with torch.no_grad(), pytest.raises(TABLE[name].kind) as caught:
        TABLE[name].program()
    assert str(caught.value) == str(said(name))
    assert caught.value.__cause__ is None


def parts_of(node):
    """Returns what is written out of the text that an expression makes, in order."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if isinstance(node, ast.JoinedStr):
        return tuple(part for value in node.values if isinstance(value, ast.Constant) for part in parts_of(value))
    return ()


def occurs(parts, text):
    """Whether all parts of a message are in a text, in order."""
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def trees() -> Iterator[tuple[str, ast.AST]]:
    root = Path(ckpt_hooks.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), ast.parse(path.read_text())


def messages():
    """Returns where each message is, by what is written out of it: what is given to errors in the code, and rows of tables."""
    found = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called.endswith("Error") or called in ("_error", "warn"):
                    found.update((parts_of(argument), f"{path}:{node.lineno}") for argument in node.args[:2])
                if called == "wrong" or called.startswith("check"):
                    found.update((parts_of(argument), f"{path}:{node.lineno}") for argument in node.args[1:])
    for row in (*Why, *_HowChanged, *Misuse):
        text = row.value if isinstance(row, Misuse) else "{}".join(row.value[:2])
        found[tuple(re.split(r"\{[^}]*\}", text))] = str(row)
    return {parts: place for parts, place in found.items() if len("".join(parts)) >= 20}


def test_no_message_is_left_out():
    """Every message in the code is provoked here, or by a test that is named above."""
    provoked = [str(said(name)) for name in TABLE]
    left_out = [
        place
        for parts, place in messages().items()
        if not any(occurs(parts, text) for text in provoked) and not any(part in "".join(parts) for part in NOT_PROVOKED)
    ]
    assert left_out == []
    assert [test for test in NOT_PROVOKED.values() if not is_a_test(test)] == []


def test_no_text_in_the_code_runs_together():
    """Not in the texts that no row reaches either; docstrings aside."""
    for path, tree in trees():
        nodes = list(ast.walk(tree))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                for line in node.value.split("\n") if node.value.count(" ") >= 3 else ():
                    assert "  " not in line.strip(" "), f"{path}: {line}"
                    assert not re.search(r"[a-z)'`\]][.?!][A-Z]", _CODE.sub(" code ", line)), f"{path}: {line}"


# What some do not say


def test_an_error_of_a_region_that_brings_back_arguments_of_another_is_told_once():
    assert str(said("a_region_inside_whose_argument_is_of_another_shape")).count("was saved by") == 1


# What to do, followed


class Marked(nn.Module):
    """Counts its operators: with a policy kept, a rerun has fewer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 4)}) for _ in range(2))
        for layer in self.layers:
            layer.forward = lambda x, layer=layer: layer["mlp"](layer["attn"](x).sin()).sin()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def products_again(select, **options):
    """Returns how many products a step runs besides those of a plain one."""
    counts = []
    for chosen in (None, select):
        model = Marked()
        with apply_checkpointing(model, chosen, **options) if chosen else contextlib.nullcontext(), CountOps() as ops:
            model(leaf(2, 4).float()).sum().backward()
        counts.append(ops.counts["addmm"])
    return counts[1] - counts[0]


def budget_of_an_optimizer(foreach):
    torch.manual_seed(0)
    model, data = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))), torch.ones(2, 64)
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)

    def step(model):
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model)
    try:
        plan_memory(model, step, 1, blocks="*")
    except BudgetTooSmallError as error:
        return error
    return None


POLICY = "def policy(ctx, op, *args, **kwargs):\n    return CheckpointPolicy.PREFER_RECOMPUTE"
SELECT = "def select(name, module):\n    return isinstance(module, nn.Tanh)"


def defined(text, name):
    found = {"CheckpointPolicy": CheckpointPolicy, "nn": nn}
    exec(text, found)
    return found[name]


#: What is wrong, the words of the message that say what to do, and that done.
FIXES = {
    "a policy of another signature": (
        lambda: checkpoint(policy=lambda op: True),
        re.escape(POLICY.partition("\n")[0]),
        lambda: checkpoint(policy=defined(POLICY, "policy"))(block)(x),
    ),
    "a selector of another signature": (
        lambda: apply_checkpointing(two_blocks(), lambda module: True),
        re.escape(SELECT.partition("\n")[0]),
        lambda: apply_checkpointing(two_blocks(), defined(SELECT, "select")).regions[0].name == "1.1",
    ),
    "a budget below that of an optimizer": (
        lambda: raises(budget_of_an_optimizer(True)),
        "in the optimizer. Raise the budget, or pass an optimizer that needs less: without `foreach`",
        lambda: budget_of_an_optimizer(False).minimum < budget_of_an_optimizer(True).minimum,
    ),
}


def raises(error):
    raise error


@pytest.mark.parametrize("name", FIXES)
def test_what_a_message_says_to_do(name):
    wrong, words, right = FIXES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrong()
        except (TypeError, ValueError) as error:
            text = str(error)
        else:
            text = str(caught[0].message)
    assert re.search(words, text, re.DOTALL), text
    result = right()
    assert result is not False
    if isinstance(result, torch.Tensor):
        assert torch.equal(result, block(x))


def test_integers_of_numpy_are_integers():
    numpy = pytest.importorskip("numpy")
    two = numpy.int64(2)
    assert save_every(MM, two)._n == every(two).n == 2
    assert planned(blocks=["1"], budget=numpy.int64(10**9)).budget == 10**9
    assert checkpoint_sequential([block, nn.Tanh()], two, x).shape == x.shape
    assert len(enable_in_transformers(fake.Model(), every_n_layers=two).regions) == 3


def test_a_star_is_what_is_below_the_model():
    """In plans too, where the model itself is no block even by its class."""
    for star in ("*", ["*"]):
        assert [one.name for one in apply_checkpointing(two_blocks(), star)] == ["0", "1"]
        assert [one.name for one in planned(blocks=star).blocks] == ["0", "1"]
    assert [one.name for one in apply_checkpointing(two_blocks(), "")] == [""]
    assert [one.name for one in planned(blocks=nn.Sequential).blocks] == ["1"]


def test_a_policy_in_a_plain_region_is_told_of_once():
    policy_in_a_plain_region_once = functools.partial(
        products_again, {"layers.*.attn": {"policy": policies.dots_saveable}, "layers.*": {}}
    )
    recorded._has_warned = False
    with pytest.warns(UserWarning, match=r"region 'layers\.0\.attn' spares nothing: region 'layers\.0' ") as caught:
        assert policy_in_a_plain_region_once() == products_again("layers.*") > 0
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy_in_a_plain_region_once()
        recorded._has_warned = False
        products_again({"layers.*.attn": {"policy": policies.nothing_saveable}, "layers.*": {}})
        products_again({"layers.*.attn": {"policy": policies.dots_saveable}})
        products_again({"layers.*.attn": {"policy": policies.dots_saveable}, "layers.*": {}}, recorded=True)


# The classes


def test_the_tree_of_exceptions():
    """Code that catches torch's ``CheckpointError`` catches ours; each class has one base. Names and docstring are complete."""
    assert CheckpointError.__bases__ == (torch.utils.checkpoint.CheckpointError,)
    assert torch.utils.checkpoint.CheckpointError.__bases__ == (RuntimeError,)
    for kind in (DeterminismError, MutationError, OverlapError, InternalError):
        assert kind.__bases__ == (CheckpointError,)
    names = ckpt_hooks.errors.__all__
    assert names == sorted(names)
    for name in names:
        assert getattr(ckpt_hooks, name) is getattr(ckpt_hooks.errors, name)
        assert name in ckpt_hooks.__all__
        assert f"── {name}  " in ckpt_hooks.errors.__doc__


def test_fields_may_be_given_by_name_only():
    with pytest.raises(TypeError):
        CheckpointError("message", ("region",))
    assert CheckpointError("message").region == ()
    assert CheckpointError("message").args == ("message",)


class CustomError(DeterminismError):
    """An error of somebody else's, with a field more."""

    def __init__(self, message: str, *, extra: int, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.extra = extra


ERRORS = [name for name, row in TABLE.items() if issubclass(row.kind, (CheckpointError, BudgetTooSmallError))]


def copies_of(error):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(error, protocol))
    yield copy.copy(error)
    yield copy.deepcopy(error)


@pytest.mark.parametrize("name", [*ERRORS, "a subclass", "a note"])
def test_copies_have_type_message_and_fields(name):
    """An error that a worker process raised arrives as it was, and its fields are plain values, which any log can take."""
    if name in TABLE:
        error = said(name)
    elif name == "a note":
        error = CheckpointError("message")
        error.__notes__ = ["a note"]  # what ``add_note`` does, which Python 3.10 does not have
    else:
        error = CustomError("more", extra=7, region=(), index=0, expected="1", found="2")
    for back in copies_of(error):
        assert back is not error
        assert type(back) is type(error)
        assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))
    for field, value in vars(error).items():
        assert field == "__notes__" or isinstance(value, str | int | tuple | None)
        assert all(isinstance(part, str) for part in (value if isinstance(value, tuple) else ()))


@pytest.mark.parametrize("name", ERRORS)
def test_no_tensor_can_be_reached_from_an_error(name):
    """An error that is kept keeps no activation: neither fields nor causes nor anything in them is or holds a tensor."""
    one = said(name)
    todo, seen = [one], {}
    while one is not None:  # the frames that it passed hold whatever their functions do
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type | types.ModuleType):
            continue
        seen[id(value)] = value
        todo += gc.get_referents(value)
    assert not [value for value in seen.values() if isinstance(value, torch.Tensor)]
    assert len(seen) < 100


@pytest.mark.usefixtures("no_gc")
def test_what_was_refused_is_let_go():
    x = torch.rand(3)
    reference = weakref.ref(x)
    message = ""
    try:
        checkpoint(x, scaled)
    except TypeError as error:
        message = str(error)
    del x
    assert "takes a function first" in message
    assert reference() is None


# Right calls beside the wrong ones


def test_calls_that_are_right():
    x = leaf(3)
    checkpoint(lambda: x.sin()).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert checkpoint(lambda x=x, **others: x) is x
    assert checkpoint(dict) == {}
    assert checkpoint(scaled, x, use_reentrant=False).shape == (3,)
    for form in (checkpoint, checkpoint_region):
        assert torch.equal(form(policy=policies.dots_saveable)(scaled)(x, scale=3), scaled(x, scale=3))


# Policies


def test_policies_that_are_some():
    def counted(count, ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE

    everything = [lambda *args: CheckpointPolicy.MUST_SAVE, functools.partial(counted, 1), types.MethodType(counted, 1)]
    for policy in ([MM], {MM}, policies.dots_saveable, *everything):
        checkpoint(policy=policy)
        checkpoint_region(policy=policy)
