"""Pictures of ledgers: a panel for each, under each other on one scale. Matplotlib, an extra, is imported when one is drawn."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_hooks.report.formatting import format_bytes

from .bands import OTHERS, Band, BandKind, Blocks, bands_of
from .data import LedgerData, maker_in_words

_SCALES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_MOST_BLOCKS = 9  # colours that are told apart, in grey too
_MOST_MOMENTS = 700  # about the pixels of an axis
_NARROW = 0.06  # of the axis: a phase without a name
_GREYS = {
    BandKind.OLDER: "0.87",
    BandKind.GRADIENTS: "black",
    BandKind.OPTIMIZER: "0.45",
    BandKind.OUTSIDE: "0.70",
    BandKind.BACKWARD: "#d1495b",
}
_GREY = (0.55, 0.55, 0.55)
_LIGHTER = 0.55


class Picture:
    """A picture. Notebooks show it.

    Attributes:
        figure: The figure of matplotlib, to change or to save otherwise.
    """

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file; the suffix says the format, as in ``"step.svg"``.

        Args:
            path: The file. Equal pictures make equal files.
        """
        import matplotlib as mpl

        with mpl.rc_context({"svg.hashsalt": "ckpt_hooks"}):
            self.figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png")
        return file.getvalue()


def compare(path: str | os.PathLike[str] | None = None, /, **ledgers: LedgerData) -> Picture:
    """Draws several ledgers under each other, on one scale and with the same colours.

    A band is the memory of a block of the model: the outermost region around a module in any of the ledgers, or else the module
    by its name up to the first number. What a recompute makes is lighter and hatched. Gradients, memory from before, and memory
    outside of blocks are grey. Equal layers share a band where there are many.

    Args:
        path: A file to write, as in ``"steps.png"`` or ``"steps.svg"``; None to write none.
        **ledgers: The ledgers, by the titles of their panels.

    Returns:
        The :class:`Picture`, which notebooks show.

    Raises:
        ImportError: If matplotlib is absent.
        ValueError: If there are no ledgers.

    Example:
        >>> from ckpt_hooks import apply_checkpointing, memory_ledger
        >>> from ckpt_hooks.report import compare
        >>> def draw(model, step):
        ...     plain = memory_ledger(step)
        ...     with apply_checkpointing(model, "layers.*"):
        ...         compare("steps.png", none=plain, regions=memory_ledger(step))
    """
    if not ledgers:
        raise ValueError("compare got no ledgers. Give one or several by the titles of their panels: compare(plain=found).")
    picture = panels(ledgers)
    if path is not None:
        picture.save(path)
    return picture


def panels(ledgers: Mapping[str, LedgerData]) -> Picture:
    """Returns a picture with a panel for each ledger, of a title unless that is empty."""
    found = [*ledgers.values()]
    blocks = Blocks(found, _MOST_BLOCKS)
    figure = figure_of(10, 0.9 + 2.7 * len(found))
    all_axes = figure.subplots(len(found), 1, sharey=True, squeeze=False)[:, 0]
    width = max(1, *(len(ledger.changes) for ledger in found))
    colours = _colours(blocks.labels)
    most = max(ledger.base_nbytes + max(0, ledger.peak.nbytes) for ledger in found)
    unit, size = scale_of(most)
    shown: dict[tuple[BandKind, int | None], None] = {}
    for number, (axes, (title, ledger)) in enumerate(zip(all_axes, ledgers.items(), strict=True)):
        moments, bands = bands_of(ledger, number, blocks, _MOST_MOMENTS)
        _draw_bands(axes, moments, bands, colours, size)
        shown |= dict.fromkeys((band.part, band.block) for band in bands)
        _draw_phases(axes, ledger)
        _draw_peak(axes, ledger, size, width)
        axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
        axes.set_ylabel(f"{unit} in use")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, width)
    # Much memory from before, as of parameters and optimizers, is cut off below.
    older = min(one.base_nbytes + sum(of.nbytes for of in one.changes if of.allocation is None) for one in found)
    floor = older - (most - older) // 8 if older > 2 * (most - older) else 0
    all_axes[0].set_ylim(floor / size, (most + 0.18 * (most - floor)) / size)
    all_axes[-1].set_xlabel("allocations and frees, in order")
    handles = [*_legend(shown, blocks, colours, "" if not floor else f", up from {format_bytes(floor)}")]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    return Picture(figure)


def figure_of(width: float, height: float) -> Any:
    """Returns a figure of matplotlib, of 100 pixels an inch, which no window shows."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib, which is an extra of this package. Write `pip install 'ckpt_hooks[plot]'`."
        ) from error
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def scale_of(nbytes: int) -> tuple[str, int]:
    """Returns the unit for an axis up to some bytes, and the bytes of the unit."""
    return next((scale for scale in _SCALES if nbytes >= scale[1]), _SCALES[-1])


def _colours(labels: Sequence[str]) -> list[tuple[float, ...]]:
    """Returns colours from dark to light, whose neighbours differ in grey too; a grey for all small blocks together."""
    import matplotlib as mpl

    colours, count = mpl.colormaps["viridis"], len(labels) - (OTHERS in labels)
    found = iter([colours(0.20 + 0.75 * number / max(1, count - 1))[:3] for number in range(count)])
    return [_GREY if label == OTHERS else next(found) for label in labels]


def _look_of(part: BandKind, block: int | None, colours: list[tuple[float, ...]]) -> dict[str, Any]:
    if block is None:
        return {"facecolor": _GREYS[part], "edgecolor": "white", "hatch": "...." if part is BandKind.OUTSIDE else None}
    colour = colours[block]
    if part is BandKind.AGAIN:
        lighter = tuple(_LIGHTER + (1 - _LIGHTER) * value for value in colour)
        return {"facecolor": lighter, "edgecolor": colour, "hatch": "/////"}
    return {"facecolor": colour, "edgecolor": "white", "hatch": None}


def _draw_bands(axes: Any, moments: list[int], bands: list[Band], colours: list[tuple[float, ...]], size: int) -> None:
    lower = [0.0] * len(moments)
    for band in bands:
        upper = [below + nbytes / size for below, nbytes in zip(lower, band.nbytes, strict=True)]
        filled = [at for at, nbytes in enumerate(band.nbytes) if nbytes]
        first, last = max(0, filled[0] - 1), min(filled[-1] + 1, len(moments) - 1)
        # Where nothing changes no corner is needed: files are a third as large.
        corners = [
            at
            for at in range(first, last + 1)
            if at in (first, last) or (lower[at], upper[at]) != (lower[at - 1], upper[at - 1])
        ]
        times, below, above = ([values[at] for at in corners] for values in (moments, lower, upper))
        look = _look_of(band.part, band.block, colours)
        axes.fill_between(times, below, above, step="post", linewidth=0, **look)
        if look["edgecolor"] == "white":  # a hair between bands
            axes.step(times, above, where="post", color="white", linewidth=0.4)
        lower = upper
    axes.step(moments, lower, where="post", color="0.25", linewidth=0.7)


def _draw_phases(axes: Any, ledger: LedgerData) -> None:
    """Marks where phases begin; a phase which is wide enough has its name below."""
    places, names = [], []
    for phase in ledger.phases:
        if phase.begin:
            axes.axvline(phase.begin, color="0.25", linewidth=0.9, linestyle=(0, (1, 2)))
        if phase.end - phase.begin > _NARROW * len(ledger.changes):
            places.append((phase.begin + phase.end) / 2)
            names.append(phase.name)
    axes.set_xticks(places, names)
    axes.tick_params(axis="x", length=0, labelbottom=True)


def _draw_peak(axes: Any, ledger: LedgerData, size: int, width: int) -> None:
    peak = ledger.peak
    if peak.change < 0:
        return
    place = peak.change / width
    side = "left" if place < 0.33 else "right" if place > 0.67 else "center"
    maker = "" if peak.origin is None else maker_in_words(peak.origin)
    words = f"peak {format_bytes(peak.total_nbytes)}{', by ' + maker if maker else ''}"
    axes.plot([peak.change], [peak.total_nbytes / size], marker="v", markersize=6, color="black", clip_on=False)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line of a phase
    at = peak.change, peak.total_nbytes / size
    axes.annotate(words, at, (0, 7), textcoords="offset points", ha=side, va="bottom", fontsize=9, bbox=box)


def _legend(
    shown: Mapping[tuple[BandKind, int | None], None], blocks: Blocks, colours: list[tuple[float, ...]], cut: str
) -> Iterator[Any]:
    """Yields a patch for each band, from the top down."""
    from matplotlib.patches import Patch

    if (BandKind.BACKWARD, None) in shown:
        yield Patch(label=BandKind.BACKWARD.value, **_look_of(BandKind.BACKWARD, None, colours))
    if any(part is BandKind.AGAIN for part, _ in shown):
        middle = [colours[len(colours) // 2]]
        yield Patch(label=f"{BandKind.AGAIN.value}, of a block", **_look_of(BandKind.AGAIN, 0, middle))
    for number in reversed(range(len(blocks.labels))):
        yield Patch(label=blocks.labels[number], **_look_of(BandKind.BLOCK, number, colours))
    for part in (BandKind.OUTSIDE, BandKind.OPTIMIZER, BandKind.GRADIENTS, BandKind.OLDER):
        if (part, None) in shown:
            yield Patch(label=part.value + (cut if part is BandKind.OLDER else ""), **_look_of(part, None, colours))
