"""What the engine believes of torch's operators, checked against the schemas of the torch that runs the tests."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks._operators import facts as schema_gaps
from ckpt_hooks._operators.facts import facts_of

LATEST_LOOKED_AT = (2, 15)

# Operators that write to an argument which is neither the one they are called on nor an output. The first two save what they
# write before they write it, and their input after that, which is what ``ckpt_hooks._function.collector`` goes by.
FRESH = {"rrelu_with_noise", "rrelu_with_noise_"}
# These write to state that was there before the region ran, and the derivative does not read it.
STATE = {
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "_fused_moving_avg_obs_fq_helper",
    "fused_moving_avg_obs_fake_quant",
}
# These have no derivative.
NO_DERIVATIVE = {
    *("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_cummax_helper", "_cummin_helper"),
    *(
        "_flash_attention_forward_no_dropout_inplace",
        "_cudnn_attention_forward_no_dropout_inplace",
        "_fused_adagrad_",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
    ),
}


def test_operators_that_fill_an_argument_are_known():
    """No operator but rrelu may save a tensor and fill it afterwards: the early stop would find it empty (Rule 5)."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name, overload = schema.name.removeprefix("aten::"), schema.overload_name
        if not schema.name.startswith("aten::") or overload.endswith("out"):
            continue
        full_name = f"{schema.name}.{overload}" if overload else schema.name
        if torch._C._dispatch_has_kernel(full_name) and any(
            argument.alias_info is not None
            and argument.alias_info.is_write
            and argument.name != "self"
            and not argument.kwarg_only
            for argument in schema.arguments
        ):
            found.add(name)
    assert found >= FRESH
    # A release may lack some of the others. One that has more needs a look at how it saves them.
    if tuple(map(int, torch.__version__.split(".")[:2])) <= LATEST_LOOKED_AT:
        assert found - (FRESH | STATE | NO_DERIVATIVE) == set()


@pytest.mark.parametrize(
    "names",
    [
        "ALIASES",
        "UNINITIALIZED",
        "BUFFERED_MASKS",
        "LAYOUT",
        "LIKE",
        "LOOKS_AT_GRAD",
        "OVERWRITES",
        "REPEATABLE",
        "REPLACES_STORAGE",
        "WRITES",
    ],
)
def test_operators_in_lists_are_there(names):
    """A name that torch does not have is a slip of the pen, or of an operator that has gone."""
    assert [name for name in getattr(schema_gaps, names) if not hasattr(torch.ops.aten, name)] == []


def test_what_such_operators_write_to_is_unsaid_still():
    """A schema that marks running statistics makes the entry needless."""
    for name, arguments in schema_gaps.WRITES.items():
        packet = getattr(torch.ops.aten, name)
        for schema in (getattr(packet, overload)._schema for overload in packet.overloads()):
            quiet = [one.name for one in schema.arguments if one.name in arguments and one.alias_info is None]
            assert quiet == list(arguments), schema


def test_rrelu_saves_its_noise_first():
    """The order that the early stop relies on."""
    for function in (torch.nn.functional.rrelu, torch.nn.functional.rrelu_):
        saved = []
        x = torch.randn(5, requires_grad=True) * 1
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.requires_grad), lambda t: t):
            function(x, training=True)
        assert saved == [False, True]


@pytest.mark.parametrize("name", ["_cudnn_init_dropout_state", "_cudnn_rnn", "miopen_rnn"])
def test_operators_that_drop_out_by_a_buffer_of_masks(name):
    """The names of their arguments are those that tell whether they do."""
    operator = getattr(torch.ops.aten, name).default
    positions = {argument.name: index for index, argument in enumerate(operator._schema.arguments)}
    for dropout, train in ((0.5, True), (0.0, True), (0.5, False)):
        args = [None] * len(positions)
        args[positions["dropout"]], args[positions["train"]] = dropout, train
        assert facts_of(operator).drops_from_buffer(args, {}) == bool(dropout and train)
        assert facts_of(operator).drops_from_buffer([], {"dropout": dropout, "train": train}) == bool(dropout and train)
    assert not facts_of(torch.ops.aten.native_dropout.default).drops_from_buffer([], {"p": 0.5, "train": True})
