"""Every public function and option, called with eight wrong values each: an error that names the argument, or a reason.

The arguments are those of the signatures, so that a new one is tested without a line here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import ckpt_hooks
from ckpt_hooks import checkpoint, checkpoint_module, checkpoint_region, memory_ledger, plan_memory, policies, trace
from ckpt_hooks._options import Form, options_of
from ckpt_hooks.losses import chunked_cross_entropy
from ckpt_hooks.offload import offload_saved_tensors
from ckpt_hooks.planner import Plan
from ckpt_hooks.report import MemoryLedger, Picture
from tests import fake_transformers as fake

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

MM = torch.ops.aten.mm.default


class Plain:
    """A class, and an object, of nothing."""


VALUES = {
    "None": None,
    "a number": -7,
    "a string": "x y",
    "a list": [1, "x"],
    "a class": Plain,
    "an object": Plain(),
    "nan": float("nan"),
    "a huge number": 10**5000,
}

block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def x():
    return torch.ones(2, 3, requires_grad=True)


def model():
    return nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))


def step(model):
    model(x()).sum().backward()


def back(y):
    y.sum().backward()
    return y


@functools.cache
def plan():
    planned = model()
    return planned, plan_memory(planned, step, 0.5, blocks="*")


@functools.cache
def ledger():
    return memory_ledger(lambda: step(block))


def entered(make):
    def use(**given):
        with make(**given):
            back(checkpoint(block, x()))

    return use


HEAD = {"bias": None, "chunks": None, "chunk_size": None}
CHUNKED = {"dim": 0, "reduce": None, "chunked": (), "check_rows": False, "chunk_size": None}


def step_of_loop(state, row=None):
    return block(state) if row is None else (block(state), None)


def looped(**options):
    result = ckpt_hooks.checkpoint_loop(**options)
    return back(result if options["xs"] is None else result[0])


def sequence(functions, segments, input, use_reentrant, **options):
    back(ckpt_hooks.checkpoint_sequential(functions, segments, input, use_reentrant, **options))


def applied(model, select, **options):
    ckpt_hooks.apply_checkpointing(model, select, **options)
    step(model)


def enabled(model, **options):
    with ckpt_hooks.enable_in_transformers(model, **options):
        pass


def asked(policy):
    """Runs a region under a policy."""
    back(checkpoint(policy=policy)(block)(x()))


class Case(NamedTuple):
    """A call: what has the signature, the right values of its arguments, the call, and options besides the signature."""

    of: Callable[..., Any]
    right: Callable[[], dict[str, Any]] = dict
    use: Callable[..., Any] | None = None
    options: tuple[str, ...] = ()


DIRECT, CURRIED, RECORDED = (tuple(options_of(form)) for form in (Form.DIRECT, Form.CURRIED, Form.RECORDED))

CASES = {
    "checkpoint": Case(checkpoint, lambda: {"function": block}, lambda function, **o: back(checkpoint(function, x(), **o))),
    "checkpoint(...)": Case(lambda: None, dict, lambda **o: back(checkpoint(**o)(block)(x())), CURRIED),
    "checkpoint()": Case(
        lambda function: None, lambda: {"function": block}, lambda function: back(checkpoint()(function)(x()))
    ),
    "checkpoint_region": Case(checkpoint_region.__init__, dict, lambda **o: back(checkpoint_region(**o)(block)(x()))),
    "checkpoint_region()": Case(
        lambda function: None, lambda: {"function": block}, lambda function: back(checkpoint_region()(function)(x()))
    ),
    "checkpoint_module": Case(
        checkpoint_module, lambda: {"module": nn.Tanh()}, lambda module, **o: back(checkpoint_module(module, **o)(x())), CURRIED
    ),
    "checkpoint_module, recorded": Case(
        checkpoint_module,
        lambda: {"module": nn.Tanh(), "recorded": True},
        lambda module, **o: back(checkpoint_module(module, **o)(x())),
        RECORDED,
    ),
    "apply_checkpointing": Case(
        ckpt_hooks.apply_checkpointing, lambda: {"model": model(), "select": "*"}, applied, tuple({*CURRIED} - {"name"})
    ),
    "enable_in_transformers": Case(
        ckpt_hooks.enable_in_transformers, lambda: {"model": fake.Model()}, enabled, tuple({*CURRIED} - {"name"})
    ),
    "patch_torch": Case(ckpt_hooks.patch_torch, dict, entered(ckpt_hooks.patch_torch)),
    "checkpoint_sequential": Case(
        ckpt_hooks.checkpoint_sequential,
        lambda: {"functions": [block, block], "segments": 2, "input": x(), "use_reentrant": None},
        sequence,
    ),
    "checkpoint_chunks": Case(
        ckpt_hooks.checkpoint_chunks,
        lambda: {
            "function": block,
            "x": x(),
            "chunks": 2,
            "dim": 0,
            "reduce": None,
            "chunked": (),
            "check_rows": False,
            "chunk_size": None,
        },
        lambda function, x, **o: back(ckpt_hooks.checkpoint_chunks(function, x, **o)),
    ),
    "chunked_cross_entropy": Case(
        chunked_cross_entropy,
        lambda: {"hidden": x(), "weight": torch.ones(5, 3), "labels": torch.ones(2).long(), **HEAD},
        lambda **o: back(chunked_cross_entropy(**o)),
    ),
    "checkpoint_loop": Case(
        ckpt_hooks.checkpoint_loop,
        lambda: {"step": step_of_loop, "state": x(), "n": 2, "slots": 2, "xs": None},
        looped,
    ),
    "checkpoint_name": Case(ckpt_hooks.checkpoint_name, lambda: {"tensor": x(), "name": "x"}),
    "create_selective_checkpoint_contexts": Case(
        ckpt_hooks.create_selective_checkpoint_contexts, lambda: {"policy_fn_or_list": [MM]}
    ),
    "every": Case(
        ckpt_hooks.every,
        lambda: {"n": 2},
        lambda **o: ckpt_hooks.apply_checkpointing(nn.ModuleList([nn.Tanh()]), ckpt_hooks.every(**o)),
    ),
    "remove_checkpointing": Case(ckpt_hooks.remove_checkpointing, lambda: {"module": model()}),
    "set_checkpoint_early_stop": Case(
        ckpt_hooks.set_checkpoint_early_stop, lambda: {"enable": True}, entered(ckpt_hooks.set_checkpoint_early_stop)
    ),
    "set_checkpoint_debug_enabled": Case(
        ckpt_hooks.set_checkpoint_debug_enabled, lambda: {"enabled": True}, entered(ckpt_hooks.set_checkpoint_debug_enabled)
    ),
    "track_rng": Case(ckpt_hooks.track_rng, lambda: {"source": "python"}, entered(ckpt_hooks.track_rng)),
    "trace": Case(trace, dict, entered(trace)),
    "memory_ledger": Case(memory_ledger, lambda: {"step": lambda: None}, lambda step: memory_ledger(step)),
    "MemoryLedger.on": Case(MemoryLedger.on, lambda: {"device": "cpu"}, lambda device: ledger().on(device)),
    "MemoryLedger.holders_at": Case(MemoryLedger.holders_at, lambda: {"change": 0}, lambda change: ledger().holders_at(change)),
    "MemoryLedger.plot": Case(MemoryLedger.plot, dict, lambda path=None: ledger().plot(path)),
    "Picture.save": Case(Picture.save, lambda: {"path": "x.png"}, lambda path: ledger().plot().save(path)),
    "compare": Case(
        lambda path, one: None,
        lambda: {"path": None, "one": ledger()},
        lambda path, one: ckpt_hooks.report.compare(path, one=one),
    ),
    "saved_residuals": Case(
        ckpt_hooks.saved_residuals, lambda: {"function": block}, lambda function: ckpt_hooks.saved_residuals(function, x())
    ),
    "print_saved_residuals": Case(
        ckpt_hooks.print_saved_residuals,
        lambda: {"function": block},
        lambda function: ckpt_hooks.print_saved_residuals(function, x()),
    ),
    "saved_tensors_report": Case(
        lambda results, known: None,
        lambda: {"results": block(x()), "known": block},
        lambda results, known: ckpt_hooks.saved_tensors_report(results, known=known),
    ),
    "DefaultDeviceType.set_device_type": Case(ckpt_hooks.DefaultDeviceType.set_device_type, lambda: {"device": "cpu"}),
    "set_self_check": Case(ckpt_hooks.set_self_check, lambda: {"level": "error"}, entered(ckpt_hooks.set_self_check)),
    "get_device_states": Case(lambda arg: None, lambda: {"arg": x()}, lambda arg: ckpt_hooks.get_device_states(arg)),
    "set_device_states": Case(
        ckpt_hooks.set_device_states, lambda: {"devices": [], "states": [torch.get_rng_state()], "device_type": "cpu"}
    ),
    "estimate_memory": Case(ckpt_hooks.estimate_memory, lambda: {"model": model(), "step": step}),
    "plan_memory": Case(plan_memory, lambda: {"model": model(), "step": step, "memory_budget": 0.5, "blocks": "*"}),
    "Plan.apply": Case(Plan.apply, lambda: {"model": plan()[0]}, lambda **given: plan()[1].apply(**given).undo()),
    "Plan.guard": Case(Plan.guard, lambda: {"model": plan()[0]}, lambda **given: plan()[1].guard(**given)),
    "Plan.add": Case(Plan.add, lambda: {"step": step, "model": plan()[0]}, lambda **given: plan()[1].add(**given)),
    "Plan.from_json": Case(Plan.from_json, lambda: {"values": plan()[1].to_json()}),
    "ParetoFront.plot": Case(lambda path: None, lambda: {"path": None}, lambda path: plan()[1].pareto().plot(path)),
    "save_ops": Case(lambda ops: None, lambda: {"ops": MM}, lambda ops: asked(policies.save_ops(ops))),
    "offload_ops": Case(lambda ops: None, lambda: {"ops": MM}, lambda ops: asked(policies.offload_ops(ops))),
    "save_modules": Case(lambda names: None, lambda: {"names": "x"}, lambda names: asked(policies.save_modules(names))),
    "span": Case(ckpt_hooks.span, lambda: {"first": "0", "last": "1"}),
    "save_every": Case(policies.save_every, lambda: {"op": MM, "n": 2}, lambda **o: asked(policies.save_every(**o))),
    "save_from_both_policies": Case(
        policies.save_from_both_policies,
        lambda: {"one": [MM], "other": policies.dots_saveable},
        lambda **o: asked(policies.save_from_both_policies(**o)),
    ),
    "save_only_these_names": Case(
        lambda names: None, lambda: {"names": "x"}, lambda names: asked(policies.save_only_these_names(names))
    ),
    "save_any_names_but_these": Case(
        lambda names: None, lambda: {"names": "x"}, lambda names: asked(policies.save_any_names_but_these(names))
    ),
    "save_and_offload_only_these_names": Case(
        policies.save_and_offload_only_these_names,
        lambda: {"names_which_can_be_saved": ["x"], "names_which_can_be_offloaded": ["y"]},
        lambda **o: asked(policies.save_and_offload_only_these_names(**o)),
    ),
    "save_indices": Case(
        policies.save_indices, lambda: {"runs": [("", MM, 0)]}, lambda runs, **o: asked(policies.save_indices(runs, **o))
    ),
    "offload_saved_tensors": Case(offload_saved_tensors.__init__, dict, entered(offload_saved_tensors)),
}

#: Values that are taken, or that a function of the user's fails on in its own words, and why. "*" is every argument, or value.
TAKEN = {
    ("*", "name", "a string"): "a name",
    ("save_only_these_names", "names", "a string"): "a name",
    ("save_any_names_but_these", "names", "a string"): "a name",
    ("checkpoint", "function", "None"): "options first",
    ("checkpoint", "function", "a class"): "a class is a function, whose errors are its own",
    ("checkpoint()", "function", "a class"): "likewise",
    ("checkpoint_region()", "function", "a class"): "likewise",
    ("saved_residuals", "function", "a class"): "likewise",
    ("print_saved_residuals", "function", "a class"): "likewise",
    ("memory_ledger", "step", "a class"): "likewise",
    ("checkpoint_sequential", "input", "*"): "the argument of the first function, which is its affair",
    ("create_selective_checkpoint_contexts", "allow_cache_entry_mutation", "*"): "torch's, and means nothing here",
    ("get_device_states", "arg", "*"): "tensors are looked for in whatever comes",
    ("set_device_states", "device_type", "None"): "the default one",
    ("*", "path", "None"): "no file",
    ("*", "path", "a string"): "a file",
    ("checkpoint_sequential", "use_reentrant", "None"): "the default",
    ("Plan.apply", "model", "None"): "the planned one",
    ("Plan.add", "model", "None"): "the planned one",
    ("Plan.guard", "model", "None"): "the planned one",
    ("set_checkpoint_early_stop", "enable", "None"): "each region's own",
    ("set_checkpoint_debug_enabled", "enabled", "None"): "each region's own",
    ("MemoryLedger.holders_at", "change", "a number"): "before the first change: nothing",
    ("MemoryLedger.holders_at", "change", "a huge number"): "behind the last change: nothing",
    ("enable_in_transformers", "every_n_layers", "a huge number"): "the first layer alone",
    ("every", "n", "a huge number"): "the first layer alone",
    ("save_every", "n", "a huge number"): "none of the runs",
    ("save_modules", "names", "a string"): "a name",
    ("span", "first", "a string"): "a name",
    ("span", "last", "a string"): "a name",
    ("checkpoint_chunks", "function", "a class"): "a callable, which is called",
    ("checkpoint_chunks", "chunks", "a huge number"): "as many as there are rows",
    ("chunked_cross_entropy", "chunks", "a huge number"): "as many as there are tokens",
    ("chunked_cross_entropy", "ignore_index", "a number"): "a label that does not occur",
    ("checkpoint_chunks", "chunk_size", "a huge number"): "one slice",
    ("chunked_cross_entropy", "chunk_size", "a huge number"): "one slice",
    ("checkpoint_loop", "step", "a class"): "a callable, which is called",
    ("checkpoint_loop", "state", "*"): "the argument of the step, which is its affair",
    ("checkpoint_loop", "xs", "a list"): "an input for each step, which is the step's affair",
    ("checkpoint_loop", "slots", "a huge number"): "as many as there are steps",
    ("offload_saved_tensors", "max_fwd_stash_size", "a huge number"): "as many as there are",
}

#: What errors call an argument, where it is not its name.
NAMES = {("Plan.from_json", "values"): "plan", ("checkpoint_chunks", "x"): "argument to cut"}  # fields of plans by places

#: Public names that are not called, or not with arguments.
NOT_CALLED = {
    *(
        "GraphExecGroup",
        "is_recomputing",
        "noop_context_fn",
        "DefaultDeviceType",
        "SelectiveCheckpointContext",
        "CheckpointPolicy",
    ),
    *("SAC_IGNORED_OPS", "Policy", "PolicyFn", "PolicyLike", "DEFAULT_MIN_OFFLOAD_SIZE"),
}


def arguments():
    """Yields each argument of each case."""
    for name, case in CASES.items():
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        own = [
            one.name for one in inspect.signature(case.of).parameters.values() if one.kind not in kinds and one.name != "self"
        ]
        for argument in dict.fromkeys((*own, *case.options)):
            yield name, argument


def reason_for(name, argument, value):
    """Returns why a value is no wrong one."""
    for key in ((name, argument, value), ("*", argument, value), (name, argument, "*")):
        if key in TAKEN:
            return TAKEN[key]
    parameter = inspect.signature(CASES[name].of).parameters.get(argument)
    option = ckpt_hooks._options.OPTIONS.get(argument)
    defaults = [None if one is None else one.default for one in (parameter, option)]
    if value == "None" and (None in [d for d, one in zip(defaults, (parameter, option), strict=True) if one is not None]):
        return "the default"
    return None


ROOT = Path(ckpt_hooks.__file__).parent
DRAW = {"MemoryLedger.plot", "Picture.save", "compare", "ParetoFront.plot"}


@pytest.mark.parametrize(("name", "argument"), list(arguments()))
def test_eight_wrong_values(name, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ckpt_hooks.DefaultDeviceType, "_default_device_type", None)
    case = CASES[name]
    use = case.use or case.of
    if name in DRAW:
        pytest.importorskip("matplotlib")
    use(**case.right())
    assert len(VALUES) == 8
    for kind, value in VALUES.items():
        given = {**case.right(), argument: value}
        before = state_of(given.get("model"))
        error = raised(use, given)
        if reason_for(name, argument, kind) is None:
            assert type(error) in (TypeError, ValueError), (kind, error)
            file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            assert ROOT in file.parents, (kind, file, error)
            assert NAMES.get((name, argument), argument) in str(error), (kind, error)
            assert len(str(error)) < 1500
        if error is not None:
            assert state_of(given.get("model")) == before


def raised(use, given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use(**given)
        except Exception as error:
            return error
    return None


def state_of(model):
    return [sorted(vars(one)) for one in model.modules()] if isinstance(model, nn.Module) else None


def test_right_values_are_right_for_every_public_function():
    """No function is left out, and no reason stands for what is an error."""
    public = set()
    for room in ("", ".losses", ".policies", ".report", ".planner", ".offload", ".integrations"):
        module = importlib.import_module(f"ckpt_hooks{room}")
        public |= {name for name in module.__all__ if callable(getattr(module, name))}
    data = {
        name for name in public if isinstance(found := getattr(ckpt_hooks, name, None), type) and issubclass(found, Exception)
    }
    made = {*ckpt_hooks.report.__all__, *ckpt_hooks.planner.__all__}  # classes of what is returned
    classes = {
        name for name in made if isinstance(getattr(ckpt_hooks.report, name, getattr(ckpt_hooks.planner, name, None)), type)
    }
    policies_made = {name for name in policies.__all__ if isinstance(getattr(policies, name), policies.Policy)}
    assert public - {*CASES} - data - classes - policies_made - NOT_CALLED == set()
    known = set(arguments())
    for name, argument, value in TAKEN:
        assert name == "*" or (name, argument) in known
        assert value == "*" or value in VALUES
