"""Plans from files: the plan that was written, or an error that names the field; nothing is imported or run for them."""

from __future__ import annotations

import copy
import json
import random
import sys
import traceback

import pytest
import torch
from torch import nn

from ckpt_hooks import plan_memory
from ckpt_hooks.planner import Plan

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

#: What a file might have in the place of any value.
HOSTILE = [
    *(None, True, False, -1, 0, 1, 3.5, -0.5, float("nan"), float("inf"), 10**30, 2**63, 1e308),
    *(
        "",
        "x",
        "ops",
        "load",
        "__class__",
        "os.system",
        "torch.load",
        "float33",
        "aten.add",
        "aten.add.Tensor\0",
        "\ud800",
        "." * 9,
    ),
    *(
        "aten.__class__.__mro__",
        "load_library.__func__.__globals__",
        "import_module.os.system",
        "aten.no_such.default",
        "a.b.c",
    ),
    *([], {}, [[]], [None], {"a": 1}, ["float32", [1]], [["float32", ["x"]]], [[["ops", None]]], [[["float32", [-1]]]]),
]


def made():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))
    plan = plan_memory(model, lambda model: model(torch.ones(64, 32)).sum().backward(), 0.6, blocks="*")
    plan.add(lambda model: model(torch.ones(32, 32)).sum().backward())
    return model, plan


@pytest.fixture(scope="module")
def right():
    with torch.random.fork_rng():
        model, plan = made()
    assert any(run for block in plan.blocks for run in block.kept or ())
    return model, plan, json.loads(json.dumps(plan.to_json()))


def places_in(value, place=()):
    yield place
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_in(entry, (*place, key))


def mutated(values, draw):
    """Returns a file with one thing changed, and what that was."""
    values = copy.deepcopy(values)
    *path, last = draw.choice([place for place in places_in(values) if place])
    around = values
    for key in path:
        around = around[key]
    what = draw.choice(["replace", "replace", "replace", "delete", "add", "twice"])
    if what == "replace":
        around[last] = draw.choice(HOSTILE)
    elif what == "delete":
        del around[last]
    elif isinstance(around, dict):
        around[f"{last}_" if what == "add" else "__init__"] = around[last]
    else:
        around.insert(0, around[last] if what == "twice" else draw.choice(HOSTILE))
    return values, (what, *path, last)


_heard: list[str] | None = None
_FORBIDDEN = ("import", "exec", "compile", "open", "marshal.loads", "pickle.find_class", "ctypes.dlopen", "os.system")


def _hear(event, _):
    if _heard is not None and event in _FORBIDDEN:
        _heard.append(event)


def read(values):
    """Returns the plan of some values, or the error; neither imports, opens or executes anything."""
    global _heard
    _heard = []
    try:
        return Plan.from_json(values)
    except (TypeError, ValueError) as error:
        return error
    finally:
        heard, _heard = _heard, None
        assert heard == []


@pytest.fixture(scope="module", autouse=True)
def _listening():
    global _heard
    sys.addaudithook(_hear)  # for good: it is switched on by ``_heard``
    _heard = []
    exec("import json")
    assert set(_heard) >= {"compile", "exec"}
    _heard = None


def test_a_right_file(right):
    _, plan, values = right
    assert values["version"] == 1
    found = Plan.from_json(values)
    assert found == plan
    assert str(found) == str(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_two_hundred_mutations(right):
    """Each is an error of ours, which names the field, or the plan that the file says."""
    _, _, values = right
    draw, errors = random.Random(0), 0
    for _ in range(200):
        wrong, what = mutated(values, draw)
        found = read(wrong)
        if isinstance(found, Exception):
            errors += 1
            last = traceback.extract_tb(found.__traceback__)[-1]
            assert "ckpt_hooks" in last.filename, what
            assert str(found).startswith(("plan", "Unexpected keyword arguments: ")), what
            assert "plan" in str(found)
            assert str(found).endswith(".")
        else:
            assert json.dumps(found.to_json(), sort_keys=True) == json.dumps(wrong, sort_keys=True), what
            assert "peak" in str(found)
    assert 100 < errors < 200


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ((), "a file", r"plan should be an object, but got 'a file' of type str.*`json\.loads`"),
        (("version",), 2, r"plan\.version should be 1, but got 2 .* with this version of ckpt_hooks"),
        (("cost",), "x", r"plan\.cost should be one of \('operations', 'seconds'\), but got 'x'"),
        (("budget",), "lots", r"plan\.budget should be an integer from 0, but got 'lots'"),
        (("margin",), 1.0, r"plan\.margin should be a fraction from 0\.0 to below 1\.0, but got 1\.0"),
        (("polcy",), 1, r"arguments: polcy\. plan takes "),
        (("blocks",), [], r"plan\.blocks should be a list"),
        (("blocks", 0, "nam"), "x", r"plan\.blocks\[0\] takes name, .* Write name for nam"),
        (
            ("blocks", 1, "shapes", 0, 0, 0),
            "ops",
            r"plan\.blocks\[1\]\.shapes\[0\]\[0\]\[0\] should be the name of a dtype of torch",
        ),
        (
            ("blocks", 0, "kept"),
            [{"module": "0"}],
            r"plan\.blocks\[0\]\.kept\[0\] should be an object with operator, number, nbytes",
        ),
        (("others", 0, "budget"), -1, r"plan\.others\[0\]\.budget should be an integer from 0"),
    ],
)
def test_the_field_is_named(right, path, value, match):
    _, _, values = right
    values = copy.deepcopy(values) if path else value
    if path:
        around = values
        for key in path[:-1]:
            around = around[key]
        around[path[-1]] = value
    with pytest.raises(ValueError, match=match):
        Plan.from_json(values)


def test_an_operator_that_is_not_registered(right):
    """Custom operators are there once their library is imported."""
    _, _, values = right
    values = copy.deepcopy(values)
    block = next(block for block in values["blocks"] if block["kept"])
    block["kept"][0]["operator"] = "mine.double.default"
    with pytest.raises(ValueError, match=r"kept\[0\]\.operator should be a registered operator, but got 'mine\.double"):
        Plan.from_json(values)
    with torch.library._scoped_library("mine", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        assert Plan.from_json(values).blocks
