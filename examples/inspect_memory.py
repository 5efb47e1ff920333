"""Show what backward of a small GPT holds in memory, and why, with and without activation checkpointing.

    python examples/inspect_memory.py
    python examples/inspect_memory.py --mode none,region:dots_saveable --rows 20
    python examples/inspect_memory.py --mode checkpoint --json > residuals.json

The model, the modes and their options are those of `train_charlm.py`. Each mode runs forward once. The report bills each
storage once: its bytes, the operator which made it, the line of the program, the module, the region, and the reason for
holding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from train_charlm import MODES, CharLM, Options, way_to_run

from ckpt_hooks import format_saved_residuals, saved_residuals
from ckpt_hooks.report import SavedResiduals

OPTIONS = Options(
    steps=1, layers=4, width=64, heads=4, context=64, batch=4, dropout=0.1, seed=0, device="cpu", policy="dots_saveable"
)
VOCABULARY = 96


def residuals_of(mode: str, options: Options = OPTIONS) -> SavedResiduals:
    """Returns the report on the loss of a fresh model.

    Args:
        mode: How to run the blocks, as in `train_charlm.py`.
        options: The sizes of the model.
    """
    torch.manual_seed(options.seed)
    model = CharLM(VOCABULARY, options, way_to_run(mode, options.policy))
    tokens = torch.randint(VOCABULARY, (2, options.batch, options.context))

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return saved_residuals(loss, tokens[0], tokens[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report of each mode asked for."""
    parser = argparse.ArgumentParser(description="Show what backward of a small GPT holds in memory, and why.")
    parser.add_argument("--mode", default="none,checkpoint,region,selective", help="modes of train_charlm.py, by commas")
    parser.add_argument("--rows", type=int, default=12, help="rows of a table; the rest is summed up")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the tables")
    values = parser.parse_args(arguments)
    modes = values.mode.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"argument --mode: got {unknown[0]!r}, expected one or more of {','.join(MODES)}")
    reports = {mode: residuals_of(mode) for mode in modes}
    if values.json:
        print(json.dumps({mode: report.to_json() for mode, report in reports.items()}))
        return
    for mode, report in reports.items():
        print(f"== {mode} ==\n{format_saved_residuals(report, max_rows=values.rows)}\n")


if __name__ == "__main__":
    main()
