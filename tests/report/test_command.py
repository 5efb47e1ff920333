"""``python -m ckpt_hooks.report``: scripts run as by ``python script.py``, and the ledger of one of their steps."""

from __future__ import annotations

import pathlib
import pickle
import re
import subprocess
import sys

import pytest

from ckpt_hooks.report.__main__ import main

ROOT = pathlib.Path(__file__).parent.parent.parent
pytestmark = pytest.mark.filterwarnings("ignore")

# Step n holds n MiB in forward.
SCRIPT = """
import sys
import torch
from beside_the_script import WIDTH

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizers = [torch.optim.AdamW(part.parameters()) for part in ({parts})]

def train(number):
    for _ in range({microbatches}):
        held = torch.zeros(number * 2**18)
        loss = model(torch.rand(4, WIDTH)).sum()
        loss.backward()
        del held
    for optimizer in {chosen}:
        {before}
        optimizer.step()
        optimizer.zero_grad()
    print("step", number, loss.item().hex())

for number in range(1, 7):
    train(number)
{after}
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Returns what writes the script, and has the process as before when the test has ended."""
    for owner, name in ((sys, "argv"), (sys, "path")):
        monkeypatch.setattr(owner, name, [*getattr(owner, name)])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    monkeypatch.delitem(sys.modules, "beside_the_script", raising=False)
    (tmp_path / "beside_the_script.py").write_text("WIDTH = 8\n")

    def write(text=SCRIPT, **changes):
        path = tmp_path / "train.py"
        values = {"parts": "model,", "microbatches": 1, "chosen": "optimizers", "before": "", "after": "", **changes}
        path.write_text(re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), text))
        return str(path)

    return write


def steps_in(out):
    return [int(number) for number in re.findall(r"^step (\d+)", out, re.MULTILINE)]


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_the_ledger_of_a_step_and_the_end(number, script, capsys):
    """The script ends within ``optimizer.step()``."""
    main(["--step", str(number), script()])
    out = capsys.readouterr().out
    assert steps_in(out) == [*range(1, number)]
    assert f"peak {number}.0 MiB above" in out
    assert all(words in out for words in ("forward", "backward", "optimizer", "held by", "what takes it away"))
    assert len(re.findall("^peak ", out, re.MULTILINE)) == 1


def test_the_script_goes_on_with_the_same_results(script, capsys):
    plain = subprocess.run([sys.executable, "-W", "ignore", script()], check=True, capture_output=True, text=True).stdout
    main(["--continue", script()])
    out = capsys.readouterr().out
    assert out.startswith(plain)
    assert steps_in(out) == [*range(1, 7)]
    assert out.removeprefix(plain).startswith("peak 3.0 MiB above")


@pytest.mark.parametrize(("parts", "microbatches"), [("model[0], model[2]", 1), ("model[0], model[2]", 3), ("model,", 2)])
def test_optimizers_in_a_row_and_microbatches_are_one_step(parts, microbatches, script, capsys, tmp_path):
    main(["--snapshot", str(tmp_path / "step.pickle"), script(parts=parts, microbatches=microbatches)])
    out = capsys.readouterr().out
    assert steps_in(out) == [1, 2]
    assert "peak 3.0 MiB above" in out
    (events,) = pickle.loads((tmp_path / "step.pickle").read_bytes())["device_traces"]
    assert sum(one["action"] == "alloc" and one["size"] == 3 * 2**20 for one in events) == microbatches
    lines = {frame["line"] for one in events for frame in one["frames"][:1] if frame["name"].startswith("aten::")}
    assert lines  # of the script


@pytest.mark.parametrize(
    ("replaced", "chosen", "number", "peak"),
    [
        (("", ""), "optimizers[number % 2 :][:1]", 2, 2),  # taking turns: each call of a module begins a step
        (("", ""), "optimizers[: 1 + number % 2]", 2, 3),  # step 2 has one optimizer fewer, so step 3 ends the ledger
        (("model(torch.rand(4, WIDTH))", "(model[0].weight @ torch.rand(WIDTH, 4)).tanh()"), "optimizers[:1]", 1, 1),
        (("model(torch.rand(4, WIDTH))", "(model[0].weight @ torch.rand(WIDTH, 4)).tanh()"), "optimizers[:1]", 4, 4),
        (
            ("    for _ in", "    thread = Thread(target=optimizers[1].step)\n    thread.start(), thread.join()\n    for _ in"),
            "optimizers[:1]",
            4,
            4,
        ),
    ],
    ids=["turns", "fewer", "no module, 1", "no module, 4", "another thread"],
)
def test_a_step_ends_with_its_last_optimizer(replaced, chosen, number, peak, script, capsys):
    text = SCRIPT.replace("import sys", "import sys\nfrom threading import Thread").replace(*replaced)
    main(["--step", str(number), script(text, parts="model[0], model[2]", chosen=chosen)])
    out = capsys.readouterr().out
    assert steps_in(out) == [*range(1, peak)]
    assert f"peak {peak}.0 MiB above" in out


def test_a_script_sees_itself_as_the_program(script, capsys):
    """Its arguments, options among them, its name, its file, the folder of its imports, and its classes for pickle."""
    text = """
import pickle, sys
import beside_the_script
class Own:
    pass
def annotated(x: Own): ...
assert annotated.__annotations__ == {"x": Own}
assert type(pickle.loads(pickle.dumps(Own()))) is Own
assert sys.modules["__main__"].Own is Own
assert __name__ == "__main__" and __file__ == sys.argv[0]
print(sys.argv[1:])
"""
    main([script(text.replace("{", "{{").replace("{{", "{")), "--step", "9", "-h", "last"])
    assert capsys.readouterr().out == "['--step', '9', '-h', 'last']\n"


def test_exits_and_exceptions_go_through(script, capsys):
    with pytest.raises(SystemExit) as found:
        main(["--continue", script(after="sys.exit(3)")])
    assert found.value.code == 3
    assert "peak 3.0 MiB above" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        main(["--step", "9", script(after="1 / 0")])
    captured = capsys.readouterr()
    assert "peak " not in captured.out
    assert captured.err.endswith("No ledger: the script ended after step 6. Pass a lower --step.\n")


def test_a_step_that_fails_has_a_ledger(script, capsys):
    with pytest.raises(MemoryError):
        main([script(before="if number == 3: raise MemoryError")])
    assert "peak 3.0 MiB above" in capsys.readouterr().out


def test_a_profiler_of_the_scripts_own_comes_first(script, capsys):
    """In step 2, at whose end a ledger was to begin: step 4 is the first for which there is none."""
    text = SCRIPT.replace("    train(number)", "    profiled(number)").replace(
        "for number in",
        "def profiled(number):\n"
        "    if number > 2:\n"
        "        return train(number)\n"
        "    with torch.autograd.profiler.profile(profile_memory=True):\n"
        "        train(number)\n"
        "for number in",
    )
    main([script(text)])
    out = capsys.readouterr().out
    assert steps_in(out) == [1, 2, 3]
    assert "peak 4.0 MiB above" in out


def test_steps_inside_of_backward_are_none(script, capsys):
    text = SCRIPT.replace(
        "def train",
        "own = torch.optim.SGD(model.parameters())\n"
        "model[0].weight.register_post_accumulate_grad_hook(lambda _: own.step())\n"
        "def train",
    )
    main([script(text)])
    out = capsys.readouterr().out
    assert steps_in(out) == [1, 2]
    assert "peak 3.0 MiB above" in out


def test_other_ranks_print_nothing(script, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    main([script()])
    captured = capsys.readouterr()
    assert steps_in(captured.out) == [1, 2]
    assert "peak" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "argument script: 'nothing.py' is no file"),
        (["--step", "0", __file__], "argument --step: got 0, expected 1 or more"),
        ([], "the following arguments are required: script"),
    ],
)
def test_wrong_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as found:
        main(arguments)
    assert found.value.code == 2
    assert words in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as found:
        main(["--help"])
    assert found.value.code == 0
    out = capsys.readouterr().out
    assert all(words in out for words in ("--step", "--continue", "--snapshot", "script"))


@pytest.mark.slow
def test_the_command_line_on_the_example():
    tiny = ["--layers", "4", "--width", "16", "--heads", "2", "--context", "16", "--batch", "2"]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ckpt_hooks.report", "examples/train_charlm.py", "--mode", "checkpoint", *tiny],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.stdout.startswith("peak ")
    assert "recompute of blocks.0 Block" in result.stdout
    assert "train_charlm.py:" in result.stdout
    assert "what takes it away" in result.stdout
    assert "final loss" not in result.stdout  # it has ended before
