"""Mixtures of experts of Transformers whose routers sit on ties, with routes kept and without."""

from __future__ import annotations

import functools

import pytest
import torch

from ckpt_hooks import DeterminismError, checkpoint, checkpoint_region
from ckpt_hooks.policies import routing_saveable
from tests.measure import CountOps
from tests.test_routing import equal, ties  # noqa: F401 -- a fixture

transformers = pytest.importorskip("transformers")
try:
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral import modeling_mixtral  # noqa: F401
except Exception as error:  # parts of it come late, and need packages which may not fit
    pytest.skip(f"Transformers does not import its models: {error}", allow_module_level=True)

pytestmark = pytest.mark.integrations

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 1,
    "tie_word_embeddings": False,
}
MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def model_of(name, experts):
    """Returns a model whose routers have equal scores for their first and last experts."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, experts_implementation=experts, attn_implementation="eager").train()
    with torch.no_grad():
        for title, parameter in model.named_parameters():
            if title.endswith(("mlp.gate.weight", "router.weight", "router.bias")):
                parameter[3] = parameter[0]
    return model


def loss_of(model):
    tokens = torch.arange(12).view(2, 6)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def in_function(policy, function, *args, **kwargs):
    return checkpoint(policy=policy, debug=policy is None)(function)(*args, **kwargs)


def in_block(policy, function, *args, **kwargs):
    with checkpoint_region(policy=policy):
        return function(*args, **kwargs)


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("kind", [in_function, in_block])
def test_ties_are_broken_as_in_forward(ties, kind, name, experts):  # noqa: F811
    """With gradients of the program without regions, and no top-k a second time."""
    model = model_of(name, experts)
    expected = gradients(loss_of(model), model)
    assert len(expected) > 10
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=functools.partial(kind, routing_saveable))
    loss = loss_of(model)
    ties.last = True
    with CountOps() as ops:
        found = gradients(loss, model)
    assert equal(found, expected)
    assert ops.counts["topk"] == 0


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("kind", [in_function, in_block])
def test_without_the_policy_the_top_k_is_named(ties, kind, name):  # noqa: F811
    """Where each expert has its own rows, as in the default implementation for the CPU."""
    model = model_of(name, "eager")
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=functools.partial(kind, None))
    loss = loss_of(model)
    ties.last = True
    with pytest.raises(DeterminismError) as caught:
        loss.backward()
    assert caught.value.routing
