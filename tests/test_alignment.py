"""Random programs of which one run has operators that the other lacks: right, or an error; never another operator's output."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from ckpt_hooks import CheckpointPolicy, DeterminismError, checkpoint, is_recomputing, policies

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*names operators that did not run")

_UNARY = [
    torch.sin,
    torch.tanh,
    torch.exp,
    lambda a: a * 2,
    lambda a: a + 1,
    lambda a: a.t(),
    lambda a: a.sum(0, keepdim=True) + a,
]
_BINARY = [lambda a, b: a * b, lambda a, b: a + b, lambda a, b: a @ b]
_SAVED = [aten.mul.Tensor, aten.mm.default, aten.add.Tensor, aten.sin.default, aten.exp.default, aten.sum.dim_IntList]


def steps_from(draw, count):
    """Returns that many operators, each with where its inputs are, counted from the latest result."""
    return [
        (draw.choice(_UNARY), (draw.randrange(3),))
        if draw.random() < 0.5
        else (draw.choice(_BINARY), (draw.randrange(3), draw.randrange(3)))
        for _ in range(count)
    ]


def run_steps(steps, values):
    for operator, inputs in steps:
        values.append(operator(*(values[-1 - index % len(values)] for index in inputs)).clamp(-3, 3))
    return values[-1]


def policy_from(draw):
    saved = frozenset(draw.sample(_SAVED, draw.randint(1, 4)))
    answer = draw.choice([CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD])

    def policy(ctx, op, *args, **kwargs):
        return answer if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    counting = policies.save_every(draw.choice(_SAVED), draw.randint(1, 3))
    return draw.choice([policies.everything_saveable, policies.nothing_saveable, counting, policy, policy, policy])


def gradients(seed, kind, run):
    """Runs a random program with operators of some kind that one run has; returns its gradients."""
    draw = random.Random(seed)
    steps = steps_from(draw, draw.randint(3, 10))
    extras = [(draw.randrange(len(steps)), draw.random() < 0.5, steps_from(draw, draw.randint(1, 3))) for _ in range(2)]
    generator, tables = torch.Generator().manual_seed(seed), {}
    x, w, data, constant = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(4))
    x.requires_grad_()
    w.requires_grad_()

    def function(x):
        values = [w, data, x * w]
        for place, step in enumerate(steps):
            for number, (where, in_rerun, extra) in enumerate(extras):
                if where != place:
                    continue
                if kind == "logging":
                    if in_rerun == is_recomputing():
                        run_steps(extra, [data, constant])
                elif kind == "a table":
                    if number not in tables:
                        tables[number] = run_steps(extra, [constant, constant + 1])
                    values.append(values.pop() * tables[number])
                elif kind == "a table that is lost":
                    table = tables.pop(number, None)
                    if table is None:
                        table = run_steps(extra, [constant, constant + 1])
                        if in_rerun:
                            tables[number] = table
                    values.append(values.pop() * table)
                elif in_rerun == is_recomputing():
                    values.append(run_steps(extra, [value for value in values if value.requires_grad]))
            run_steps([step], values)
        return (values[-1] + x).sin()

    if kind == "a table that is lost":
        tables.update(
            (number, run_steps(extra, [constant, constant + 1])) for number, (_, lost, extra) in enumerate(extras) if lost
        )
    return torch.autograd.grad(run(function, x).sum() + w.sum(), (x, w))


@pytest.mark.parametrize(
    ("kind", "right"),
    [("logging", 111), ("a table", 120), ("a table that is lost", 120), ("something else", 1)],
)
@pytest.mark.slow
def test_random_programs(kind, right):
    """Tables and logging are passed over, mostly; what gradients flow through is an error, unless nothing comes of it."""
    outcomes = Counter()
    for seed in range(120):
        policy = policy_from(random.Random(seed))
        expected = gradients(seed, kind, lambda function, x: function(x))
        try:
            found = gradients(seed, kind, checkpoint_under(policy))
        except DeterminismError:
            outcomes["an error"] += 1
        else:
            assert all(map(torch.equal, found, expected)), f"seed {seed}"
            outcomes["right"] += 1
    assert outcomes["right"] == right


def checkpoint_under(policy):
    return lambda function, x: checkpoint(policy=policy)(function)(x)
