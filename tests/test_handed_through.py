"""Rule 9 for tensors that are kept as they are: no graph owns itself by way of one. The garbage collector is off.

An operator may save its own result. What stands for that in the graph is owned by the operator's node. Where it is the result
itself, with its history, the two own each other, and a forward without backward stays in memory for good.
"""

from __future__ import annotations

import weakref

import pytest
import torch

from ckpt_hooks import checkpoint, checkpoint_region, policies
from ckpt_hooks.offload import offload_saved_tensors
from tests.measure import SavesItsResult, Token, leaf

pytestmark = pytest.mark.usefixtures("no_gc", "one_thread")


class WritesToItsArgument(torch.autograd.Function):
    """The exponential function, in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.exp_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def row_in_place(x):
    y = x.clone()
    y[0].exp_()
    return y


def becomes_part_of_the_graph(x):
    mask = torch.ones_like(x).detach()
    y = x * mask
    mask.mul_(x)
    return y


FUNCTIONS = {
    "exp": lambda x: x.exp(),
    "softmax": lambda x: x.softmax(-1),
    "two results": lambda x: x.exp().sigmoid(),
    "in place": lambda x: (x * 1).exp_(),
    "in place on a row": row_in_place,
    "in place on a view": lambda x: x.clone().t().exp_(),
    "view of a result": lambda x: x.exp().t(),
    "custom": lambda x: SavesItsResult.apply(x * 1),
    "custom in place": lambda x: WritesToItsArgument.apply(x * 1),
    "in place on the argument": lambda x: x.exp_(),
    "mask": becomes_part_of_the_graph,
    "recurrent": lambda x: torch.nn.LSTM(4, 4, dtype=torch.float64)(x)[0],
    "lazy": lambda x: torch.nn.LazyLinear(4, dtype=torch.float64)(x.exp()),
}


def offloading(function, **options):
    def run(x):
        with offload_saved_tensors(**options):
            return function(x)

    return run


region, keeping = checkpoint_region, checkpoint(policy=policies.everything_saveable)
WRAPS = {
    "offload": lambda f: offloading(f),
    "offload all": lambda f: offloading(f, min_offload_size=0),
    "function": lambda f: checkpoint()(f),
    "function, values compared": lambda f: checkpoint(determinism_check="values")(f),
    "function, with logs": lambda f: checkpoint(debug=True)(f),
    "policy": lambda f: keeping(f),
    "function in a function": lambda f: checkpoint()(checkpoint()(f)),
    "recorded": lambda f: region()(f),
    "recorded in recorded": lambda f: region()(region()(f)),
    "recorded in a function": lambda f: checkpoint()(region()(f)),
    "function in recorded": lambda f: region()(checkpoint()(f)),
    "function in offload": lambda f: offloading(checkpoint()(f)),
    "policy in offload": lambda f: offloading(keeping(f)),
    "recorded in offload": lambda f: offloading(region()(f)),
    "offload in a function": lambda f: checkpoint()(offloading(f)),
    "offload in recorded": lambda f: region()(offloading(f)),
}


def hang_on_node(tensor):
    """Returns a weak reference that is dead when the node of a tensor is."""
    token = Token()
    tensor.grad_fn.metadata["token"] = token
    return weakref.ref(token)


@pytest.mark.parametrize("wrap", list(WRAPS))
def test_a_forward_without_backward_leaves_nothing(wrap):
    left = []
    for name, function in FUNCTIONS.items():
        h = leaf(4, 4) * 1
        y = WRAPS[wrap](function)(h)
        alive, result, argument = hang_on_node(y), weakref.ref(y), weakref.ref(h)
        assert alive() is not None
        del h, y
        if (alive(), result(), argument()) != (None, None, None):
            left.append(name)
    assert left == []


@pytest.mark.parametrize("wrap", [name for name in WRAPS if name.startswith("offload")])
def test_a_result_that_is_added_to_what_it_was_made_of(wrap):
    """Which is saved, and whose history is then that of the result as well."""
    h = leaf(4, 4) * 1
    y = WRAPS[wrap](lambda x: (x * 2).exp())(h)
    y.add_(h)
    alive = hang_on_node(y)
    del h, y
    assert alive() is None
