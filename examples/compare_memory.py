"""Draw what each byte budget costs a small GPT: what runs again against the peak of a step (needs matplotlib).

    python examples/compare_memory.py front.svg
    python examples/compare_memory.py front.png --budget 20MiB

The model and its sizes are those of `train_charlm.py`. One profiled step is enough for all budgets. The picture has a plan
for each, the choices that `torch.utils.checkpoint` has (nothing kept, matrix products kept, every second of them; on all
blocks, on the first, on every n-th), and the plan of the budget given, which was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from train_charlm import Options, Run, as_budget, draw_batch, load_tokens

from ckpt_hooks import plan_memory
from ckpt_hooks.planner import ParetoFront

OPTIONS = Options(
    steps=1, layers=8, width=128, heads=4, context=128, batch=8, dropout=0.1, seed=0, device="cpu", policy="dots_saveable"
)


def front_of(budget: str, options: Options = OPTIONS) -> ParetoFront:
    """Returns the front of the plan for a budget.

    Args:
        budget: Bytes in words, as in `20MiB`, or a part from 0 (the least peak of any plan) to 1 (no regions).
        options: The sizes of the model.
    """
    text, vocabulary = load_tokens()
    run = Run("none", text, vocabulary, options)
    tokens, targets = draw_batch(text, options, torch.Generator().manual_seed(options.seed))
    step = lambda _: run.forward_backward(tokens, targets)  # noqa: E731
    return plan_memory(run.model, step, as_budget(budget), blocks=["blocks.*"], cost="operations").pareto()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the front, and draws it."""
    parser = argparse.ArgumentParser(description="Draw what each byte budget costs a small GPT.")
    parser.add_argument("picture", type=Path, nargs="?", help="file to draw, as in front.svg; none to print alone")
    parser.add_argument("--budget", default="40MiB", help="bytes, as in 20MiB, or a part from 0 to 1")
    values = parser.parse_args(arguments)
    front = front_of(values.budget)
    print(front)
    if values.picture is not None:
        front.plot(values.picture)


if __name__ == "__main__":
    main()
