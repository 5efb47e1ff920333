"""An accelerator's error when memory has run out says which regions and lines hold most. Here a stand-in raises it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint, memory_ledger, trace
from tests.report.models import INPUTS, RUNS, Block, Net

HEAD = "When memory ran out, most was held by:"


def note_of(error):
    """Returns the note; on Python 3.10 the message has it."""
    return (error.__notes__[0] if hasattr(error, "add_note") else str(error).partition("\n")[2]).split("\n")


def run_out():
    raise torch.OutOfMemoryError("tried to allocate 20 GiB")


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net(Block, RUNS["checkpoint"])


def test_a_trace_names_the_regions_that_hold_most(net):
    results = []

    def step():
        results.append(net(torch.randn(INPUTS[Block])))
        run_out()

    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 20 GiB") as caught, trace() as found:
        step()
    head, *lines = note_of(caught.value)
    assert head == HEAD
    held = sum(sum(region.held_bytes.values()) for region in found.steps[0].regions)
    site = found.steps[0].regions[0].site
    # Random states are more than the inputs of this small net, and nothing takes them away.
    assert lines == [f"  {held / 1024:.1f} KiB  x3 layers.0-2 Block  {site}  region input, random state"]


def test_a_trace_leaves_out_regions_that_are_gone(net):
    def step():
        net(torch.randn(INPUTS[Block])).backward()
        run_out()

    with pytest.raises(torch.OutOfMemoryError) as caught, trace():
        step()
    assert not getattr(caught.value, "__notes__", [])
    assert str(caught.value) == "tried to allocate 20 GiB"


def test_other_errors_get_no_note(net):
    def step():
        results = net(torch.randn(INPUTS[Block]))
        raise RuntimeError(f"no {results.dtype}")

    with pytest.raises(RuntimeError, match=r"no torch\.float32") as caught, trace():
        step()
    assert not getattr(caught.value, "__notes__", [])


def test_a_ledger_names_lines_of_all_memory():
    layer, kept = nn.Linear(64, 64), []

    def step():
        for _ in range(3):
            kept.append(checkpoint(layer, torch.ones(64, 64)))
        run_out()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        memory_ledger(step)
    head, *lines = note_of(caught.value)
    line = f"test_out_of_memory.py:{step.__code__.co_firstlineno + 2}"
    assert head == HEAD
    inputs, results = (
        "offload_inputs=True, or one region around several of these",
        "delete it after use, with the list or attribute that has it",
    )
    assert lines[:2] == [
        f"  48.0 KiB  x3  code outside of modules  ones  {line}  region input: {inputs}",
        f"  48.0 KiB  x3  region Linear  linear  {line}  the program: {results}",
    ]
    assert len(lines) <= 3


def test_a_ledger_says_what_takes_memory_away():
    """Each of at most five causes has its line: layers alike are one, what backward has not freed yet is most likely saved."""
    torch.manual_seed(0)
    plain, x, results = Net(Block, RUNS["none"]), torch.randn(INPUTS[Block]), []

    def step():
        results.append(plain(x))
        run_out()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        memory_ledger(step)
    _, first, *others = note_of(caught.value)
    assert "  layers.0-2 Block  " in first
    assert "  models.py:" in first
    assert first.endswith('  the program: apply_checkpointing(model, "layers.*")')
    assert len(others) <= 4
    text = str(memory_ledger(lambda: plain(x).backward()))
    assert "what takes it away" in text
    assert 'apply_checkpointing(model, "layers.*")' in text
