"""Pictures of ledgers: a panel for each, below each other on the same scale. Only drawing imports matplotlib, an extra."""

from __future__ import annotations

import collections
import enum
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_hooks._core.misuse import check_is
from ckpt_hooks.report.printing import Maker, alike, check_path, cut, fold_names, format_bytes, name_pattern, up_to_number

from .data import Allocation, LedgerData, maker_in_words

# Bands: the bytes of each block of the model, and of the rest, at moments of a step.

_SMALL = 0.05  # of the bytes of the largest block: smaller blocks share a band
#: The label of all blocks whose bands would be too small to see.
OTHERS = "smaller blocks"


class BandKind(enum.Enum):
    """A kind of band, from the bottom up."""

    OLDER = "from before the step"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside of blocks"
    BLOCK = "block"
    AGAIN = "recomputed"
    BACKWARD = "made by backward"


class Band(NamedTuple):
    """A band of a picture: its bytes over time."""

    part: BandKind
    block: int | None  # the number of its block; None for a band of no block
    nbytes: Sequence[int]  # at each moment


def bands_of(ledger: LedgerData, number: int, blocks: ModelBlocks, most: int) -> tuple[list[int], list[Band]]:
    """Returns about ``most`` moments of a ledger, as indices of changes, and the bands from the bottom up."""
    keys = [band_of(allocation, block) for allocation, block in zip(ledger.allocations, blocks.numbers[number], strict=True)]
    before = BandKind.OLDER, None
    if not keys:
        return [0, 1], [Band(*before, [ledger.base_nbytes] * 2)]
    order = sorted({before, *keys}, key=_place)
    rows = {key: row for row, key in enumerate(order)}
    live = [0] * len(order)
    live[rows[before]] = ledger.base_nbytes
    moments = _moments_of(ledger, most)
    wanted, values = set(moments), list[list[int]]()
    for at, change in enumerate(ledger.changes):
        live[rows[before if change.allocation is None else keys[change.allocation]]] += change.nbytes
        if at in wanted:
            values.append([*live])
    return moments, [Band(*key, column) for key, column in zip(order, zip(*values, strict=True), strict=True) if any(column)]


def band_of(allocation: Allocation, block: int | None) -> tuple[BandKind, int | None]:
    """Returns the band of an allocation of a block."""
    maker = allocation.origin.maker
    part = BandKind.GRADIENTS if allocation.is_gradient else _KINDS.get(maker)
    if part is not None or block is None:
        return part or BandKind.OUTSIDE, None
    return BandKind.AGAIN if maker is Maker.RECOMPUTE else BandKind.BLOCK, block


_KINDS = {Maker.BACKWARD: BandKind.BACKWARD, Maker.OPTIMIZER: BandKind.OPTIMIZER}


def _place(key: tuple[BandKind, int | None]) -> tuple[bool, int, int]:
    """Returns the place of a band, from the bottom up: recomputed bytes above their block, bytes of backward on top."""
    part, block = key
    return part is BandKind.BACKWARD, -1 if block is None else block, [*BandKind].index(part)


def _moments_of(ledger: LedgerData, most: int) -> list[int]:
    live = [change.live for change in ledger.changes]
    stretch = max(1, 2 * len(live) // most)
    moments: set[int] = set()
    for begin in range(0, len(live), stretch):
        end = min(begin + stretch, len(live))
        moments |= {max(range(begin, end), key=live.__getitem__), end - 1}
    return sorted(moments)


class ModelBlocks:
    """The block of the model to which each allocation of some ledgers belongs; a module has one block in all ledgers."""

    # A module's block is the outermost region around the module in any ledger, or else the module's name up to a number.
    def __init__(self, ledgers: Sequence[LedgerData], most: int) -> None:
        self._regions = {entry.module for ledger in ledgers for entry in ledger.entries.values() if entry.module}
        modules = [name for ledger in ledgers for alloc in ledger.allocations if (name := _module_of(alloc)) is not None]
        numbered = {end for name in [*modules, *self._regions] if (end := up_to_number(name)) is not None}
        self._containers = {name[:at] for name in numbered for at, letter in enumerate(name) if letter == "."}
        # For each ledger, the block of each allocation, by name; None outside of blocks.
        self.names = names = [self._names_in(ledger) for ledger in ledgers]
        sizes: collections.Counter[str] = collections.Counter()
        for ledger, of in zip(ledgers, names, strict=True):
            for allocation, name in zip(ledger.allocations, of, strict=True):
                if name is not None:
                    sizes[name] += allocation.nbytes
        small = [name for name, nbytes in sizes.items() if nbytes < _SMALL * max(sizes.values())]
        labels = _labels_of((name for name in sizes if name not in small), most - bool(small))
        labels = {name: labels.get(name) or (OTHERS if len(small) > 1 else name) for name in sizes}
        # In the order of forward. If there are many layers, equal layers share a label.
        self.labels = list(dict.fromkeys(labels.values()))
        places: dict[str | None, int] = {name: self.labels.index(label) for name, label in labels.items()}
        # For each ledger, the label of each allocation, by index.
        self.numbers = [[places.get(name) for name in of] for of in names]

    def _names_in(self, ledger: LedgerData) -> list[str | None]:
        """Returns the block of each allocation: of its region's module, or the block with most bytes in the region."""
        blocks = [None if name is None else self._block_of(name) for name in map(_module_of, ledger.allocations)]
        inside: dict[int | None, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for allocation, block in zip(ledger.allocations, blocks, strict=True):
            if block is not None:
                inside[allocation.entry][block] += allocation.nbytes
        by_entry: dict[int | None, str] = {}
        for number, entry in ledger.entries.items():
            most = inside[number].most_common(1)
            by_entry[number] = self._block_of(entry.module) if entry.module else most[0][0] if most else entry.name
        return [by_entry.get(allocation.entry, block) for allocation, block in zip(ledger.allocations, blocks, strict=True)]

    def _block_of(self, module: str) -> str:
        parts = module.split(".")
        ends = [".".join(parts[: number + 1]) for number in range(len(parts))]
        name = next((end for end in ends if end in self._regions), None) or up_to_number(module)
        return name or next((end for end in ends if end not in self._containers), module)


def _module_of(allocation: Allocation) -> str | None:
    """Returns the name of the module of an allocation; None for the outermost module, and outside of modules."""
    origin = allocation.origin
    if origin.maker is Maker.BACKWARD or origin.module is None or " " not in origin.module:
        return None
    return origin.module.rpartition(" ")[0]


def _labels_of(names: Iterable[str], most: int) -> dict[str, str]:
    """Returns a label for each name; runs of names that differ only in their numbers share a label."""
    groups = alike(names, name_pattern)
    room = most - sum(len(group) == 1 for group in groups)
    many = sum(len(group) for group in groups if len(group) > 1)
    labels: dict[str, str] = {}
    for group in groups:
        runs = min(len(group), max(1, room * len(group) // max(1, many)))
        for members in alike(enumerate(group), lambda pair: pair[0] * runs // len(group)):  # noqa: B023  # called at once
            label = fold_names(name for _, name in members)
            labels.update((name, label) for _, name in members)
    return labels


# Drawing

_SCALES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_MOST_BLOCKS = 9  # colors that a reader tells apart, in grayscale too
_MOST_MOMENTS = 700  # about the pixels of an axis
_NARROW = 0.06  # of the axis: narrower phases have no name
_MOST_LABELS = 12  # labels for which there is room beside a bar
_LEAST = 0.01  # of the axis: smaller parts of a bar have no label
_LINE = 0.075  # of the axis: the height of a label
_LONGEST = 20  # characters of a label
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
        check_path(path, "step.png")
        import matplotlib as mpl

        with mpl.rc_context({"svg.hashsalt": "ckpt_hooks"}):
            self.figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png")
        return file.getvalue()


def compare(path: str | os.PathLike[str] | None = None, /, **ledgers: LedgerData) -> Picture:
    """Draws several ledgers below each other, on the same scale and with the same colors.

    A band is the memory of a block of the model: the outermost region around a module in any ledger, or else the module by its
    name up to the first number. Memory that recomputes allocate is lighter and hatched. Gradients, older memory and memory
    outside of blocks are gray. Many equal layers share a band. The bar beside a plot shows the memory at the peak.

    Args:
        path: A file to write, such as ``"steps.png"`` or ``"steps.svg"``. None writes none.
        **ledgers: The ledgers, by the titles of their panels.

    Returns:
        The :class:`Picture`, which notebooks show.

    Raises:
        ImportError: If matplotlib is not installed.
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
        raise ValueError("compare got no ledgers. Pass ledgers by the titles of their panels: compare(plain=ledger).")
    for title, ledger in ledgers.items():
        check_is(ledger, LedgerData, title, "a ledger", "Pass a result of memory_ledger.")
    if path is not None:
        check_path(path, "step.png")
    drawn = [*ledgers.values()]
    blocks = ModelBlocks(drawn, _MOST_BLOCKS)
    figure = figure_of(10, 1.3 + 2.6 * len(drawn))
    all_axes = figure.subplots(len(drawn), 2, sharey=True, squeeze=False, width_ratios=(20, 1))
    width = max(1, *(len(ledger.changes) for ledger in drawn))
    colours = _colours(blocks.labels)
    most = max(ledger.base_nbytes + max(0, ledger.peak.nbytes) for ledger in drawn)
    unit, size = scale_of(most)
    # If older memory, such as parameters, is most of the memory, the axis leaves out its lower part.
    older = min(panel.base_nbytes + sum(free.nbytes for free in panel.changes if free.allocation is None) for panel in drawn)
    floor = older - (most - older) // 8 if older > 2 * (most - older) else 0
    all_axes[0, 0].set_ylim(floor / size, (most + 0.18 * (most - floor)) / size)
    shown: dict[tuple[BandKind, int | None], None] = {}
    for number, ((axes, beside), (title, ledger)) in enumerate(zip(all_axes, ledgers.items(), strict=True)):
        moments, bands = bands_of(ledger, number, blocks, _MOST_MOMENTS)
        _draw_bands(axes, moments, bands, colours, size)
        shown |= dict.fromkeys((band.part, band.block) for band in bands)
        _draw_phases(axes, ledger)
        if ledger.peak.change in moments:
            _draw_peak(axes, ledger, size, width)
            _draw_bar(beside, bands, moments.index(ledger.peak.change), blocks.labels, colours, size)
        beside.set_axis_off()
        axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
        axes.set_ylabel(f"{unit} in use")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, width)
    all_axes[-1, 0].set_xlabel("allocations and frees, in order")
    handles = [*_legend(shown, blocks, colours, "" if not floor else f", up from {format_bytes(floor)}")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    picture = Picture(figure)
    if path is not None:
        picture.save(path)
    return picture


def figure_of(width: float, height: float) -> Any:
    """Returns a matplotlib figure with 100 pixels for each inch, which no window shows."""
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
    """Returns colors from dark to light, which differ in grayscale too, and a gray for all small blocks."""
    import matplotlib as mpl

    colours, count = mpl.colormaps["viridis"], len(labels) - (OTHERS in labels)
    shades = iter([colours(0.20 + 0.75 * number / max(1, count - 1))[:3] for number in range(count)])
    return [_GREY if label == OTHERS else next(shades) for label in labels]


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
        # Draw corners only where a value changes: files are a third as large.
        corners = [
            at
            for at in range(first, last + 1)
            if at in (first, last) or (lower[at], upper[at]) != (lower[at - 1], upper[at - 1])
        ]
        times, below, above = ([values[at] for at in corners] for values in (moments, lower, upper))
        look = _look_of(band.part, band.block, colours)
        axes.fill_between(times, below, above, step="post", linewidth=0, **look)
        if look["edgecolor"] == "white":  # a thin line between bands
            axes.step(times, above, where="post", color="white", linewidth=0.4)
        lower = upper
    axes.step(moments, lower, where="post", color="0.25", linewidth=0.7)


def _draw_phases(axes: Any, ledger: LedgerData) -> None:
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
    place = peak.change / width
    side = "left" if place < 0.33 else "right" if place > 0.67 else "center"
    maker = "" if peak.origin is None else maker_in_words(peak.origin)
    words = f"peak {format_bytes(peak.total_nbytes)}{', by ' + maker if maker else ''}"
    axes.plot([peak.change], [peak.total_nbytes / size], marker="v", markersize=6, color="black", clip_on=False)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the line of a phase below
    at = peak.change, peak.total_nbytes / size
    axes.annotate(words, at, (0, 7), textcoords="offset points", ha=side, va="bottom", fontsize=9, bbox=box)


def _draw_bar(axes: Any, bands: list[Band], at: int, labels: list[str], colours: list[tuple[float, ...]], size: int) -> None:
    """Draws the memory at the peak as a bar, from the bottom up, with the name and bytes of each band beside it."""
    low, high = axes.get_ylim()
    top, least = 0.0, max(_LEAST * (high - low) * size, *sorted(band.nbytes[at] for band in bands)[-_MOST_LABELS:][:1])
    lines: list[tuple[float, str]] = []
    for band in bands:
        nbytes = band.nbytes[at]
        below, top = top, top + nbytes / size
        axes.bar(0.5, nbytes / size, 1, below, linewidth=0.4, **_look_of(band.part, band.block, colours))
        if nbytes >= least and top > low:
            name = cut(band.part.value if band.block is None else labels[band.block], _LONGEST)
            again = ", recomputed" if band.part is BandKind.AGAIN else ""
            lines.append(((max(below, low) + top) / 2, f"{name}{again}  {format_bytes(nbytes)}"))
    line, places = _LINE * (high - low), [middle for middle, _ in lines]
    for number in range(1, len(places)):  # moves overlapping labels up, then down if the top has no room
        places[number] = max(places[number], places[number - 1] + line)
    for number in range(len(places)):
        places[number] = min(places[number], high - (len(places) - number - 0.5) * line)
    for (middle, words), place in zip(lines, places, strict=True):
        axes.plot([1, 1.6], [middle, place], color="0.6", linewidth=0.6, clip_on=False)
        axes.text(1.7, place, words, va="center", fontsize=8)
    axes.set_xlim(0, 1)


def _legend(
    shown: Mapping[tuple[BandKind, int | None], None], blocks: ModelBlocks, colours: list[tuple[float, ...]], cut_off: str
) -> Iterator[Any]:
    from matplotlib.patches import Patch

    for part in (BandKind.OLDER, BandKind.GRADIENTS, BandKind.OPTIMIZER, BandKind.OUTSIDE):
        if (part, None) in shown:
            yield Patch(label=part.value + (cut_off if part is BandKind.OLDER else ""), **_look_of(part, None, colours))
    for number, label in enumerate(blocks.labels):
        yield Patch(label=cut(label, _LONGEST), **_look_of(BandKind.BLOCK, number, colours))
    if any(part is BandKind.AGAIN for part, _ in shown):
        middle = [colours[len(colours) // 2]]
        yield Patch(label=f"{BandKind.AGAIN.value}, of a block", **_look_of(BandKind.AGAIN, 0, middle))
    if (BandKind.BACKWARD, None) in shown:
        yield Patch(label=BandKind.BACKWARD.value, **_look_of(BandKind.BACKWARD, None, colours))
