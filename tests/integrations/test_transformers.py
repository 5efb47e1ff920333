"""Transformers models: regions leave their training bitwise as it was, in no more memory than torch's checkpointing."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
from typing import Any, NamedTuple

import pytest
import torch

from ckpt_hooks import apply_checkpointing, enable_in_transformers, patch_torch
from ckpt_hooks.policies import dots_with_no_batch_dims_saveable
from tests.measure import Frames

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

VOCABULARY, LENGTH = 40, 12

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY, "pad_token_id": 0}
DECODER = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 1, "attention_dropout": 0.1, "max_position_embeddings": 64}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "output_router_logits": True}
BERT = {**SIZES, "intermediate_size": 24, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": VOCABULARY, "dropout": 0.1, "attention_dropout": 0.1,
    "activation_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def tokens(config):
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    return {"input_ids": ids, "labels": ids}


def encoder_tokens(config):
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    return {**tokens(config), "attention_mask": mask}


def image(config):
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def image_and_text(config):
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 8)), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def log_mel(config):
    return {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, VOCABULARY, (2, 6))}


def sound(config):
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(3, VOCABULARY, (2, 3))}


class Family(NamedTuple):
    """A model of random weights: its class, its configuration, a microbatch."""

    model: str
    config: str
    options: dict[str, Any]
    batch: Any = tokens

    def build(self):
        torch.manual_seed(1)
        config = getattr(transformers, self.config)(**self.options)
        config.use_cache = False  # the cache of plain training makes other strides, and so other last bits
        model = getattr(transformers, self.model)(config).train()
        return model, [self.batch(config) for _ in range(4)]


def family(model, options, batch=tokens, config=None):
    stem = model.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
    return Family(model, config or f"{stem}Config", options, batch)


SOUND = {
    **BERT, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "activation_dropout": 0.1,
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "feat_proj_dropout": 0.1, "final_dropout": 0.1, "ctc_zero_infinity": True,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
}  # fmt: skip

FAMILIES = {
    # Dense
    "llama": family("LlamaForCausalLM", DECODER),
    "qwen3": family("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "gpt2": family(
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY},
    ),
    "gpt_neox": family("GPTNeoXForCausalLM", {**DECODER, "hidden_dropout": 0.1}),
    "gemma3": family(
        "Gemma3ForCausalLM",
        {**DECODER, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        config="Gemma3TextConfig",
    ),
    "opt": family("OPTForCausalLM",
        {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "attention_dropout": 0.1, "max_position_embeddings": 32},
    ),
    # Mixture of experts
    "mixtral": family(
        "MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    ),
    "qwen2_moe": family(
        "Qwen2MoeForCausalLM", {**DECODER, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
    ),
    "gpt_oss": family(
        "GptOssForCausalLM",
        {**DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "deepseek_v3": family(
        "DeepseekV3ForCausalLM",
        {**DECODER, "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
    # State spaces and linear attention
    "mamba": family("MambaForCausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY}),
    "mamba2": family(
        "Mamba2ForCausalLM",
        {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2,
         "chunk_size": 4, "vocab_size": VOCABULARY},
    ),
    "qwen3_next": family(
        "Qwen3NextForCausalLM",
        {**DECODER, **EXPERTS, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16,
         "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    # Encoders
    "bert": family("BertForMaskedLM", BERT, encoder_tokens),
    "modernbert": family(
        "ModernBertForMaskedLM",
        {**SIZES, "intermediate_size": 24, "attention_dropout": 0.1, "mlp_dropout": 0.1, "embedding_dropout": 0.1,
         "local_attention": 4, "global_attn_every_n_layers": 2,
         "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
        encoder_tokens,
    ),
    # Encoders and decoders
    "bart": family("BartForConditionalGeneration", BART, encoder_tokens),
    "t5": family(
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY,
         "decoder_start_token_id": 0},
        encoder_tokens,
    ),
    # Vision
    "vit": family("ViTForImageClassification", {**BERT, **IMAGE}, image),
    "swin": family(
        "SwinForImageClassification",
        {**IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2,
         "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.1},
        image,
    ),
    "dinov2": family("Dinov2ForImageClassification", {**BERT, **IMAGE, "drop_path_rate": 0.1}, image),
    "clip": family(
        "CLIPModel",
        {"projection_dim": 8, "text_config": {**DECODER, "max_position_embeddings": 16, "eos_token_id": 2},
         "vision_config": {**IMAGE, **DECODER}},
        image_and_text,
    ),
    # Audio
    "whisper": family(
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        log_mel,
    ),
    "wav2vec2": family("Wav2Vec2ForCTC", SOUND, sound),
    "hubert": family("HubertForCTC", SOUND, sound),
}  # fmt: skip


dots = dots_with_no_batch_dims_saveable


def by_modules(model, **options):
    return apply_checkpointing(model, transformers.modeling_layers.GradientCheckpointingLayer, **options)


@contextlib.contextmanager
def by_patch(model):
    with patch_torch(), by_torch(model):
        yield


#: Ways to switch checkpointing on, as context managers.
FORMS = {
    "plain": enable_in_transformers,
    "recorded": functools.partial(enable_in_transformers, recorded=True),
    "policy": functools.partial(enable_in_transformers, policy=dots),
    "recorded policy": functools.partial(enable_in_transformers, recorded=True, policy=dots),
    "every second": functools.partial(enable_in_transformers, every_n_layers=2),
    "modules": by_modules,
    "patch": by_patch,
}


@contextlib.contextmanager
def by_torch(model, **options):
    """Transformers' own switch, on torch's engine."""
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False, **options})
    yield


class Result(NamedTuple):
    """What training leaves behind: each tensor and number by a name."""

    tensors: dict[str, torch.Tensor]
    losses: list[float]
    random_state: torch.Tensor


def trained(model, batches, optimizer=torch.optim.AdamW):
    """Trains for two steps of two microbatches each."""
    torch.manual_seed(2)
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, tensors = [], {}
    for step in range(2):
        for batch in batches[2 * step : 2 * step + 2]:
            loss = model(**batch).loss / 2
            loss.backward()
            losses.append(loss.item())
        for name, p in model.named_parameters():
            if p.grad is not None:
                tensors[f"step {step}, gradient of {name}"] = p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    tensors |= {
        f"value of {name}": value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    return Result(tensors, losses, torch.get_rng_state())


def assert_same(result, expected):
    assert result.losses == expected.losses
    assert result.tensors.keys() == expected.tensors.keys()
    assert [name for name, value in result.tensors.items() if not equal(value, expected.tensors[name])] == []
    assert torch.equal(result.random_state, expected.random_state)


def equal(a, b):
    """Whether two tensors are equal bit for bit, NaN included."""
    return torch.equal(a, b) or (a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


@functools.cache
def built(name):
    return FAMILIES[name].build()


@functools.cache
def reference(name):
    """What training without checkpointing leaves behind."""
    model, batches = built(name)
    result = trained(copy.deepcopy(model), batches)
    assert all(torch.isfinite(torch.tensor(result.losses)))
    return result


def attributes(model):
    """Returns what checkpointing has to do with, of the attributes of every module."""
    words = "checkpointing", "require_grads"
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if any(word in key for word in words)
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_training_is_bitwise_the_same(name, form):
    model, batches = built(name)
    model = copy.deepcopy(model)
    before, frames = attributes(model), Frames()
    with FORMS[form](model), frames:
        result = trained(model, batches)
    assert_same(result, reference(name))
    assert frames.frames  # it ran by this engine
    assert form == "patch" or attributes(model) == before


# The loss in slices


def of_words(name, adapted=False):
    """Returns a causal model without dropout, which draws other numbers in slices of a head, and a batch for 20 steps."""
    model, _ = built(name)
    model = copy.deepcopy(model)
    for module in model.modules():
        vars(module).update({key: 0.0 for key in ("attention_dropout", "dropout") if isinstance(vars(module).get(key), float)})
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if adapted:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.0, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    torch.manual_seed(4)
    return model, [tokens(None)] * 20


def losses_of(model, batches, **options):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for batch in batches:
        loss = model(**batch, **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("name", "adapted"),
    [*dict.fromkeys(["llama", "gpt2", "gpt_neox", "opt", "mixtral", "gpt_oss"], False).items(), ("llama", True)],
)
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 20}])
def test_losses_in_slices(name, adapted, options):
    """Twenty steps, also with adapters in the head."""
    model, batches = of_words(name, adapted)
    expected = losses_of(copy.deepcopy(model), batches, **options)
    with enable_in_transformers(model, chunked_loss=4):
        torch.testing.assert_close(losses_of(model, batches, **options), expected, rtol=1e-5, atol=0)
    assert expected[-1] < expected[0]


# Memory


def live_bytes(model, batch, switched_on):
    """Returns the bytes of tensors that a forward leaves, exactly, without copies of the random state.

    A recorded region has one such copy for each operator that drew, which is 5 KB on the CPU, 16 bytes on CUDA.
    """
    model, state, mark = copy.deepcopy(model), torch.get_rng_state().nbytes, 10_007
    with switched_on(model):
        for _ in range(4):  # makes what stays: gradients, caches, and the verdict that no forward writes to buffers
            model(**batch).loss.backward()
        gc.collect()
        gc.disable()
        try:
            with torch.autograd.profiler.profile(profile_memory=True) as profile:
                output = model(**batch)
                torch.empty(mark, dtype=torch.uint8)
                del output  # here, or the next profile meets its memory
        finally:
            gc.enable()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(nbytes for nbytes in sizes[: sizes.index(mark)] if abs(nbytes) != state)


#: Bytes that recorded regions, and so calls with a policy, hold besides: memory which a layer fills in parts (the order of
#: tokens by experts, the two halves of a key). A replay cannot make such memory anew.
FILLED_IN_PARTS = {"mixtral": 768, "qwen2_moe": 768, "gpt_oss": 768, "qwen3_next": 768, "deepseek_v3": 3456}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_leaves_no_more_than_with_torch(name, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    model, batches = built(name)
    measured = functools.partial(live_bytes, model, batches[0])
    plain, selective = measured(by_torch), measured(functools.partial(by_torch, context_fn=by_policy_of_torch))
    more = FILLED_IN_PARTS.get(name, 0)
    assert measured(FORMS["plain"]) == plain
    assert measured(FORMS["recorded"]) <= plain + more
    assert measured(FORMS["policy"]) <= selective + more
    assert measured(FORMS["recorded policy"]) <= selective + more
    assert plain + more < measured(contextlib.nullcontext)


def by_policy_of_torch():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


# What Transformers does besides


@pytest.mark.parametrize("form", ["plain", "recorded"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "bart", "t5", "whisper", "qwen3_next"])
def test_with_the_cache_on_as_by_default(name, form):
    model, batches = built(name)
    model = copy.deepcopy(model)
    model.config.use_cache = name != "gpt2"  # whose plain forward with a cache rounds otherwise than the one without, in 5.23
    expected = trained(copy.deepcopy(model), batches)
    model.config.use_cache = True
    with FORMS[form](model):
        assert_same(trained(model, batches), expected)


def test_generation_goes_on_as_before():
    model, _ = built("llama")
    model = copy.deepcopy(model)
    ids = torch.randint(3, VOCABULARY, (1, 4))
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    expected = model.eval().generate(ids, **options)
    with enable_in_transformers(model):
        assert torch.equal(model.generate(ids, **options), expected)


# Modules that call torch's checkpoint


# PEFT


@pytest.mark.parametrize("form", ["plain", "recorded", "policy"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_adapters_on_a_frozen_model(name, form):
    peft = pytest.importorskip("peft")
    model, batches = built(name)
    kind = peft.TaskType.SEQ_2_SEQ_LM if name == "t5" else peft.TaskType.CAUSAL_LM
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, lora_dropout=0.1, task_type=kind, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(model), config).train()
    expected = trained(copy.deepcopy(model), batches)
    assert len(expected.tensors) > 2 * len(list(model.parameters())) // 3
    before, frames = attributes(model), Frames()
    with FORMS[form](model), frames:
        assert_same(trained(model, batches), expected)
    assert frames.frames
    assert attributes(model) == before


def test_adapters_made_after_the_switch():
    peft = pytest.importorskip("peft")
    model, batches = built("llama")

    def adapted(switched_on):
        torch.manual_seed(3)
        own = copy.deepcopy(model)
        with switched_on(own):
            config = peft.LoraConfig(r=2, lora_dropout=0.1, task_type=peft.TaskType.CAUSAL_LM, init_lora_weights=False)
            return trained(peft.get_peft_model(own, config).train(), batches)

    assert_same(adapted(enable_in_transformers), adapted(contextlib.nullcontext))


def test_frozen_layers_below_adapters_keep_nothing():
    """The hooks of Transformers' own switch have backward go through the whole model."""
    model, batches = built("llama")
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    assert live_bytes(model, batches[0], enable_in_transformers) < live_bytes(model, batches[0], by_torch)
