"""Random programs, run plainly and with regions (``tests/fuzz``), and whether the fuzzer finds what it should."""

from __future__ import annotations

import functools
import importlib.util
import re

import pytest
import torch

from tests.fake_device import fake_device
from tests.fuzz import patches, state_statements, statements
from tests.fuzz.features import ABSENT, CORE, FEATURES, PATCHES, holding, parse
from tests.fuzz.generate import generate
from tests.fuzz.implementations import IMPLEMENTATIONS, Implementation
from tests.fuzz.programs import CONTAINERS, MODES, Region, walk
from tests.fuzz.run import Tally, fuzz, is_failure, minimal
from tests.fuzz.stateful import STATE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


#: Modules that remember, functions that close over variables, flags that change.
STATEFUL = frozenset({"operators", "random", "nesting", "sequential", "containers", "closures", "endings", *STATE})


def first_difference(implementation, seeds, features=CORE):
    """Returns the first difference that an implementation makes and must not, or None."""
    return next((found for found in fuzz(implementation, seeds, features) if is_failure(found, features)), None)


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_programs_are_what_they_are_without_regions(start):
    """A hundred programs a test; on a difference the failure is a script that shows it."""
    implementation = IMPLEMENTATIONS["ours"]
    found = first_difference(implementation, range(start, start + 100))
    assert found is None, minimal(found, implementation)


@pytest.mark.parametrize(
    "name", ["ours-curried", "ours-to-the-end", "ours-debug", "ours-varied", "ours-selective", "ours-kept", "ours-spans"]
)
def test_options_change_nothing(name):
    """The curried form, no early stop, debug mode, options and policies that differ from region to region."""
    # Under any dispatch mode, the debug mode's too, torch makes views in inference mode that require no grad.
    features = CORE - {"inference"}
    found = first_difference(IMPLEMENTATIONS[name], range(10_000, 10_060), features)
    assert found is None, minimal(found, IMPLEMENTATIONS[name], features)


def test_inputs_on_another_device():
    """Regions of both kinds whose inputs go to the host and come back, and whose values stay for a second backward."""
    implementation, features = IMPLEMENTATIONS["ours-kept"], CORE - {"inference"}
    with fake_device(min_offload_size=1) as transfers:
        found = first_difference(implementation, range(20_000, 20_040), features)
    assert found is None, minimal(found, implementation, features)
    assert transfers.count("send") > 10 < transfers.count("fetch")


def test_programs_do_the_same_twice():
    """All features on: what differs under an implementation is not the program's own doing."""
    tally = Tally()
    assert list(fuzz(IMPLEMENTATIONS["plain"], range(150), FEATURES, tally)) == [None] * 150
    assert (tally.programs, tally.differences) == (150, [])
    assert tally.raising < (
        75 if importlib.util.find_spec("numpy") is None else 30
    )  # programs that ask for it raise without it


def test_a_seed_makes_one_program():
    """Whatever ran before it."""
    sources = [generate(seed).source() for seed in range(20)]
    torch.manual_seed(7)
    assert [generate(seed).source() for seed in reversed(range(20))] == sources[::-1]


def test_programs_have_what_they_are_made_of():
    """Regions to depth 4, every way of calling them, and a vocabulary worth the name."""
    programs = [generate(seed, FEATURES - {*STATE, *PATCHES}) for seed in range(600)]
    regions = [node for program in programs for node in walk(program.body) if isinstance(node, Region)]
    assert {region.packing for region in regions} == {"tuple", "list", "dict", "nested"}
    styles = {binding.style for region in regions for binding in region.bindings}
    assert styles == {"positional", "keyword", "partial", "partial keyword", *CONTAINERS}
    assert {program.ending.mode for program in programs} == set(MODES)

    def depth(body):
        return max([isinstance(node, Region) + depth(getattr(node, "body", [])) for node in body], default=0)

    assert {depth(program.body) for program in programs} == {1, 2, 3, 4}
    text = "\n".join(program.source() for program in programs)
    assert len(set(re.findall(r"\w+(?=\()", text))) > 250
    modules = {constructor.split("(")[0] for made in statements.MODULES.values() for _, constructor, _ in made}
    blocks = {header.split("(")[0] for made in statements.BLOCKS.values() for header, _ in made}
    marks = [
        "except",
        ".apply(",
        "torch.autograd.grad(",
        "generator=g",
        "in_segments(run, ",
        "in_chunks(run, ",
        "in_loop(run, ",
        "on_thread(run, ",
        "Unboxed.apply(run(",
        *(f"Failing('{where}', " for where in ("forward", "recompute", "backward")),
        *(made.split("(")[0] for made in statements.OPTIMIZERS),
        *(hook.split("(")[0].split("}")[-1] for hook in statements.SIDE_EFFECTS["backward_hooks"]),
    ]
    if "python_random" not in ABSENT:
        marks += ["random.random", 'track_rng("python")', "run(Noisy(g", "track_rng(g"]
    if "numpy_random" not in ABSENT and importlib.util.find_spec("numpy") is not None:
        marks += ["np.random", 'track_rng("numpy")']
    for mark in [*modules, *blocks, *marks]:
        assert mark in text


def test_programs_have_state_of_every_kind():
    """All parts of modules that remember, all changes by callers, all functions that close over variables, at any depth."""
    programs = [generate(seed, STATEFUL) for seed in range(200)]
    text = "\n".join(program.source() for program in programs)
    parts = [part for feature in STATEFUL & set(state_statements.PARTS) for part in state_statements.PARTS[feature]]
    templates = [part.forward.split("\n")[-1] for part in parts] + state_statements.METHODS + state_statements.USES
    templates += [*state_statements.COUNTED.strip().split("\n"), *(function for function, _ in state_statements.FUNCTIONS)]
    for template in templates:
        assert re.search(re.sub(r"\\\$({\w}|\w)|\\\$\\{\w\\}", ".+?", re.escape(template)), text), template
    assert sum(bool(program.changes) for program in programs) > 40
    assert sum(bool(program.ending.between) for program in programs) > 5
    regions = [node for program in programs for node in walk(program.body) if isinstance(node, Region)]
    inside = "\n".join(line for region in regions for line in region.definition())
    for mark in ("m1(", ".eval()", "for each", "run(each", "= None"):
        assert mark in inside


def test_programs_patch_what_they_run():
    """All parts and hooks for all modules, changes by callers at any time, and nothing that outlives a program."""
    features = frozenset({"operators", "nesting", "closures", "endings", *PATCHES})
    programs = [generate(seed, features) for seed in range(250)]
    text = "\n".join(program.source() for program in programs)
    templates = [part.forward.split("\n")[-1] for parts in patches.PARTS.values() for part in parts]
    templates += [change for changes in patches.CHANGES.values() for change in changes]
    templates += [added for _, added in patches.GLOBAL_HOOKS] + [".log = [*"]
    for template in templates:
        assert re.search(re.sub(r"\\\$({\w}|\w)|\\\$\\{\w\\}", ".+?", re.escape(template)), text), template
    assert sum(bool(program.changes) for program in programs) > 40
    assert sum("    if step: " in program.source() for program in programs) > 5
    assert list(fuzz(IMPLEMENTATIONS["plain"], range(40), features)) == [None] * 40
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


def test_features_can_be_left_out():
    """Without a feature no program has what it stands for."""
    plain = "\n".join(generate(seed, frozenset({"operators"})).source() for seed in range(100))
    marks = ["_(", ".apply(", "rand", "autocast", "no_grad", "try:", "autograd.grad", " m1", "retain_graph", "_dict", "each1"]
    for mark in marks:
        assert mark not in plain.replace("torch.randn(", "").replace("get_rng_state", "")
    assert parse("core,buffers,-random") == CORE - {"random"} | {"buffers"}
    with pytest.raises(ValueError, match="no feature 'speed'"):
        parse("core,speed")
    assert parse("all", "ours-region") == holding("ours-region") == FEATURES - {"storages", "swaps"}
    assert parse("all,storages", "ours-region") == FEATURES - {"swaps"}
    assert parse("all") == FEATURES


def minimal_runtime(flaw=None):
    """Returns a runtime of twenty lines, right for simple programs, or one which draws new numbers in a rerun."""

    def run(function, *args, **kwargs):
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        before = torch.get_rng_state()
        casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        packed, values = [], {}

        def pack(tensor):
            packed.append(None)
            return len(packed) - 1

        def unpack(index):
            if index not in values:
                rerun()
            return values.pop(index)

        def rerun():
            outside, found = torch.get_rng_state(), []
            if flaw is None:
                torch.set_rng_state(before)
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.detach()) or found[-1], lambda t: t)
            enabled, dtype = casts
            with hooks, torch.enable_grad(), torch.autocast("cpu", enabled=enabled, dtype=dtype, cache_enabled=False):
                function(*args, **kwargs)
            torch.set_rng_state(outside)
            values.update(enumerate(found))

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return function(*args, **kwargs)

    return run


def implementation_with(flaw):
    """Returns the minimal runtime as an implementation."""
    source = f"from tests.test_fuzz import minimal_runtime\n\nrun = minimal_runtime({flaw!r})"
    return Implementation("minimal", functools.partial(minimal_runtime, flaw), source)


SIMPLE = frozenset({"operators", "views", "custom_functions", "autocast", "random", "closures", "modules", "nesting"})


def test_a_minimal_runtime_is_right_for_simple_programs():
    """So that what the fuzzer says of flawed ones is about their flaws."""
    found = first_difference(implementation_with(None), range(100), SIMPLE)
    assert found is None, minimal(found, implementation_with(None), SIMPLE)


def test_a_difference_shrinks_to_a_script():
    """A short one that fails when it is run, and passes with a runtime that has not the flaw."""
    flawed = implementation_with("draws new numbers")
    script = minimal(first_difference(flawed, range(200), SIMPLE), flawed, SIMPLE)
    program = script[script.index("def program(") : script.index("def plain(")]
    assert len(program.strip().splitlines()) <= 16
    assert len(re.findall(r"\brun\(", program)) == 1
    with pytest.raises(AssertionError, match="gradient"):
        exec(compile(script, "<script>", "exec"), {})
    exec(compile(script.replace("'draws new numbers'", "None"), "<script>", "exec"), {})


def test_torch_differs_where_its_documentation_says_nothing():
    """A dict that the caller empties after the call: torch reruns the function with the empty one."""
    found = first_difference(IMPLEMENTATIONS["torch"], range(150), SIMPLE | {"containers"})
    assert found is not None
    assert found.kind == "raised"
