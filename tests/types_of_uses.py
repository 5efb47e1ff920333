"""Right and wrong uses, a line each: type checkers refuse what raises, and accept what runs. See ``test_types_of_uses``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpt_hooks import (
    CheckpointPolicy,
    apply_checkpointing,
    checkpoint,
    checkpoint_chunks,
    checkpoint_loop,
    checkpoint_module,
    checkpoint_region,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    every,
    patch_torch,
    plan_memory,
    span,
)
from ckpt_hooks.losses import chunked_cross_entropy
from ckpt_hooks.modules import SelectLike
from ckpt_hooks.planner import Plan
from ckpt_hooks.policies import (
    Policy,
    PolicyLike,
    dots_saveable,
    save_every,
    save_from_both_policies,
    save_indices,
    save_modules,
    save_only_these_names,
    save_ops,
)


class Block(nn.Sequential):
    """A layer."""


def net() -> nn.Sequential:
    return nn.Sequential(*(Block(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def scaled(x: torch.Tensor, n: int, *, scale: float = 1.0) -> torch.Tensor:
    return x * n * scale


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


def keeps(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def is_first(name: str, module: nn.Module) -> bool:
    return name == "0"


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


addmm, packet, flex = torch.ops.aten.addmm.default, torch.ops.aten.addmm, torch.ops.higher_order.flex_attention
x = torch.ones(2, 4, requires_grad=True)
linear = nn.Linear(4, 4)

# Calls
y: torch.Tensor = checkpoint(scaled, x, 2)
y = checkpoint(scaled, x, 2, scale=0.5)
y = checkpoint(scaled, x, 2, scale=0.5, use_reentrant=False, debug=True)
y = checkpoint(torch.cat, [x, x], dim=0)
z: Any = checkpoint(linear, x)
y = checkpoint(name="scaled")(scaled)(x, 2)
y = checkpoint(scaled, x, 2, determinism_check="values")
y = checkpoint(scaled, x, 2, determinism_check=torch.sum)
pair: tuple[torch.Tensor, torch.Tensor] = checkpoint_chunks(both, x)
y = checkpoint_chunks(lambda part: (part.sum(), 1), x, chunk_size=1, reduce="mean")
y = checkpoint_loop(torch.sin, x, 3, slots=2)
state, outputs = checkpoint_loop(lambda h, row: (h * row, h), x, xs=[1, 2])
pair = checkpoint_sequential((torch.sin, torch.cos, both), 2, x)
z = checkpoint_sequential([torch.sin, both], 2, x)
z = checkpoint_sequential(net(), 2, x)
z = checkpoint_sequential(iter([torch.sin, torch.cos]), 2, x)
y = chunked_cross_entropy(x, linear.weight, torch.tensor([1, 2]), reduction="sum")
chunked_cross_entropy(x, linear.weight, torch.tensor([1, 2]), reduction="median")  # wrong
checkpoint(scaled, x, 2, determinism_check="wrong")  # wrong
checkpoint_chunks(torch.sin, x, reduce="wrong")  # wrong
checkpoint_loop(torch.sin, x, n="wrong")  # wrong
checkpoint(scaled, x, "wrong")  # wrong
checkpoint(scaled, x)  # wrong
checkpoint(scaled, x, 2, scale="wrong")  # wrong
checkpoint(scaled, x, 2, debug="wrong")  # wrong
checkpoint_sequential([torch.sin, 3], 2, x)  # wrong
checkpoint_sequential({torch.sin}, 1, x)  # wrong
checkpoint_sequential([torch.sin], 1, x, debug=True)  # wrong

# Policies
operators = [addmm]
policy: PolicyLike = "nothing_saveable"
y = checkpoint(policy=policy)(linear)(x)
y = checkpoint(policy=dots_saveable)(linear)(x)
y = checkpoint(policy=[addmm, flex])(linear)(x)
y = checkpoint(policy=operators)(linear)(x)
y = checkpoint(policy=(addmm,))(linear)(x)
y = checkpoint(policy={addmm})(linear)(x)
y = checkpoint(policy=keeps)(linear)(x)
y = checkpoint(policy=lambda ctx, op, *args, **kwargs: op is addmm)(linear)(x)
region = checkpoint_region(policy="dots_saveable")
block = checkpoint_module(Block(), policy=save_ops(addmm, [flex]), early_stop=False)
patch_torch(policy="attention_saveable").undo()
create_selective_checkpoint_contexts([])
create_selective_checkpoint_contexts("dots_saveable")
save_from_both_policies("dots_saveable", save_every(addmm, 2))
save_from_both_policies([addmm], lambda ctx, op, *args, **kwargs: True)
save_only_these_names("hidden", ["scores"])
save_modules("self_attn", Block, ["mlp", nn.Linear])
save_indices([("", addmm, 0)], counts={("", addmm): 1})
checkpoint(policy="dots_savable")  # wrong
checkpoint(policy=3)  # wrong
checkpoint(policy=save_ops)  # wrong
checkpoint(policy=Block)  # wrong
checkpoint(policy=[packet])  # wrong
checkpoint(policy=["aten.addmm.default"])  # wrong
checkpoint(policy=[torch.addmm])  # wrong
checkpoint(policy=lambda op: True)  # wrong
checkpoint(policy=torch.sin)(torch.sin)(x)  # wrong
checkpoint_region(policy="dots")  # wrong
checkpoint_region(dots_saveable)  # wrong
checkpoint_module(Block(), policy={"dots_saveable": True})  # wrong
patch_torch(policy=True)  # wrong
create_selective_checkpoint_contexts(None)  # wrong
save_from_both_policies("dots_saveable", None)  # wrong
save_ops(packet)  # wrong
save_every("aten.addmm.default", 2)  # wrong
save_only_these_names(3)  # wrong
save_modules(torch.Tensor)  # wrong
save_indices([("", packet, 0)])  # wrong

# Selections
of_names: dict[str, Policy] = {"0": dots_saveable}
of_classes = {Block: dots_saveable}
names, numbers, classes = ["0", "1"], [0, 1], [Block, nn.Conv2d]
select: SelectLike = slice(1, 3)
apply_checkpointing(net(), select)
apply_checkpointing(net(), "*", policy="dots_saveable", keep_last=1)
apply_checkpointing(net(), names)
apply_checkpointing(net(), numbers)
apply_checkpointing(net(), classes)
apply_checkpointing(net(), Block)
apply_checkpointing(net(), (Block, nn.Conv2d))
apply_checkpointing(net(), {"0", "1"})
apply_checkpointing(net(), range(2))
apply_checkpointing(net(), [0, "1", slice(2, 3), range(3, 4)])
apply_checkpointing(net(), [nn.Tanh, -1])
apply_checkpointing(net(), every(2))
apply_checkpointing(net(), every(2, of=range(1, 4)))
apply_checkpointing(net(), every(2, of=[nn.Tanh]))
apply_checkpointing(net(), span("0", "1"), policy=[addmm])
apply_checkpointing(net(), [span("0", "1"), "2"])
apply_checkpointing(net(), is_first)
apply_checkpointing(net(), lambda name, module: isinstance(module, nn.Tanh))
apply_checkpointing(net(), of_names)
apply_checkpointing(net(), of_classes)
apply_checkpointing(net(), {Block: "dots_saveable"})
apply_checkpointing(net(), {0: None, "1.*": dots_saveable, range(2, 3): [addmm], span("2", "3"): keeps, nn.Tanh: None})
apply_checkpointing(net(), {"0": {"policy": "dots_saveable", "recorded": True}, "1": None, "2": {"chunks": 2}})
apply_checkpointing(net(), "*", chunks=2, dim=0, early_stop=False)
apply_checkpointing(net(), 3)  # wrong
apply_checkpointing(net(), 3.5)  # wrong
apply_checkpointing(net())  # wrong
apply_checkpointing(net(), [3.5])  # wrong
apply_checkpointing(net(), [every(2)])  # wrong
apply_checkpointing(net(), [addmm])  # wrong
apply_checkpointing(net(), dots_saveable)  # wrong
apply_checkpointing(net(), torch.Tensor)  # wrong
apply_checkpointing(net(), lambda name: True)  # wrong
apply_checkpointing(net(), {3.5: None})  # wrong
apply_checkpointing(net(), {"0": 3})  # wrong
apply_checkpointing(net(), {Block: "dots_savable"})  # wrong
apply_checkpointing(net(), "*", policy=3)  # wrong
apply_checkpointing(net(), "*", "dots_saveable")  # wrong
apply_checkpointing(net(), "*", margin=0.03)  # wrong
apply_checkpointing(net(), every(2, of=every(2)))  # wrong
apply_checkpointing(net(), "*", early_stopp=False)  # wrong
apply_checkpointing(net(), "*", chunks="2")  # wrong
checkpoint_module(Block(), determinism_check="wrong")  # wrong
checkpoint_module(Block(), debug="wrong")  # wrong

# Plans
model = net()
plan = plan_memory(model, step, 0.5, blocks=slice(0, 4), cost="operations")
plan_memory(net(), step, 1.0, blocks=[0, "1", range(2, 4)], chunks={"0.0": (1, 2)})
plan_memory(net(), step, 1.0, blocks={Block: None}, chunks={nn.Tanh: {"chunks": (1,)}})
again = Plan.from_json(plan.to_json()).replan(0.5, step, model)
guard = again.guard(limit="1GiB")
with apply_checkpointing(model, memory_budget="1 GiB", margin=0.03, plan=plan) as applied:
    values: dict[str, Any] = applied.to_json()
apply_checkpointing(model, Block, memory_budget=0.5, plan=values).undo()
plan_memory(net(), step, 0.5, blocks=3)  # wrong
plan_memory(net(), step, 0.5, blocks=[None])  # wrong
plan_memory(net(), step, 0.5, cost="dollars")  # wrong
plan_memory(net(), step, 0.5, chunks={"0": 2})  # wrong
plan_memory(net(), step, 0.5, group="gloo")  # wrong
apply_checkpointing(net(), memory_budget=0.5, plan=3)  # wrong
apply_checkpointing(net(), memory_budget=0.5, plan=applied)  # wrong
apply_checkpointing(net(), memory_budget=0.5, cost="dollars")  # wrong
apply_checkpointing(net(), memory_budget=0.5, policy="dots_saveable")  # wrong
