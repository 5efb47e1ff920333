"""``enable_in_transformers`` on models with the switch of Transformers; the package itself is in ``tests/integrations``."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.utils.checkpoint

from ckpt_hooks import CheckpointError
from ckpt_hooks.integrations import enable_in_transformers, patch_torch
from ckpt_hooks.policies import dots_saveable
from tests.fake_transformers import (
    LateLayer,
    Layer,
    Model,
    OfPeft,
    PreTrainedModel,
    StackModel,
    TorchCaller,
)
from tests.measure import Frames

IDS = torch.tensor([[1, 2, 3], [3, 4, 5]])


def trained(model):
    """Returns the output, the gradients and the random state after a step."""
    torch.manual_seed(0)
    model.zero_grad()
    output = model(IDS)
    output.sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]


def assert_same(found, expected):
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def attributes(model):
    return {name: {**vars(module)} for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", [Model, StackModel, lambda: Model(kind=LateLayer)])
@pytest.mark.parametrize("policy", [None, dots_saveable])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_is_bitwise_the_same(kind, recorded, policy):
    model, frames = kind(), Frames()
    expected, before = trained(model), attributes(model)
    with enable_in_transformers(model, recorded=recorded, policy=policy), frames:
        assert_same(trained(model), expected)
    assert len(frames.frames) == 5
    assert attributes(model) == before
    with frames:
        assert_same(trained(model), expected)
    assert len(frames.frames) == 5


def test_regions_have_the_names_of_modules():
    model = Model()
    handle = enable_in_transformers(model)
    assert handle.regions == tuple(f"layers.{index}" for index in range(5))
    assert repr(handle) == "<EnabledCheckpointing: Model, 5 regions>"
    y = model(IDS)
    with torch.no_grad():
        model.layers[3].linear.weight.mul_(2)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    assert caught.value.region == ("layers.3",)
    handle.undo()
    assert repr(handle) == "<EnabledCheckpointing: Model, undone>"
    assert enable_in_transformers(StackModel()).regions == ("",)


def test_only_in_training_and_only_with_gradients():
    model, frames = Model(), Frames()
    with enable_in_transformers(model), frames:
        model.eval()
        model(IDS)
        model.train()
        with torch.no_grad():
            model(IDS)
        assert frames.frames == []
        model(IDS)
    assert len(frames.frames) == len(model.layers)


def test_a_switch_that_counts_layers_is_asked_to():
    class Counting(Model):
        def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None, every_n_layers=1):
            super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
            self.asked = every_n_layers

    model = Counting()
    enable_in_transformers(model, every_n_layers=3)
    assert model.asked == 3


@pytest.mark.parametrize("recorded", [False, True])
def test_the_first_and_the_last_layers_are_left_without_regions(recorded):
    model = Model()
    expected, before = trained(model), attributes(model)
    handle = enable_in_transformers(model, keep_first=1, keep_last=2, recorded=recorded)
    for _ in range(2):
        assert handle.regions == ("layers.1", "layers.2")
        assert str(handle).splitlines()[0] == "Model, 2 regions, layers.0,3-4 kept"
        assert_same(trained(model), expected)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=torch.utils.checkpoint.checkpoint)
    with pytest.warns(UserWarning, match="called with the function len, which the regions of enable_in_transformers ignore"):
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=len)
    model._set_gradient_checkpointing(enable=False)
    assert (handle.regions, str(handle)) == ((), "Model, switched off")
    handle.undo()
    assert attributes(model) == before


# Undoing


def test_an_earlier_switch_is_as_it_was():
    model = Model()
    model.gradient_checkpointing_enable()
    before = attributes(model)
    with contextlib.suppress(KeyboardInterrupt), enable_in_transformers(model):
        assert attributes(model) != before
        raise KeyboardInterrupt
    assert attributes(model) == before


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning")
def test_a_module_that_calls_torchs_checkpoint_is_for_a_patch():
    model, frames = TorchCaller(), Frames()
    expected, before = trained(model), attributes(model)
    with pytest.raises(ValueError, match=r"Call .* within `ckpt_hooks\.patch_torch\(reentrant=True\)`"):
        enable_in_transformers(model)
    assert attributes(model) == before
    model.gradient_checkpointing = True
    with patch_torch(reentrant=True), frames:
        assert_same(trained(model), expected)
    assert len(frames.frames) == 5


# The model's own switch, while ours is in force


@pytest.mark.parametrize("kind", [Model, StackModel])
@pytest.mark.parametrize("wrap", [lambda model: model, OfPeft])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_models_own_switch_turns_these_regions_on_and_off(kind, wrap, recorded):
    """As trainers do: on when they are made, off and on around the pass of a reference model."""
    model, frames = kind(), Frames()
    expected, outer = trained(model), wrap(model)
    handle = enable_in_transformers(outer, recorded=recorded, policy=dots_saveable)
    names = handle.regions
    with frames:
        for step in range(1, 4):
            outer.gradient_checkpointing_enable({"use_reentrant": step == 2})
            assert outer.is_gradient_checkpointing
            assert handle.regions == names
            assert_same(trained(model), expected)
            assert len(frames.frames) == 5 * step
            outer.gradient_checkpointing_disable()
            assert (handle.regions, outer.is_gradient_checkpointing) == ((), False)
            assert repr(handle) == f"<EnabledCheckpointing: {kind.__name__}, switched off>"
            assert_same(trained(model), expected)
            assert len(frames.frames) == 5 * step


def test_the_switch_of_a_model_inside():
    class Outer(PreTrainedModel):
        def __init__(self):
            super().__init__()
            self.model, self.head = Model(), Layer()

        def forward(self, ids):
            return self.head(self.model(ids))

    outer, frames = Outer(), Frames()
    expected = trained(outer)
    handle = enable_in_transformers(outer)
    before = handle.regions
    assert before == (*(f"model.layers.{index}" for index in range(5)), "head")
    outer.model.gradient_checkpointing_disable()
    assert handle.regions == ("head",)
    outer.model.gradient_checkpointing_enable()
    assert handle.regions == before
    with frames:
        assert_same(trained(outer), expected)
    assert len(frames.frames) == 6
    handle.undo()
    assert "_set_gradient_checkpointing" not in {*vars(outer), *vars(outer.model)}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_the_switch_of_a_copy_is_its_own(copied):
    model, frames = Model(), Frames()
    expected = trained(model)
    handle = enable_in_transformers(model)
    names = handle.regions
    other = copied(model)
    other.gradient_checkpointing_disable()
    assert handle.regions == names
    with frames:
        assert_same(trained(other), expected)
        assert frames.frames == []
        other.gradient_checkpointing_enable()
        assert_same(trained(other), expected)
        assert len(frames.frames) == 5
    model.gradient_checkpointing_disable()
    assert handle.regions == ()
    with frames:
        assert_same(trained(other), expected)
    assert len(frames.frames) == 10


def test_a_switch_put_there_by_the_program_comes_back():
    model = Model()
    own = model._set_gradient_checkpointing
    model._set_gradient_checkpointing = own
    with enable_in_transformers(model):
        assert model._set_gradient_checkpointing is not own
    assert model._set_gradient_checkpointing is own


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_enabled_anew_while_switched_off(order):
    """The second call undoes the first."""
    model = Model()
    before = attributes(model)
    handles = [enable_in_transformers(model)]
    model.gradient_checkpointing_disable()
    handles.append(enable_in_transformers(model, recorded=True))
    assert [len(handle.regions) for handle in handles] == [0, 5]
    assert repr(handles[0]).endswith("undone>")
    for number in order:
        handles[number].undo()
    assert attributes(model) == before


def test_what_fails_leaves_the_model_as_it_was():
    class Failing(Model):
        def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None):
            super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
            raise NotImplementedError

    for model, options, error in [
        (Failing(), {}, NotImplementedError),
        (StackModel(), {"every_n_layers": 2}, ValueError),
        (Model(), {"determinism_check": "all"}, ValueError),
        (Model(), {"recorded": True, "early_stop": False}, ValueError),
        (Model(), {"policy": "dots_savable"}, TypeError),
    ]:
        before = attributes(model)
        with pytest.raises(error):
            enable_in_transformers(model, **options)
        assert attributes(model) == before


def test_the_model_dies_with_the_last_reference(no_gc):
    model = Model()
    handle = enable_in_transformers(model)
    trained(model)
    alive = weakref.ref(model), weakref.ref(model.layers[0])
    del model
    assert [reference() for reference in alive] == [None, None]
    handle.undo()
    assert gc.isenabled() is False


# Frozen models, and models of PEFT


def test_a_model_of_peft():
    model = OfPeft(Model())
    before = attributes(model)
    with enable_in_transformers(model) as handle:
        assert handle.regions[0] == "layers.0"
        assert "_gradient_checkpointing_func" not in vars(model)
    assert attributes(model) == before


@pytest.mark.slow
def test_nothing_heavy_is_imported():
    program = (
        "import sys, ckpt_hooks.integrations\n"
        "assert not {'transformers', 'torch._dynamo', 'torch.distributed.fsdp'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
