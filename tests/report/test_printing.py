"""Reports as they are printed: a table each, a line in ``repr``, and HTML in notebooks."""

from __future__ import annotations

import html

import pytest
import torch
from torch import nn

import ckpt_hooks
from ckpt_hooks import apply_checkpointing, checkpoint, checkpoint_region
from ckpt_hooks.report import saved_residuals, saved_tensors_report, trace
from tests import golden
from tests.fake_transformers import Model as Transformer
from tests.measure import leaf

pytestmark = pytest.mark.usefixtures("_no_terminal")


@pytest.fixture
def _no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


class Model(nn.Module):
    """Twelve layers alike, with names of some length."""

    def __init__(self, run=None):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16))  # noqa: E731
        self.encoder_layers_of_the_model = nn.ModuleList(block() for _ in range(12))
        self.run = run or (lambda layer, x: layer(x))

    def forward(self, x):
        for layer in self.encoder_layers_of_the_model:
            x = self.run(layer, x)
        return x


def reports():
    """Returns an object of each kind that prints as a report, by the name of the kind."""
    x = torch.rand(4, 16, requires_grad=True)
    model = Model(checkpoint)
    with trace() as traced:
        loss = model(x).sum()
        live = saved_tensors_report(loss, known=(model, x))
        loss.backward()
        traced.step()
    transformer = Transformer()
    found = {
        "saved_residuals": saved_residuals(model, x),
        "saved_tensors_report": live,
        "trace": traced,
        "step of a trace": traced.steps[0],
        "apply_checkpointing": apply_checkpointing(Model(), nn.Sequential),
        "enable_in_transformers": ckpt_hooks.enable_in_transformers(transformer),
    }
    _alive[:] = loss, transformer
    return found


_alive: list[object] = []  # for reports on what lives


KINDS = [
    "saved_residuals",
    "saved_tensors_report",
    "trace",
    "step of a trace",
    "apply_checkpointing",
    "enable_in_transformers",
]


@pytest.mark.parametrize("kind", KINDS)
def test_repr_is_a_line_and_print_a_table(kind):
    report = reports()[kind]
    (line,) = repr(report).splitlines()
    assert len(line) < 160
    assert line.startswith(f"<{type(report).__name__}: ")
    headline, empty, *rows = str(report).splitlines()
    assert headline in line
    assert empty == ""
    assert len(rows) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_text(kind):
    golden.check(kind.replace(" ", "_"), str(reports()[kind]))


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_as_wide_as_the_terminal(kind, columns, monkeypatch):
    report = reports()[kind]
    whole = str(report).splitlines()
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(report).splitlines()
    assert max(map(len, lines[1:])) <= columns
    assert len(lines) == len(whole)  # rows are not left out
    if max(map(len, whole[1:])) <= columns:
        assert lines == whole


@pytest.mark.parametrize("kind", KINDS)
def test_notebooks_get_the_tables(kind):
    report = reports()[kind]
    assert html.unescape(report._repr_html_()) == f"<pre>{report}</pre>"
    assert "<policy" not in report._repr_html_()  # as a tag of somebody's


def test_tensors_in_one_storage_have_a_row_for_each_shape():
    x = leaf(4, 4)
    y = x.exp()
    report = saved_tensors_report(y, y.t() @ x, y.sin())
    text = str(report)
    assert text.count("float64[4, 4]") == 2  # of y, once, and x
    (row,) = (line for line in text.splitlines() if "ExpBackward0" in line)
    assert "ExpBackward0, MmBackward0, SinBackward0" in row


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["block.1", "head\n"], "block.1 ... head\\n"),
        (["blk.1", "head.2"], "blk.1 ... head.2"),
        (["layers.1", "layers.*"], "layers.1 ... layers.*"),
        (["layers.0", "layers.1", "layers.3"], "layers.0-1,3"),
    ],
    ids=["newline", "two patterns", "star", "one pattern"],
)
def test_names_of_regions_that_share_a_storage_are_folded_if_they_are_of_one_pattern(names, folded):
    def function(x):
        h = x.exp() * 2
        results = []
        for name in names:
            with checkpoint_region(name=name):
                results.append(h.sin())
        return sum(result.sum() for result in results)

    assert folded in str(saved_residuals(function, leaf(3, 8)))


def test_a_narrow_table(monkeypatch):
    """Names are cut in their middle, other cells never; then the last columns go."""
    with checkpoint_region(name="a.name.of.thirty.characters.00"):
        y = (leaf(4) * 2).exp().sin()
    rows = []
    for columns in (200, 64, 50, 1):
        monkeypatch.setenv("COLUMNS", str(columns))
        rows.append(str(saved_tensors_report(y)).splitlines()[-1].split())
    assert rows.pop() == ["32", "B"]
    assert rows == [
        ["32", "B", "?", "dropped", "exp", "a.name.of.thirty.characters.00", "SinBackward0"],
        ["32", "B", "?", "dropped", "exp", "a.name.of.thir….characters.00"],
        ["32", "B", "?", "dropped", "exp"],
    ]


def test_a_tensor_of_the_shape_of_a_weight_is_dropped():
    """A weight whose product has no other gradient is not saved."""
    weight, x = nn.Parameter(torch.rand(16, 16)), torch.rand(16, 16)
    with trace() as found:
        checkpoint(lambda x: torch.nn.functional.linear(x * 2, weight).sum(), x)
    y = checkpoint(lambda x: torch.nn.functional.linear(x * 2, weight).sum(), x)
    assert saved_tensors_report(y, known=[x, weight]).dropped_bytes >= found.steps[0].dropped_bytes == x.nbytes
