"""What a terminal and the logger show of plans and estimates, by a clock of the test's own."""

from __future__ import annotations

import io
import logging
import sys
import types
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

from ckpt_hooks import estimate_memory, plan_memory
from ckpt_hooks.report.printing import format_bytes

pytestmark = pytest.mark.filterwarnings("ignore")


class Terminal(io.StringIO):
    """A terminal of one line: ``shown`` has what stood there after each flush."""

    def __init__(self):
        super().__init__()
        self.shown, self.line = [], ""

    def isatty(self):
        return True

    def write(self, text):
        assert text.startswith("\r")
        self.line = text[1:] + self.line[len(text) - 1 :]
        return super().write(text)

    def flush(self):
        self.shown.append(self.line)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, in a list."""
    now = [0.0]
    monkeypatch.setattr("ckpt_hooks.report.progress.monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not there
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))


def stepping(clock, seconds):
    """Returns a step which takes so long, in forward."""

    def step(model):
        x = model[:2](torch.ones(32, 16))
        clock[0] += seconds
        model[2:](x).sum().backward()

    return step


def planned(clock, seconds, **options):
    return plan_memory(model(), stepping(clock, seconds), 0.5, blocks=["*"], cost="operations", **options)


def test_a_plan_that_takes_long_is_one_line_that_goes(clock, terminal, caplog):
    """From two seconds on, within a step too; with the step, how many there are, and the peak so far."""
    with caplog.at_level(logging.INFO, "ckpt_hooks"), redirect_stderr(terminal):
        plan = planned(clock, 3.0)
    lines = [line.strip() for line in terminal.shown]
    assert lines[0] == "plan_memory: step 1 of at most 7"
    assert f"plan_memory: step 2 of at most 7, peak so far {format_bytes(plan.least_peak)}" in lines
    assert lines[-2:] == ["", ""]
    assert "\n" not in terminal.getvalue()
    assert lines.count("") == 2  # at the end
    assert caplog.messages[0] == "plan_memory: step 1 of at most 7"
    assert len(caplog.messages) == len({*lines} - {""})


def test_less_than_two_seconds_show_nothing(clock, terminal, caplog):
    with caplog.at_level(logging.INFO, "ckpt_hooks"), redirect_stderr(terminal):
        planned(clock, 0.2)
    assert terminal.shown == []
    assert "plan_memory: step 1 of at most 7" in caplog.messages


@pytest.mark.parametrize("off", ["progress", "no terminal", "another rank", "no stderr"])
def test_the_line_is_off_and_the_logger_is_told(off, clock, terminal, caplog, monkeypatch):
    if off == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    if off == "another rank":
        monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO, "ckpt_hooks"), redirect_stderr(None if off == "no stderr" else terminal):
        planned(clock, 3.0, progress=off != "progress")
    assert terminal.shown == []
    assert "plan_memory: step 1 of at most 7" in caplog.messages


def test_lines_within_a_step_are_a_tenth_of_a_second_apart(clock, terminal):
    def step(model):
        x = torch.ones(32, 16)
        for layer in model:
            clock[0] += 1.0
            x = layer(x)
        x.sum().backward()

    with redirect_stderr(terminal):
        plan_memory(model(), step, 0.5, blocks=["*"], cost="operations")
    first = [line for line in terminal.shown if line.startswith("plan_memory: step 1 ")]
    assert len(first) == 3  # after 2, 3 and 4 seconds, however many events there are


def test_dry_runs_and_estimates(clock, terminal, caplog):
    with caplog.at_level(logging.INFO, "ckpt_hooks"), redirect_stderr(terminal):
        planned(clock, 3.0, dry_run=True)
        estimate_memory(model(), stepping(clock, 3.0))
        count = len(terminal.shown)
        estimate_memory(model(), stepping(clock, 3.0), progress=False)
    lines = [line.strip() for line in terminal.shown]
    assert lines[0] == "plan_memory: step 1 of at most 7"
    assert "estimate_memory: step 2 of at most 2" in lines
    assert len(lines) == count
    assert caplog.messages.count("estimate_memory: step 2 of at most 2") == 2


def test_plans_of_other_shapes_and_budgets(clock, terminal):
    plan, found = planned(clock, 0.0), model()
    with redirect_stderr(terminal):
        plan.add(stepping(clock, 3.0), found)
        plan.replan(0.7, stepping(clock, 3.0), found)
    lines = {line.strip() for line in terminal.shown}
    assert {"plan.add: step 1 of at most 7", "plan.replan: step 1 of at most 5"} <= lines
    count = len(terminal.shown)
    with redirect_stderr(terminal):
        plan.add(stepping(clock, 3.0), found, progress=False)
        plan.replan(0.7, stepping(clock, 3.0), found, progress=False)
    assert len(terminal.shown) == count


def test_the_line_goes_with_an_exception(clock, terminal):
    def step(model):
        stepping(clock, 3.0)(model)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), redirect_stderr(terminal):
        plan_memory(model(), step, 0.5, blocks=["*"])
    assert terminal.shown[0].startswith("plan_memory: step 1")
    assert terminal.shown[-1].strip() == ""


def test_a_narrow_terminal_and_one_that_is_gone(clock, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with redirect_stderr(terminal):
        planned(clock, 3.0)
        assert {len(line) for line in terminal.shown} == {19}
        terminal.close()
        assert planned(clock, 3.0).is_measured


def test_tqdm_where_it_is_there(clock, terminal, monkeypatch):
    """Its line is used, without its thread."""
    calls = []

    class Bar:
        monitor_interval = 10

        def __init__(self, **options):
            calls.append(("open", options["file"], options["leave"], type(self).monitor_interval))

        def set_description_str(self, text):
            calls.append(text)

        def close(self):
            calls.append("close")

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    with redirect_stderr(terminal):
        planned(clock, 3.0)
    assert calls[:2] == [("open", terminal, False, 0), "plan_memory: step 1 of at most 7"]
    assert [call for call in calls if "plan_memory: step " not in call] == [calls[0], "close"]
    assert terminal.shown == []


def test_a_flag_that_is_none():
    with pytest.raises(TypeError, match="progress should be True or False, but got 3 of type int"):
        estimate_memory(model(), print, progress=3)
