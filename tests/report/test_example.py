"""The example that prints reports."""

from __future__ import annotations

import json
import re
import sys

import compare_memory
import inspect_memory
import pytest


def test_modes_are_compared(capsys):
    """Each holds less than plain autograd, and the selective mode more than the one which drops everything."""
    inspect_memory.main(["--json"])
    reports = json.loads(capsys.readouterr().out)
    held = {mode: report["residuals"]["added_bytes"] for mode, report in reports.items()}
    assert list(held) == ["none", "checkpoint", "region", "selective"]
    assert held["region"] < held["selective"] < held["none"]
    assert held["checkpoint"] < held["selective"]
    assert reports["selective"]["residuals"]["by_reason"]["policy"] > 0
    steps = {mode: report["trace"]["steps"] for mode, report in reports.items()}
    assert steps["checkpoint"][0]["recomputes"] == 4  # of replays there are more: each runs as far as a value needs
    assert not steps["none"]


def test_tables(capsys):
    inspect_memory.main(["--mode", "none,region"])
    text = capsys.readouterr().out
    assert "== none ==" in text
    assert re.search(r"x4 .* blocks\.0-3", text)
    assert "dropped, and brought back in backward:" in text
    assert "no region has run" in text
    assert "4 regions, dropped " in text


@pytest.mark.integrations
def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    inspect_memory.main(["--mode", "none,region,budget:0.4", "--plot", str(tmp_path / "steps.png")])
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert compare_memory.main([str(tmp_path / "front.svg")]) is None
    assert "nothing kept, all blocks" in capsys.readouterr().out
    assert (tmp_path / "front.svg").stat().st_size > 10_000


def test_a_budget_needs_a_picture(capsys):
    with pytest.raises(SystemExit):
        inspect_memory.main(["--mode", "budget:0.4"])
    assert "with --plot budget:SIZE" in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_the_work(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(inspect_memory, "ledger_of", None)
    with pytest.raises(SystemExit):
        inspect_memory.main(["--plot", "steps.png"])
    assert "pip install 'ckpt_hooks[plot]'" in capsys.readouterr().err
