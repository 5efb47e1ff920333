"""Ledgers and traces as snapshots of memory that torch's page reads, and as flat dicts of numbers."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viz

from ckpt_hooks import checkpoint, memory_ledger, trace
from ckpt_hooks.report import MemoryLedger
from ckpt_hooks.report.formats import MemoryEvent, frames_of, snapshot_of
from ckpt_hooks.report.ledger.rows import NOWHERE, Row
from ckpt_hooks.report.printing import Origin
from tests.report.models import INPUTS, RUNS, Block, Net

pytestmark = pytest.mark.filterwarnings("ignore")

# Opcodes that https://github.com/pytorch/pytorch/blob/main/torch/utils/viz/MemoryViz.js knows.
KNOWN = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "EMPTY_DICT"),
    *("EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE"),
    *("NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def stepped(run=RUNS["checkpoint"]):
    """Returns a step with an optimizer whose state is there."""
    torch.manual_seed(0)
    model, x = Net(Block, run), torch.randn(INPUTS[Block])
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    return step


def timeline(snapshot, device=0):
    """Returns the bytes in use before the events of a device and after each, as ``process_alloc_data`` of the page does."""
    alive, deltas, before = {}, [], 0
    for event in snapshot["device_traces"][device]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
            deltas.append(event["size"])
        elif event["action"] == "free_completed":
            before += 0 if event["addr"] in alive else event["size"]
            deltas.append(-alive.pop(event["addr"], event["size"]))
    blocks = [block for segment in snapshot["segments"] if segment["device"] == device for block in placed(segment)]
    before += sum(size for address, size in blocks if address not in alive)
    assert {*alive.items()} <= {*blocks}
    found = [before]
    for delta in deltas:
        found.append(found[-1] + delta)
    return found


def placed(segment):
    """Returns address and size of the blocks in use of a segment; the page adds up sizes for the addresses."""
    address, found = segment["address"], []
    for block in segment["blocks"]:
        assert block["address"] == address
        if block["state"] == "active_allocated":
            found.append((address, block["requested_size"]))
        address += block["size"]
    assert address == segment["address"] + segment["total_size"]
    return found


def read_by_torch(snapshot):
    """Has each reader of torch read a snapshot; returns the lines of the flame graph."""
    assert "total_allocated" in viz.segsum(snapshot)
    assert "TOTAL MEM" in viz.trace(snapshot)
    for plot in (viz.trace_plot(snapshot), viz.trace_plot(snapshot, plot_segments=True), viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in plot
    assert viz.segments(snapshot, str)
    assert viz.compare(snapshot["segments"], snapshot["segments"], str) == ""
    lines = viz.memory(snapshot, str)
    for device, events in enumerate(snapshot["device_traces"]):
        spans = [(one["address"], one["total_size"]) for one in snapshot["segments"] if one["device"] == device]
        # The page's view of segments looks for the one of each block that ever was.
        assert all(any(0 <= event["addr"] - address < size for address, size in spans) for event in events)
    assert viz.trace_plot(snapshot, filter_freed=True)  # which takes events away
    return lines


@pytest.mark.parametrize("run", ["none", "checkpoint", "region, policy", "checkpoint in region"])
def test_torchs_page_reads_a_ledger(run, tmp_path, capsys):
    """Its curve is the ledger's, from the memory in use before to the last change."""
    found = memory_ledger(stepped(RUNS[run]))
    snapshot = found.to_snapshot()
    curve = timeline(snapshot)
    assert curve == [found.base_nbytes + live for live in (0, *(change.live for change in found.changes))]
    assert max(curve) == found.peak.total_nbytes
    found.save_snapshot(tmp_path / "step.pickle")
    data = (tmp_path / "step.pickle").read_bytes()
    assert {opcode.name for opcode, *_ in pickletools.genops(data)} <= KNOWN
    assert data[1] == 4  # the protocol
    assert pickle.loads(data) == snapshot
    assert "made by" in read_by_torch(snapshot)
    assert "free_completed without" not in capsys.readouterr().out


@pytest.mark.parametrize(("freed", "left"), [(30, 40), (0, 40), (30, 0), (0, 0)])
def test_addresses_with_less_than_a_mib_between_are_a_segment(freed, left):
    """Memory from before has addresses above all others: some that is freed, and the rest at the end."""
    mib, stack = 2**20, frames_of(Origin(line="a.py:3"))
    assert stack[0] == {"name": "?", "filename": "a.py", "line": 3}
    assert [(one["filename"], one["line"]) for one in stack[1:]] == [("made by", 0)]
    apart = 260 + 2 * mib + 1
    spans = [(0, 100), (100, 20), (105, 5), (200, 50), (250 + mib, 10), (apart, mib + 1)]
    events = [MemoryEvent(True, address, nbytes, stack, at) for at, (address, nbytes) in enumerate(spans)]
    events += [
        MemoryEvent(False, 100, 20, stack, 9),
        MemoryEvent(False, 105, 5, stack, 9),
        MemoryEvent(False, 250 + mib, 10, stack, 9),
    ]
    events += [MemoryEvent(False, None, freed, [], 10)] if freed else []
    found = snapshot_of(events, 1, left)
    first, (*events, last) = found["device_traces"]
    assert first == []
    assert events[0] == {"action": "alloc", "addr": 0, "size": 100, "stream": 0, "frames": stack, "time_us": 0}
    older = apart + mib + 1 + 2 * mib
    assert (last["action"], last["addr"], last["size"]) == ("free_completed", *((older, 30) if freed else (250 + mib, 10)))
    blocks = {
        one["address"]: [(block["address"], block["size"], block["state"]) for block in one["blocks"]]
        for one in found["segments"]
    }
    use, free = "active_allocated", "inactive"
    expected = {
        0: [(0, 100, use), (100, 100, free), (200, 50, use), (250, mib + 10, free)],
        apart: [(apart, mib + 1, use)],
        older: [(older, freed, free)] * bool(freed) + [(older + freed, left, use)] * bool(left),
    }
    assert blocks == {address: of for address, of in expected.items() if of}
    heads = [
        (one["device"], one["stream"], one["total_size"], one["active_size"], one["segment_type"]) for one in found["segments"]
    ]
    assert heads[:2] == [(1, 0, 260 + mib, 150, "large"), (1, 0, mib + 1, mib + 1, "large")]
    assert heads[2:] == [(1, 0, freed + left, left, "small")] * bool(freed + left)


def test_a_stack_names_operator_line_modules_region_and_maker():
    (events,) = memory_ledger(stepped()).to_snapshot()["device_traces"]
    stacks = [[(one["filename"], one["name"]) for one in event["frames"]] for event in events if event["action"] == "alloc"]
    gelu = next(stack for stack in stacks if stack[0][1] == "aten::gelu" and stack[-1] == ("made by", "recompute"))
    assert gelu[1:] == [
        ("module", "layers.2.mlp.2 GELU"),
        ("module", "layers.2.mlp"),
        ("module", "layers.2"),
        ("module", "layers"),
        ("region", "layers.2 Block"),
        ("made by", "recompute"),
    ]
    assert any(stack[1:] == [("optimizer", "AdamW.step"), ("made by", "optimizer")] for stack in stacks)
    assert any(stack[1:3] == [("node", "GeluBackward0"), ("module", "layers.2.mlp.2 GELU")] for stack in stacks)
    alive = {}
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["frames"]
        assert event["frames"] == alive.get(event["addr"], [])  # a free has the stack of the allocation
    lines = [event["frames"][0] for event in events if event["frames"] and event["frames"][0]["name"] == "aten::sum"]
    assert (lines[0]["filename"], lines[0]["line"] > 0) == ("models.py", True)


def row(time, address, nbytes, total=0):
    return Row(time, NOWHERE, None, address, nbytes, torch.device("cuda", 1), total)


def test_an_accelerators_ledger():
    """Under its number; what is freed of older memory, and what is left, was there before."""
    ledger = MemoryLedger()
    ledger.fill([row(1000, 4096, 512, 2560), row(2000, 8192, -1024, 1536), row(3000, 4096, -512, 1024)], {})
    snapshot = ledger.to_snapshot()
    assert snapshot["device_traces"][0] == []
    assert [event["time_us"] for event in snapshot["device_traces"][1]] == [1, 2, 2, 3, 3]
    assert timeline(snapshot, 1) == [2048, 2560, 1536, 1024]
    read_by_torch(snapshot)


def test_memory_that_another_thread_freed():
    """The profiler saw no end of the first two; blocks lie beside each other all the same."""
    ledger = MemoryLedger()
    ledger.fill([row(1, 4096, 512, 512), row(2, 4608, 512, 1024), row(3, 4096, 2048, 2048)], {})
    snapshot = ledger.to_snapshot()
    (segment,) = snapshot["segments"]
    assert placed(segment) == [(4096, 2048)]
    assert segment["allocated_size"] == 2048
    read_by_torch(snapshot)


def test_a_ledger_of_a_byte():
    (events,) = memory_ledger(lambda: torch.ones(1, dtype=torch.int8)).to_snapshot()["device_traces"]
    assert [(event["action"], event["size"]) for event in events if event["action"] != "free_requested"] == [
        ("alloc", 1),
        ("free_completed", 1),
    ]


def test_a_ledger_of_nothing():
    older = torch.zeros(64)
    found = memory_ledger(lambda: None)
    assert found.base_nbytes >= older.nbytes
    assert timeline(found.to_snapshot()) == [found.base_nbytes]
    assert found.scalars() == {"peak": 0, "base": found.base_nbytes, "recomputed": 0, "peak/older": found.base_nbytes}


@pytest.mark.parametrize("run", ["none", "checkpoint", "region, policy"])
def test_scalars_of_a_ledger_add_up(run):
    found = memory_ledger(stepped(RUNS[run]))
    scalars = found.scalars()
    assert scalars["peak"] == found.peak.nbytes
    assert sum(one for name, one in scalars.items() if name.startswith("peak/")) == found.peak.total_nbytes
    of_blocks = {name: one for name, one in scalars.items() if name.startswith("recomputed/")}
    assert sum(of_blocks.values()) == scalars["recomputed"]
    assert {*of_blocks} == ({f"recomputed/layers.{number}" for number in range(3)} if run != "none" else set())
    assert all(type(one) is int for one in scalars.values())


def traced():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    x = torch.randn(4, 8, requires_grad=True)
    with trace() as found:
        for _ in range(2):
            y = x
            for layer in model:
                y = checkpoint(layer, y)
            y.sum().backward()
            found.step()
    return found


def test_torchs_page_reads_a_trace(tmp_path):
    """A step takes what its regions hold, and then nothing."""
    found = traced()
    held = sum(found.steps[0].held_bytes.values())
    snapshot = found.to_snapshot()
    curve = timeline(snapshot)
    assert held > 0
    assert (max(curve), curve.count(held), curve[-1]) == (held, 2, 0)
    (events,) = snapshot["device_traces"]
    assert [one["filename"] for one in events[0]["frames"]] == ["test_snapshots.py", "region"]
    found.save_snapshot(tmp_path / "trace.pickle")
    assert pickle.loads((tmp_path / "trace.pickle").read_bytes()) == snapshot
    read_by_torch(snapshot)


def test_scalars_of_a_trace_are_those_of_its_latest_step():
    found = traced()
    step, scalars = found.steps[-1], found.scalars()
    assert scalars == step.scalars()
    expected = step.dropped_bytes, sum(step.held_bytes.values()), step.offloaded_bytes, step.recomputes
    assert tuple(scalars[name] for name in ("dropped", "held", "offloaded", "recomputes")) == expected
    assert scalars["recomputes"] == 3
    assert sum(one for name, one in scalars.items() if name.startswith("dropped/")) == step.dropped_bytes > 0
    with trace() as nothing:
        pass
    assert {*nothing.scalars().values()} == {0}


def test_a_path_that_is_none():
    with pytest.raises(TypeError, match="path should be the path of a file, but got 3 of type int"):
        memory_ledger(lambda: None).save_snapshot(3)
