"""Show what backward of a small GPT holds in memory, and why, with and without activation checkpointing.

    python examples/inspect_memory.py
    python examples/inspect_memory.py --mode none,region:dots_saveable
    python examples/inspect_memory.py --mode checkpoint --json > residuals.json
    python examples/inspect_memory.py --mode none,region,budget:0.4 --plot steps.png

The model, the modes and their options are those of `train_charlm.py`. For each mode there are two reports. The first, on one
forward, bills each storage that backward would hold once: its bytes, the operator which made it, the line of the program, the
module, the region, and the reason for holding. The second, a trace of one step, says what each region dropped, held and
computed again, and in which time. With `--plot`, ledgers of one step in each mode are drawn under each other instead (needs
matplotlib): the memory of each block over the step, and the peak.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_charlm import BUDGET, MODES, CharLM, Options, as_budget, way_to_run

from ckpt_hooks import memory_ledger, plan_memory
from ckpt_hooks.report import (
    MemoryLedger,
    SavedResiduals,
    Trace,
    compare,
    saved_residuals,
    trace,
)

OPTIONS = Options(
    steps=1, layers=4, width=64, heads=4, context=64, batch=4, dropout=0.1, seed=0, device="cpu", policy="dots_saveable"
)
VOCABULARY = 96


def loss_of(mode: str, options: Options) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]:
    """Returns the loss of a fresh model as a function, and its arguments: tokens and targets.

    Args:
        mode: How to run the blocks, as in `train_charlm.py`.
        options: The sizes of the model.
    """
    torch.manual_seed(options.seed)
    model = CharLM(VOCABULARY, options, way_to_run(mode, options.policy))
    tokens, targets = torch.randint(VOCABULARY, (2, options.batch, options.context))

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return loss, tokens, targets


def ledger_of(mode: str, options: Options = OPTIONS) -> MemoryLedger:
    """Returns the ledger of a forward and a backward."""
    torch.manual_seed(options.seed)
    model = CharLM(VOCABULARY, options, way_to_run(mode, options.policy))
    tokens, targets = torch.randint(VOCABULARY, (2, options.batch, options.context))

    def step(model: nn.Module) -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]

    if mode.startswith(BUDGET):
        plan_memory(model, step, as_budget(mode.removeprefix(BUDGET)), blocks=["blocks.*"]).apply()
    gc.collect()  # what earlier modes have left
    return memory_ledger(step, model)


def residuals_of(mode: str, options: Options = OPTIONS) -> SavedResiduals:
    """Returns the report on what backward of the loss would hold."""
    return saved_residuals(*loss_of(mode, options))


def trace_of(mode: str, options: Options = OPTIONS) -> Trace:
    """Returns the trace of a forward and a backward, after one of each to warm up."""
    loss, *batch = loss_of(mode, options)
    loss(*batch).backward()  # type: ignore[no-untyped-call]
    with trace() as found:
        loss(*batch).backward()  # type: ignore[no-untyped-call]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report of each mode asked for."""
    parser = argparse.ArgumentParser(description="Show what backward of a small GPT holds in memory, and why.")
    parser.add_argument("--mode", default="none,checkpoint,region,selective", help="modes of train_charlm.py, by commas")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the tables")
    parser.add_argument(
        "--plot", type=Path, help="draw a step in each mode to this file, as in steps.png, in place of the tables"
    )
    values = parser.parse_args(arguments)
    modes = values.mode.split(",")
    if unknown := [mode for mode in modes if mode not in MODES and not (values.plot and mode.startswith(BUDGET))]:
        parser.error(
            f"argument --mode: got {unknown[0]!r}, expected one or more of {','.join(MODES)}, with --plot {BUDGET}SIZE"
        )
    if values.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: pictures need matplotlib, which is absent. Write `pip install 'ckpt_hooks[plot]'`.")
    if values.plot:
        compare(values.plot, **{mode: ledger_of(mode) for mode in modes})
        return
    if values.json:
        found = {mode: {"residuals": residuals_of(mode).to_json(), "trace": trace_of(mode).to_json()} for mode in modes}
        print(json.dumps(found))
        return
    for mode in modes:
        print(f"== {mode} ==\n{residuals_of(mode)}\n")
        print(f"{trace_of(mode)}\n")


if __name__ == "__main__":
    main()
