"""torch's own tests of checkpointing: which pass under this package, and why the others differ.

Of the 83 that need no device (torch 2.14; 2.13 has 74 of them) 60 pass while ``patch_torch(reentrant=True)`` diverts all calls.
23 differ: each is a row below with its reason, and each reason has a program that shows the difference. The programs run under
both implementations, so a reason fails when either changes.

torch's tests are in its repository alone. With a checkout of the version that is installed, and ``expecttest``, this runs them
and compares what passes with both lists::

    TORCH_TESTS=/path/to/pytorch/test python -m pytest tests/parity -m parity -k lists

torch leaves out three that take long, unless ``PYTORCH_TEST_WITH_SLOW=1`` is set.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ckpt_hooks
from tests.measure import Calls, leaf

aten = torch.ops.aten


class Reason(NamedTuple):
    """Why tests differ; a program that shows it; its result, or a pattern of its error, under torch and here."""

    words: str
    program: Callable[[], Any]
    torch: Any
    ours: Any


def keeping(*operators: Any) -> Any:
    return functools.partial(create_selective_checkpoint_contexts, list(operators))


def counts_calls() -> tuple[int, int]:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            seen.append(x)
            return x.sin().cos()

    seen: list[torch.Tensor] = []
    module = Counts()
    checkpoint(module, leaf(2), use_reentrant=False).sum().backward()
    return len(seen), module.calls


def saves_its_argument() -> int:
    function = Calls(torch.sin)
    checkpoint(function, leaf(2), use_reentrant=False).sum().backward()
    return function.count


def reads_saved_tensors_twice() -> list[float]:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[0])

    x = torch.tensor([3.0], requires_grad=True)
    checkpoint(lambda x: Twice.apply(x * 1), x, use_reentrant=False).backward()
    return x.grad.tolist()


def reruns_under_a_mode() -> list[str]:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__)
            return func(*args, **kwargs or {})

    names: list[str] = []
    checkpoint(torch.tanh, leaf(2), use_reentrant=False, context_fn=lambda: (nullcontext(), Names())).sum().backward()
    return names


def calls_under_a_policy() -> int:
    function = Calls(lambda x: x.sin().cos())
    checkpoint(function, leaf(2), use_reentrant=False, context_fn=keeping(aten.mm.default)).sum().backward()
    return function.count


def goes_backward_twice_under_a_policy() -> bool:
    x = leaf(2)
    y = checkpoint(lambda x: x.sin().cos().exp(), x, use_reentrant=False, context_fn=keeping(aten.sin.default)).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    return torch.equal(x.grad, once + once)


def looks_for_torchs_mode() -> bool:
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(type(_get_current_dispatch_mode()) is torch.utils.checkpoint._CachingTorchDispatchMode)
        return x.sin()

    checkpoint(function, leaf(2), use_reentrant=False, context_fn=keeping(aten.sin.default))
    return found[0]


def writes_to_what_is_kept() -> bool:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().mul_(3).cos().exp().sum()

    x = leaf(2)
    y = checkpoint(function, x, use_reentrant=False, context_fn=keeping(aten.sin.default))
    return torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(function(x), x)[0])


def packs_under_a_policy() -> list[tuple[int, ...]]:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():  # torch 2.11 packs an empty one besides
            packed.append(tuple(tensor.shape))
        return tensor

    with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        warnings.simplefilter("ignore", FutureWarning)  # of torch 2.14: that it will do the same
        checkpoint(lambda x: (x @ x.t()).relu(), leaf(2, 3), use_reentrant=False, context_fn=keeping(aten.mm.default))
    return packed


def asks_a_reentrant_region_for_a_gradient() -> bool:
    x = leaf(2)
    return torch.equal(torch.autograd.grad(checkpoint(torch.sin, x, use_reentrant=True).sum(), x)[0], x.cos())


def reenters_without_gradients() -> bool:
    x = leaf(2)
    y = checkpoint(lambda x: x.detach() * 2, x, use_reentrant=True)
    (y + x).sum().backward()
    return y.requires_grad


def reenters_and_returns_its_argument() -> bool:
    return checkpoint(lambda x: (x.sin(), x), leaf(2), use_reentrant=True)[1].is_leaf


COUNTED = Reason("It counts forwards in a list or an attribute, which a rerun puts back.", counts_calls, (2, 2), (1, 1))
ARGUMENT = Reason("All that it saves is its argument, which is there without a rerun.", saves_its_argument, 2, 1)
TWICE = Reason(
    "Its backward may read what it has saved as often as without a region.",
    reads_saved_tensors_twice,
    re.compile("already unpacked once"),
    [6.0],
)
DETACHED = Reason("A rerun detaches nothing.", reruns_under_a_mode, ["tanh.default", "detach.default"], ["tanh.default"])
REPLAYED = Reason(
    "Under a policy its function runs once: backward replays the operators of forward.", calls_under_a_policy, 2, 1
)
AGAIN = Reason(
    "Under a policy it may go backward several times.",
    goes_backward_twice_under_a_policy,
    re.compile("Trying to backward an extra time"),
    True,
)
PRIVATE = Reason("It asks for private classes of torch that carry out a policy.", looks_for_torchs_mode, True, False)
WRITTEN = Reason("A write to what a policy keeps is replayed.", writes_to_what_is_kept, re.compile("has been mutated"), True)
PACKED = Reason(
    "Outputs that a policy keeps go through saved-tensor hooks, and leaves among arguments stay as they are.",
    packs_under_a_policy,
    [(2, 3)],
    [(2, 2)],
)
REENTRANT_GRAD = Reason(
    "A reentrant call is a region like any other, of which `autograd.grad` may be asked.",
    asks_a_reentrant_region_for_a_gradient,
    re.compile("torch.utils.checkpoint is incompatible"),
    True,
)
REENTRANT_NONE = Reason(
    "A reentrant call whose results require no gradient is no error of its own.",
    reenters_without_gradients,
    re.compile("none of output has requires_grad=True"),
    False,
)
REENTRANT_SAME = Reason(
    "A reentrant call returns its argument as it is, without a node whose second backward would be an error.",
    reenters_and_returns_its_argument,
    False,
    True,
)

#: Of each test of torch that is meant to differ, why.
DIFFER = {
    "TestAutograd.test_access_saved_tensor_twice_without_recomputation_works": COUNTED,
    "TestAutograd.test_checkpoint_detects_non_determinism": COUNTED,
    "TestAutograd.test_checkpoint_error_suggests_mark_dynamic": ARGUMENT,
    "TestAutograd.test_checkpoint_graph_execution_group": COUNTED,
    "TestAutograd.test_checkpoint_valid_reset_on_error": REENTRANT_GRAD,
    "TestAutograd.test_checkpointing_without_reentrant_custom_function_works": TWICE,
    "TestAutograd.test_checkpointing_without_reentrant_detached_tensor_use_reentrant_True": REENTRANT_NONE,
    "TestAutograd.test_checkpointing_without_reentrant_with_context_fn": DETACHED,
    "TestCheckpoint.test_checkpoint_kwargs": COUNTED,
    "TestCheckpoint.test_checkpoint_non_tensor_inputs_outputs": REENTRANT_SAME,
    "TestCheckpoint.test_checkpoint_partial_grad": REENTRANT_NONE,
    "TestCheckpoint.test_checkpoint_trigger": COUNTED,
    "TestCheckpoint.test_checkpoint_valid": REENTRANT_GRAD,
    "TestCheckpoint.test_clears_state_on_error_in_forward": COUNTED,
    "TestNestedCheckpoint.test_nested_checkpoint_set_early_stop": COUNTED,
    "TestNestedCheckpoint.test_nested_checkpoint_set_early_stop_no_recompution_needed": ARGUMENT,
    "TestSACAmbientSavedTensorsHooks.test_hook_outer_sac_inner_default_bypasses": PACKED,
    "TestSelectiveActivationCheckpoint.test_can_only_trigger_recompute_once": AGAIN,
    "TestSelectiveActivationCheckpoint.test_mismatch_extra_invocation_during_recompute": REPLAYED,
    "TestSelectiveActivationCheckpoint.test_mismatch_new_op_during_recompute": REPLAYED,
    "TestSelectiveActivationCheckpoint.test_saved_tensors_hooks_fire_for_saved_tensors": PACKED,
    "TestSelectiveActivationCheckpoint.test_storage_lifetime": PRIVATE,
    "TestSelectiveActivationCheckpoint.test_version_counter": WRITTEN,
}

REASONS = {reason.program.__name__: reason for reason in DIFFER.values()}

#: Tests of torch that pass.
PASS = tuple(
    f"{kind}.test_{name}"
    for kind, names in {
        "CheckpointWrapperTest": """
            apply_activation_checkpointing checkpoint_wrapper_kwarg_support forward_missing_attributes fqn
            load_activation_checkpointed_module
        """,
        "TestAutograd": """
            checkpoint_automatic_dynamic_graph_shadowing checkpoint_automatic_dynamic_lru_disabled_workaround
            checkpoint_automatic_dynamic_mark_dynamic_workaround
            checkpoint_sequential_warns_if_use_reentrant_not_passed_explcitly
            checkpoint_warns_if_use_reentrant_not_passed_explcitly checkpointing checkpointing_non_reentrant_autocast_cpu
            checkpointing_without_reentrant_arbitrary_input_output
            checkpointing_without_reentrant_context_fn_cannot_suppress_forward_exception
            checkpointing_without_reentrant_context_fn_exits_on_forward_exception checkpointing_without_reentrant_correct_grad
            checkpointing_without_reentrant_dataparallel checkpointing_without_reentrant_detached_tensor_use_reentrant_False
            checkpointing_without_reentrant_input_requires_grad_False checkpointing_without_reentrant_input_requires_grad_True
            checkpointing_without_reentrant_parameter_used_in_an_out checkpointing_without_reentrant_saved_object_identity
            save_on_cpu_and_checkpoint
        """,
        "TestCheckpoint": """
            checkpoint checkpoint_module_list checkpoint_no_tensors checkpoint_non_tensor checkpoint_rng_cpu
            checkpoint_sequential_deprecated_multiple_args checkpoint_sequential_deprecated_no_args
            infer_device_state_recursive_meta multi_args random_cpu tensor_only_cpu
        """,
        "TestNestedCheckpoint": """
            nested_checkpoint_early_stop_False nested_checkpoint_early_stop_True nested_checkpoint_kwargs_early_stop_False
            nested_checkpoint_kwargs_early_stop_True nested_checkpoint_non_tensor_inputs_and_outputs_early_stop_False
            nested_checkpoint_non_tensor_inputs_and_outputs_early_stop_True
            nested_checkpoint_reentrant_backwards_early_stop_False nested_checkpoint_reentrant_backwards_early_stop_True
            nested_checkpoint_same_graph_early_stop_False nested_checkpoint_same_graph_early_stop_True
            nested_checkpoint_two_children_early_stop_False nested_checkpoint_two_children_early_stop_True
        """,
        "TestSACAmbientSavedTensorsHooks": """
            hook_outer_sac_inner_opt_in_routes hook_outer_sac_inner_opt_out_bypasses_silently
            nested_checkpoint_ignores_internal_hooks plain_checkpoint_no_warning reentrant_rejects_flag
            save_on_cpu_opt_in_offloads_saved_tensor
        """,
        "TestSelectiveActivationCheckpoint": """
            auto_naming_mode_names bad_inputs function_with_more_than_one_output function_with_non_tensor_output
            output_already_has_autograd_meta policy_with_state saved_tensors_hooks_no_refcycle_with_stateful_owner
            subclass_dispatching_sizes
        """,
    }.items()
    for name in names.split()
)

#: Where torch's tests of checkpointing stand, and which these are.
_FILES = ("test_autograd", "test_utils", "distributed/_composable/test_checkpoint", "distributed/fsdp/test_checkpoint_wrapper")
_NAMES = "checkpoint or SACAmbient or access_saved_tensor_twice"
_RUN = "import sys, pytest, ckpt_hooks; ckpt_hooks.patch_torch(reentrant=True); sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.parametrize("whose", ["torch", "ours"])
@pytest.mark.parametrize("program", REASONS)
def test_what_differs(program: str, whose: str) -> None:
    reason = REASONS[program]
    expected = getattr(reason, whose)
    with nullcontext() if whose == "torch" else ckpt_hooks.patch_torch(reentrant=True):
        if isinstance(expected, re.Pattern):
            with pytest.raises(RuntimeError, match=expected):
                reason.program()
        else:
            assert reason.program() == expected


def test_counts() -> None:
    assert (len(PASS), len(DIFFER), len({*PASS, *DIFFER})) == (60, 23, 83)
    assert sum(reason is COUNTED for reason in DIFFER.values()) == 7


@pytest.mark.parity
@pytest.mark.skipif("TORCH_TESTS" not in os.environ, reason="TORCH_TESTS does not say where torch's tests are")
def test_the_lists_are_those_of_torchs_tests() -> None:
    tests = [f"{os.environ['TORCH_TESTS']}/{file}.py" for file in _FILES]
    options = ["-rA", "-q", "--tb=no", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider", "-k", _NAMES]
    path = os.pathsep.join([*filter(None, sys.path), os.environ["TORCH_TESTS"]])
    run = subprocess.run(
        [sys.executable, "-c", _RUN, *options, *tests], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR|SUBFAILED)\S* \S+\.py::(\w+)::(\w+)", run.stdout, re.MULTILINE)
    differ = {f"{kind}.{name}" for outcome, kind, name in found if outcome != "PASSED"}
    passed = {f"{kind}.{name}" for outcome, kind, name in found if outcome == "PASSED"} - differ
    assert passed, run.stdout + run.stderr
    ran = passed | differ  # less than all of the lists: which tests there are depends on the version and the device
    assert (passed, differ) == (ran & {*PASS}, ran & {*DIFFER})
