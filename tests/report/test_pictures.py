"""Pictures of ledgers: their bands are all of the memory, and their texts can be read."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ckpt_hooks import apply_checkpointing, checkpoint_region, memory_ledger
from ckpt_hooks.report import compare
from ckpt_hooks.report.ledger.pictures import BandKind, ModelBlocks, bands_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Layer(nn.Module):
    """Two products, with something between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Layers in a container, between two others."""

    def __init__(self, count, run=lambda layer, x: layer(x)):
        super().__init__()
        self.run = run
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(Layer() for _ in range(count))
        self.body.first, self.head = nn.Linear(16, 16), nn.Linear(16, 400)

    def forward(self, x):
        x = self.body.first(x)
        for layer in self.body.layers:
            x = self.run(layer, x)
        return self.head(x).sum()


def in_block(layer, x):
    with checkpoint_region():
        return layer(x)


def found(count=4, select=None, run=None, **options):
    """Returns the ledger of a step."""
    torch.manual_seed(0)
    model, x = Net(count) if run is None else Net(count, run), torch.randn(64, 16)
    if select is None:
        return memory_ledger(lambda: model(x).backward())
    with apply_checkpointing(model, select, **options):
        return memory_ledger(lambda: model(x).backward())


LAYERS = [f"body.layers.{number}" for number in range(4)]


def test_bands_are_all_of_the_memory():
    ledgers = [found(), found(select="body.layers.*"), found(run=in_block)]
    blocks = ModelBlocks(ledgers, 9)
    assert blocks.labels == ["body.first", *LAYERS, "head"]
    for number, ledger in enumerate(ledgers):
        moments, bands = bands_of(ledger, number, blocks, 10**6)
        assert moments == list(range(len(ledger.changes)))
        assert [sum(values) for values in zip(*(band.nbytes for band in bands), strict=True)] == [
            ledger.base_nbytes + change.live for change in ledger.changes
        ]
        order = [(band.part, band.block) for band in bands]
        again = [block for part, block in order if part is BandKind.AGAIN]
        assert again == ([] if number == 0 else [1, 2, 3, 4])
        assert order[0] == (BandKind.OLDER, None)
        assert order[-1] == (BandKind.BACKWARD, None)
        for block in again:  # what runs again lies on its block
            assert order.index((BandKind.AGAIN, block)) == order.index((BandKind.BLOCK, block)) + 1


def test_fewer_moments_keep_the_highest():
    ledger = found(8)
    blocks = ModelBlocks([ledger], 9)
    moments, bands = bands_of(ledger, 0, blocks, 20)
    assert len(moments) <= 22
    totals = [sum(values) for values in zip(*(band.nbytes for band in bands), strict=True)]
    assert totals == [ledger.base_nbytes + ledger.changes[at].live for at in moments]
    assert max(totals) == ledger.peak.total_nbytes


def test_many_equal_layers_share_bands():
    labels = ModelBlocks([found(20)], 9).labels
    assert len(labels) <= 9
    assert labels[1] == "body.layers.0-2"
    assert labels[-2] == "body.layers.18-19"


def test_memory_of_no_block():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        x = torch.randn(64, 8).exp()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    ledger = memory_ledger(step)
    _, bands = bands_of(ledger, 0, ModelBlocks([ledger], 9), 10**6)
    assert [band.part for band in bands] == [
        BandKind.OLDER,
        BandKind.GRADIENTS,
        BandKind.OPTIMIZER,
        BandKind.OUTSIDE,
        BandKind.BACKWARD,
    ]
    nothing = memory_ledger(lambda: None)
    assert bands_of(nothing, 0, ModelBlocks([nothing], 9), 9)[1][0].nbytes == [nothing.base_nbytes] * 2


# With matplotlib


def texts_of(figure):
    """Returns the boxes of all texts that are seen, in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = []
    for axes in figure.axes:
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        low, high = axes.get_ylim()
        ticks = [one for one in ticks if one not in axes.get_yticklabels() or low <= one.get_position()[1] <= high]
        found += [*axes.texts, *ticks, axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title]
    found += [text for legend in figure.legends for text in legend.get_texts()]
    return {(number, one.get_text()): one.get_window_extent(renderer) for number, one in enumerate(found) if one.get_text()}


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.mark.integrations
def test_texts_lie_apart_and_in_the_picture(matplotlib, tmp_path):
    picture = compare(
        tmp_path / "steps.png", none=found(12), regions=found(12, "body.layers.*"), blocks=found(12, run=in_block)
    )
    boxes = texts_of(picture.figure)
    assert len(boxes) > 20
    for (one, box), (other, second) in itertools.combinations(boxes.items(), 2):
        assert not box.overlaps(second), (one, other)
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= 1000 for box in boxes.values())
    words = [text for _, text in boxes]
    assert words.count("backward") == words.count("forward") == 3
    assert sum(text.startswith("peak ") for text in words) == 3
    image = __import__("matplotlib.image").image.imread(tmp_path / "steps.png")
    assert image.shape[1] == 1000


@pytest.mark.integrations
def test_the_peak_stands_as_a_bar_beside_the_plot(matplotlib):
    """However few moments a peak lasts: its bands are all of the memory, those that are seen with their names."""
    ledger = found(12)
    plot, beside = ledger.plot().figure.axes
    unit = {"KiB": 2**10, "MiB": 2**20}[plot.get_ylabel().split()[0]]
    heights = [patch.get_height() * unit for patch in beside.patches]
    assert sum(heights) == pytest.approx(ledger.peak.total_nbytes)
    words = [text.get_text() for text in beside.texts]
    assert f"from before the step  {ledger.peak.older_nbytes / 1024:.1f} KiB" in words
    assert 3 < len(words) <= len(heights)


@pytest.mark.integrations
def test_colours_are_told_apart_in_grey(matplotlib):
    from ckpt_hooks.report.ledger.pictures import _colours

    for count in range(2, 10):
        greys = [
            0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue in _colours([str(one) for one in range(count)])
        ]
        assert greys == sorted(greys)
        assert min(two - one for one, two in itertools.pairwise(greys)) > 0.04


@pytest.mark.integrations
def test_equal_pictures_make_equal_files(matplotlib, tmp_path):
    ledger = found()
    for name in ("one.svg", "two.svg"):
        ledger.plot(tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    picture = ledger.plot()
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert not __import__("matplotlib._pylab_helpers")._pylab_helpers.Gcf.figs  # no window, and nothing kept alive
