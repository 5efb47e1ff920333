"""Trainers that switch a model's own checkpointing on and off: the regions of ``enable_in_transformers`` stay in force."""

from __future__ import annotations

import os

import pytest
import torch
import torch.utils.checkpoint

from ckpt_hooks import enable_in_transformers
from tests.measure import Watch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", exc_type=Exception)

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

LAYERS, STEPS = 3, 3


class Recomputes(Watch):
    """How many recomputes there were, by this package and by torch, in each step."""

    def __init__(self, monkeypatch):
        self.ours = self.torchs = 0
        self.steps = []
        frame, function = torch.utils.checkpoint._CheckpointFrame, torch.utils.checkpoint.CheckpointFunction
        own, own_forward = frame.__init__, function.forward

        def init(*args, **kwargs):
            self.torchs += 1
            own(*args, **kwargs)

        def forward(*args, **kwargs):
            self.torchs += 1
            return own_forward(*args, **kwargs)

        monkeypatch.setattr(frame, "__init__", init)
        monkeypatch.setattr(function, "forward", staticmethod(forward))

    def recomputing(self, region, *, in_order):
        self.ours += 1

    def callback(self):
        outer = self

        class EndOfStep(transformers.TrainerCallback):
            def on_step_end(self, *args, **kwargs):
                outer.steps.append((outer.ours, outer.torchs))
                outer.ours = outer.torchs = 0

        return EndOfStep()


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
            num_key_value_heads=1, attention_dropout=0.1, max_position_embeddings=64, pad_token_id=0,
        )
    )  # fmt: skip


def tokenizer():
    import tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(36))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokens = tokenizers.Tokenizer(model)
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def texts(seed):
    numbers = torch.randint(36, (8, 9), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(f"w{number}" for number in line) for line in numbers]


class Windows(torch.utils.data.Dataset):
    """Token windows, the same ones each time."""

    def __init__(self):
        self.ids = torch.randint(3, 40, (8, 12), generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def with_adapters(model):
    peft = pytest.importorskip("peft", exc_type=Exception)
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def sft(model, options, checkpointing):
    """By TRL's default, checkpointing is on."""
    trl, datasets = pytest.importorskip("trl", exc_type=Exception), pytest.importorskip("datasets", exc_type=Exception)
    arguments = trl.SFTConfig(**options, bf16=False, **({} if checkpointing else {"gradient_checkpointing": False}))
    data = datasets.Dataset.from_dict({"text": texts(1)})
    return trl.SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer())


def dpo(model, options, checkpointing):
    """Switches checkpointing off and on around the pass of the reference model."""
    trl, datasets = pytest.importorskip("trl", exc_type=Exception), pytest.importorskip("datasets", exc_type=Exception)
    arguments = trl.DPOConfig(**options, bf16=False, **({} if checkpointing else {"gradient_checkpointing": False}))
    data = datasets.Dataset.from_dict({"prompt": texts(1), "chosen": texts(2), "rejected": texts(3)})
    return trl.DPOTrainer(with_adapters(model), args=arguments, train_dataset=data, processing_class=tokenizer())


def k_bit(model, options, checkpointing):
    """PEFT's preparation of quantised models switches checkpointing on."""
    peft = pytest.importorskip("peft", exc_type=Exception)
    model.is_loaded_in_8bit = True
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    model.is_loaded_in_8bit = False
    return transformers.Trainer(with_adapters(model), transformers.TrainingArguments(**options), train_dataset=Windows())


def trainer(model, options, checkpointing):
    arguments = transformers.TrainingArguments(**options, gradient_checkpointing=checkpointing)
    return transformers.Trainer(model, arguments, train_dataset=Windows())


@pytest.mark.parametrize("make", [sft, dpo, k_bit, trainer])
def test_a_trainer_that_switches_checkpointing_itself(make, tmp_path, monkeypatch):
    options = {
        "output_dir": tmp_path, "max_steps": STEPS, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "seed": 5, "logging_steps": 1,
    }  # fmt: skip
    recomputes = Recomputes(monkeypatch)

    def result(ours):
        model = llama()
        handle = enable_in_transformers(model) if ours else None
        own = make(model, options, ours)
        own.add_callback(recomputes.callback())
        own.train()
        if handle is not None:
            assert len(handle.regions) == LAYERS
        losses = [entry["loss"] for entry in own.state.log_history if "loss" in entry]
        return losses, [*own.model.state_dict().values(), torch.get_rng_state()]

    with recomputes:
        losses, state = result(False)
        assert recomputes.steps == [(0, 0)] * STEPS
        recomputes.steps = []
        found, found_state = result(True)
    assert recomputes.steps == [(LAYERS, 0)] * STEPS
    assert found == losses
    assert [torch.equal(a, b) for a, b in zip(found_state, state, strict=True)] == [True] * len(state)
