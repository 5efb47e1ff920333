r"""Draw peak memory and time of the modes of `train_charlm.py` (needs matplotlib: `pip install ckpt_hooks[plot]`).

::

    python examples/train_charlm.py --steps 9 --policy dots_saveable --json > run.json \
        --mode none,torch,torch_selective,checkpoint,selective,region,region:dots_saveable,budget:40MiB
    python examples/plot_modes.py run.json examples/modes.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLOURS = {"none": "0.85", "torch": "tab:orange", "torch_selective": "tab:orange"}
LABELS = {"none": "no checkpointing", "torch": "torch.utils.checkpoint", "torch_selective": "the same, selective"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws one bar a mode, of peak memory on the left and of time on the right.

    Args:
        rows: Those of `train_charlm.py --json`.
        path: Where the picture goes; its suffix says the format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "ckpt_hooks"  # the same file for the same rows
    from matplotlib import pyplot

    labels = [LABELS.get(row["mode"], row["mode"]) for row in rows]
    colours = [COLOURS.get(row["mode"], "tab:blue") for row in rows]
    figure, (memory, seconds) = pyplot.subplots(1, 2, figsize=(9, 0.5 + 0.42 * len(rows)), sharey=True, layout="constrained")
    for axes, values, title in (
        (memory, [row["peak_bytes"] / 2**20 for row in rows], "peak of activations, MiB"),
        (seconds, [1000 * row["seconds_per_step"] for row in rows], "step, ms"),
    ):
        bars = axes.barh(labels, values, color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set_title(title)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    memory.invert_yaxis()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Draws the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description="Draw peak memory and time of the modes of train_charlm.py.")
    parser.add_argument("rows", type=Path, help="what train_charlm.py --json printed")
    parser.add_argument("picture", type=Path, help="file to write, as in modes.svg")
    options = parser.parse_args()
    draw(json.loads(options.rows.read_text())["rows"], options.picture)


if __name__ == "__main__":
    main()
