"""``python -m bench.cuda``: that it says so where there is no device, and that its code runs, on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cuda import __main__ as program

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_without_a_device():
    """One sentence, and no failure."""
    command = [sys.executable, "-m", "bench.cuda"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "There is no CUDA device here, so there is nothing to measure.\n")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("table", ["one op", "recurrent region with dropout", "offload"])
def test_a_table(table, tmp_path, capsys):
    """Each way has times, a peak, and ratios to torch's; gradients are those without checkpointing."""
    file = tmp_path / "rows.json"
    assert program.main(["--device", "cpu", "--tiny", "--only", table, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    printed = capsys.readouterr().out
    assert {"none", "torch", "ours", "region"} <= {row["name"] for row in rows}
    for row in rows:
        assert {"wall_us", "host_us", "peak_bytes", "wall_ratio", "host_ratio", "peak_ratio"} <= row.keys()
        assert (row["exact"], row["note"]) in [(True, ""), (None, "")]
        assert f"  {row['name']} " in printed
    assert rows[[row["name"] for row in rows].index("torch")]["wall_ratio"] == 1


@pytest.mark.usefixtures("one_thread")
def test_a_table_that_fails(monkeypatch, capsys):
    """It is named with the error, and the exit status tells."""

    def fail(bench):
        raise RuntimeError("no luck")

    monkeypatch.setattr(program, "small_tables", lambda bench: [("unlucky", fail)])
    assert program.main(["--device", "cpu", "--tiny", "--only", "unlucky"]) == 1
    assert "RuntimeError: no luck" in capsys.readouterr().out
