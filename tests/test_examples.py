"""Examples and documentation, run as a reader runs them."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest
import torch

import ckpt_hooks

ROOT = pathlib.Path(__file__).parent.parent
TINY = ["--steps", "3", "--layers", "4", "--width", "16", "--heads", "2", "--context", "16", "--batch", "2"]


def run_charlm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "train_charlm.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_charlm_trains_alike_in_every_mode():
    """Losses are bitwise equal with dropout, memory is no more than torch's, JSON has what it says."""
    modes = ["none", "torch", "checkpoint", "sequential", "selective", "region", "budget:0.3"]
    result = run_charlm("--mode", ",".join(modes), *TINY, "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["mode"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == modes
    assert all(row["losses"] == rows["none"]["losses"] for row in rows.values())
    assert len(rows["none"]["losses"]) == 3
    assert rows["checkpoint"]["peak_bytes"] <= rows["torch"]["peak_bytes"] < rows["none"]["peak_bytes"]
    assert rows["region"]["peak_bytes"] <= rows["budget:0.3"]["peak_bytes"] < rows["none"]["peak_bytes"]
    assert all(set(row) == {"mode", "losses", "peak_bytes", "seconds_per_step"} for row in rows.values())


@pytest.mark.slow
def test_long_context_in_the_memory_of_slices(capsys):
    """Of a vocabulary of 32,000, by modes: slices hold a sixth of what layers as regions hold, bitwise the loop's."""
    import long_context

    tiny = ["--layers", "2", "--width", "32", "--context", "256"]
    peaks = {found.mode: found.peak_bytes for found in long_context.main(tiny)}
    assert list(peaks) == list(long_context.MODES)
    assert peaks["chunks"] < peaks["torch"] / 5 < peaks["none"] / 5
    *table, verdict = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["mode", *long_context.MODES]
    assert verdict == "loss and gradients of chunks bitwise those of the loop: yes"
    with pytest.raises(SystemExit):
        long_context.main(["--mode", "nothing"])
    assert "choose from none, torch, loop, chunks" in capsys.readouterr().err


@pytest.mark.distributed
def test_fsdp_trains_alike_in_every_mode():
    """In two processes, with a region for each unit and with one for all."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no process groups")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    tiny = ["--steps", "2", "--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--batch", "2"]
    found = subprocess.run(
        [*command, str(ROOT / "examples" / "train_fsdp.py"), *tiny], check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "losses of all modes bitwise equal: yes" in found.stdout
    assert len(found.stdout.splitlines()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable"])
def test_charlm_trains_alike_under_every_policy(policy):
    """And keeps no more than torch does under the same, where torch gets through: not if dropout writes to what is kept."""
    compared = policy != "everything_saveable"
    modes = ["none", *(["torch_selective"] if compared else []), "selective", f"region:{policy}"]
    result = run_charlm("--mode", ",".join(modes), "--policy", policy, *TINY, "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["mode"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == modes
    assert all(row["losses"] == rows["none"]["losses"] for row in rows.values())
    assert not compared or rows["selective"]["peak_bytes"] <= rows["torch_selective"]["peak_bytes"]


@pytest.mark.slow
def test_charlm_prints_a_table():
    modes = ["none", "checkpoint", "region:dots_saveable", "region:save_compute_and_communication"]
    result = run_charlm("--mode", ",".join(modes), *TINY)
    assert result.returncode == 0, result.stderr
    *table, verdict = result.stdout.splitlines()
    assert [line.split()[0] for line in table] == ["mode", *modes]
    assert len({len(line) for line in table}) == 1
    assert verdict == "losses of all modes bitwise equal: yes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "nothing"], "nothing"),
        (["--mode", "none,region:dots"], "region:everything_saveable,region:nothing_saveable,region:dots_saveable,"),
        (["--width", "10", "--heads", "3"], "--width"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_charlm_refuses_with_a_reason(arguments, message):
    result = run_charlm(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


#: Python blocks of the README.
SNIPPETS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_snippets_of_the_readme_run(capsys):
    """Python blocks of the README run in order, in one namespace."""
    assert SNIPPETS
    namespace: dict[str, object] = {}
    torch.manual_seed(0)
    for block in SNIPPETS:
        exec(compile(block, "README.md", "exec"), namespace)


MODULES = ["ckpt_hooks", *(name for _, name, _ in pkgutil.walk_packages(ckpt_hooks.__path__, "ckpt_hooks."))]


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings_run(module):
    torch.manual_seed(0)
    default = ckpt_hooks.DefaultDeviceType._default_device_type
    try:
        found = importlib.import_module(module)
        failed, attempted = doctest.testmod(found, optionflags=doctest.ELLIPSIS)
    finally:
        ckpt_hooks.DefaultDeviceType._default_device_type = default
    assert failed == 0
    assert (attempted > 0) is (" >>> " in inspect.getsource(found))
