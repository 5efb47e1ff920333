"""Train a small GPT on characters, with and without activation checkpointing, and compare memory, time and losses.

    python examples/train_charlm.py
    python examples/train_charlm.py --mode none,checkpoint,sequential --layers 16 --steps 50
    python examples/train_charlm.py --mode checkpoint,selective --policy dots_saveable
    python examples/train_charlm.py --mode none,region,region:dots_saveable
    python examples/train_charlm.py --mode none,budget:40MiB,budget:0.25
    python examples/train_charlm.py --mode checkpoint --json > run.json

The text is the source of Python's own standard library, which is on every machine. A mode says how the stack of blocks
is run; that is one function a mode, in the table `MODES`, and all the rest is the same for every mode: the data, the
initial parameters, the random numbers that dropout draws. So the losses of two modes can be compared bit by bit, and
they must be equal: checkpointing changes when activations are computed, never what they are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import statistics
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

# Torch says on import that NumPy is absent, and its profiler that memory was allocated before: neither matters here.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import ckpt_hooks
from ckpt_hooks import policies

# ---- modes: ways to run a stack of blocks ----

T = TypeVar("T")
RunBlocks = Callable[[Sequence[nn.Module], Tensor], Tensor]


def run_plain(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Keeps every activation of every block from forward to backward."""
    for block in blocks:
        x = block(x)
    return x


def run_torch(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Checkpoints each block with the checkpoint that comes with torch."""
    for block in blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x


def run_checkpoint(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Checkpoints each block: its input is kept, the rest is recomputed in backward, one block at a time."""
    for block in blocks:
        x = ckpt_hooks.checkpoint(block, x)
    return x


def run_sequential(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Checkpoints runs of about sqrt(n) blocks, to balance the inputs kept against the activations recomputed."""
    output: Tensor = ckpt_hooks.checkpoint_sequential(list(blocks), len(blocks) // math.isqrt(len(blocks)), x)
    return output


POLICIES: dict[str, policies.Policy] = {
    "everything_saveable": policies.everything_saveable,
    "nothing_saveable": policies.nothing_saveable,
    "dots_saveable": policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    "save_compute_and_communication": policies.save_compute_and_communication,
}


def run_selective(policy: str, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Checkpoints each block, but keeps what a policy says, so that those operators need not run again."""
    region = ckpt_hooks.checkpoint(policy=POLICIES[policy])
    for block in blocks:
        x = region(block)(x)
    return x


def run_torch_selective(policy: str, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The same with what comes with torch, which takes our policies."""
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, POLICIES[policy])
    for block in blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


def run_region(blocks: Sequence[nn.Module], x: Tensor, *, policy: policies.Policy | None = None) -> Tensor:
    """Records what each block does: backward replays those operators that it needs, and runs no Python code again."""
    for block in blocks:
        with ckpt_hooks.checkpoint_region(policy=policy):
            x = block(x)
    return x


MODES: dict[str, Callable[..., Tensor]] = {
    "none": run_plain,
    "torch": run_torch,
    "checkpoint": run_checkpoint,
    "sequential": run_sequential,
    "selective": run_selective,
    "torch_selective": run_torch_selective,
    "region": run_region,
    **{f"region:{name}": functools.partial(run_region, policy=policy) for name, policy in POLICIES.items()},
}


#: A mode with a byte budget, which a plan fits: `budget:40MiB`, or `budget:0.25` for a part of what checkpointing can save.
BUDGET = "budget:"


def as_budget(text: str) -> str | float:
    """Returns a budget as `plan_memory` takes it: a number as a part from 0 to 1, other words as bytes."""
    try:
        return float(text)
    except ValueError:
        return text


def way_to_run(mode: str, policy: str) -> RunBlocks:
    """Returns how a mode runs a stack of blocks, under a policy if it takes one. A plan makes the blocks regions themselves."""
    run = MODES["none" if mode.startswith(BUDGET) else mode]
    return functools.partial(run, policy) if mode.endswith("selective") else run


# ---- the model ----


class Block(nn.Module):
    """A pre-norm transformer block with causal attention: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Makes the layers.

        Args:
            width: Size of the last dimension of input and output, a multiple of `heads`.
            heads: Number of attention heads.
            dropout: Probability of dropping an attention weight, or an element of what the residual stream receives.
        """
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads: got width={width}, heads={heads}")
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[batch, context, width]` to the same shape."""
        dropout = self.dropout if self.training else 0.0
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))), dropout)


class CharLM(nn.Module):
    """A GPT over a small vocabulary."""

    def __init__(self, vocabulary: int, options: Options, run_blocks: RunBlocks) -> None:
        """Makes the layers; `run_blocks` is all that a mode changes."""
        super().__init__()
        width = options.width
        self.run_blocks = run_blocks
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(options.context, width)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(width, options.heads, options.dropout) for _ in range(options.layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps `[batch, context]` to logits `[batch, context, vocabulary]`; the head is tied to the embedding."""
        x = self.dropout(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        x = self.run_blocks(list(self.blocks), x)
        return F.linear(self.norm(x), self.token.weight)


# ---- the data ----


def load_tokens(limit: int = 1_000_000) -> tuple[Tensor, int]:
    """Reads the standard library's modules by name, up to `limit` characters: token numbers, and how many differ."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= limit:
            break
    number = {character: i for i, character in enumerate(sorted(set(text[:limit])))}
    return torch.tensor([number[character] for character in text[:limit]]), len(number)


def draw_batch(text: Tensor, options: Options, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws random windows of the text, and what comes next at each position: both `[batch, context]`."""
    starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
    windows = text[starts + torch.arange(options.context + 1)].to(options.device)
    return windows[:, :-1], windows[:, 1:]


# ---- measuring and training ----


def peak_bytes(step: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Measures how many bytes of tensors a step holds at its worst moment, beyond those that were there before it.

    The step runs twice. The first run is not measured: it creates what stays, such as the parameters' gradients. The
    second is measured exactly, and gives the same figure whenever the same program runs: on the CPU it is the highest
    running sum over every allocation and release that the profiler saw, on an accelerator the allocator knows it. The
    garbage collector is off meanwhile, as it would release at arbitrary moments.

    Args:
        step: Runs forward and backward, and adds to the gradients that are there.
        device: Where the step's tensors live.
    """
    device = torch.device(device)
    step()
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        if device.type != "cpu":
            memory = torch.get_device_module(device)
            memory.reset_peak_memory_stats(device)
            before = memory.memory_allocated(device)
            step()
            return int(memory.max_memory_allocated(device) - before)
        # Without this, the profiler's library reports its own starts and stops on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        with (profile := torch.autograd.profiler.profile(profile_memory=True)):
            step()
    finally:
        if collecting:
            gc.enable()
    assert profile.kineto_results is not None
    events: Iterable[Any] = sorted(profile.kineto_results.events(), key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes() if event.name() == "[memory]" else 0  # negative for a release
        peak = max(peak, held)
    return peak


@dataclass(frozen=True)
class Options:
    """What to train; the help of each option of the command line says what the field of its name means."""

    steps: int
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    dropout: float
    seed: int
    device: str
    policy: str


@dataclass(frozen=True)
class Row:
    """What one mode gave: the loss of each step, the peak of one forward and backward, the median time of a step."""

    mode: str
    losses: list[float]
    peak_bytes: int
    seconds_per_step: float


class Run:
    """The training of a fresh model in one mode. Equal options give equal data, parameters and dropout, whatever the mode."""

    def __init__(self, mode: str, text: Tensor, vocabulary: int, options: Options) -> None:
        """Makes the model, plans if the mode has a budget, and measures the peak of one forward and backward.

        Args:
            mode: A name of `MODES`, or `budget:SIZE`.
            text: Numbers of characters.
            vocabulary: How many numbers there are.
            options: The sizes, and the seed.
        """
        self.mode, self.text, self.options = mode, text, options
        torch.manual_seed(options.seed)
        self.model = CharLM(vocabulary, options, way_to_run(mode, options.policy)).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        # Batches come from a generator of their own, so that what a mode draws besides never changes the data.
        batch = draw_batch(text, options, torch.Generator().manual_seed(options.seed))
        if mode.startswith(BUDGET):
            budget = as_budget(mode.removeprefix(BUDGET))
            ckpt_hooks.plan_memory(self.model, lambda _: self.forward_backward(*batch), budget, blocks=["blocks.*"]).apply()
        self.peak = peak_bytes(lambda: self.forward_backward(*batch), options.device)
        # From here on as if nothing had been measured.
        self.optimizer.zero_grad()
        self.generator = torch.Generator().manual_seed(options.seed)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of a batch, both of whose parts are `[batch, context]`, and adds to the gradients."""
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> None:
        """Trains on the next batch."""
        options, synchronize = self.options, torch.get_device_module(self.options.device).synchronize
        tokens, targets = draw_batch(self.text, options, self.generator)
        torch.manual_seed(options.seed + len(self.losses))
        synchronize(options.device)
        start = time.perf_counter()
        loss = self.forward_backward(tokens, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(options.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        rate = tokens.numel() / self.seconds[-1]
        line = f"{self.mode}: loss {self.losses[-1]:.4f}, {rate:,.0f} tokens/s"
        show_progress(line, len(self.losses), options.steps)

    def row(self) -> Row:
        """Returns what the steps so far gave."""
        # The first step also sets up what lasts, such as the optimizer's state.
        return Row(self.mode, self.losses, self.peak, statistics.median(self.seconds[1:] or self.seconds))


def train(modes: Sequence[str], text: Tensor, vocabulary: int, options: Options) -> list[Row]:
    """Trains in several modes, which take their steps in turn: a machine's slow minute is slow for all."""
    runs = [Run(mode, text, vocabulary, options) for mode in modes]
    for _ in range(options.steps):
        for run in runs:
            run.step()
    return [run.row() for run in runs]


# ---- what the user sees ----


def show_progress(line: str, step: int, steps: int) -> None:
    """Shows a line on stderr: rewritten in place on a terminal, elsewhere a plain line for every fifth of the steps."""
    line = f"[{step:>{len(str(steps))}}/{steps}] {line}"
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="\n" if step == steps else "", file=sys.stderr, flush=True)
    elif step == steps or step % max(1, steps // 5) == 0:
        print(line, file=sys.stderr, flush=True)


def format_table(rows: Sequence[Row]) -> str:
    """Lays out one row a mode; with several modes, the last line says whether their losses agree bit by bit."""
    width = max(16, *(len(row.mode) for row in rows))
    lines = [f"{'mode':<{width}} {'final loss':>12} {'peak activations':>18} {'seconds/step':>14}"]
    for row in rows:
        peak = f"{row.peak_bytes / 2**20:.2f} MiB"
        lines.append(f"{row.mode:<{width}} {row.losses[-1]:>12.6f} {peak:>18} {row.seconds_per_step:>14.4f}")
    if len(rows) > 1:
        equal = all(row.losses == rows[0].losses for row in rows)
        lines.append(f"losses of all modes bitwise equal: {'yes' if equal else 'NO'}")
    return "\n".join(lines)


def checked(convert: Callable[[str], T], accepts: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """Makes a parser for the value of an option, whose error says what came and what is expected."""

    def parse(text: str) -> T:
        # Torch raises the last two for devices that are not there.
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):
            if accepts(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")

    return parse


def add_model_options(
    parser: argparse.ArgumentParser, *, steps: int, layers: int, width: int, context: int, batch: int
) -> None:
    """Adds the options of sizes, dropout and seed, with these defaults."""
    count = checked(int, lambda n: 1 <= n < 2**63, "a whole number of at least 1")
    seed = checked(int, lambda n: 0 <= n < 2**63, "a whole number of at least 0, below 2**63")
    probability = checked(float, lambda p: 0.0 <= p < 1.0, "a number from 0 up to, but not including, 1")
    add = parser.add_argument
    add("--steps", type=count, default=steps, help="steps of training for each mode")
    add("--layers", type=count, default=layers, help="number of transformer blocks")
    add("--width", type=count, default=width, help="width of the residual stream, a multiple of --heads")
    add("--heads", type=count, default=4, help="number of attention heads")
    add("--context", type=count, default=context, help="characters in a window")
    add("--batch", type=count, default=batch, help="windows in a batch")
    add("--dropout", type=probability, default=0.1, help="dropout probability")
    add("--seed", type=seed, default=0, help="seed of the data, the parameters and dropout")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains in each mode asked for, and prints the comparison."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on characters, with and without checkpointing, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = ",".join(MODES)
    mode_list = checked(
        lambda text: text.split(","),
        lambda modes: all(mode in MODES or mode.startswith(BUDGET) for mode in modes),
        f"one or more of {names},{BUDGET}SIZE",
    )
    device = checked(
        lambda text: str(torch.empty(0, device=text).device),
        lambda name: torch.device(name).type in ("cpu", "cuda", "xpu"),
        "a device of this machine, whose peak memory torch can tell: cpu, cuda or xpu",
    )
    accelerator = next((name for name in ("cuda", "xpu") if getattr(torch, name).is_available()), "cpu")
    add = parser.add_argument
    short = ",".join([*(mode for mode in MODES if ":" not in mode), "region:POLICY", f"{BUDGET}SIZE"])
    add("--mode", type=mode_list, default="none,torch,checkpoint", help=f"one or more of {short}; the policies are below")
    add_model_options(parser, steps=6, layers=8, width=128, context=128, batch=8)
    add("--device", type=device, default=accelerator, help="where to train")
    add("--policy", choices=POLICIES, default="save_compute_and_communication", help="what the selective modes keep")
    add("--json", action="store_true", help="print one JSON object in place of the table")
    values = vars(parser.parse_args(arguments))
    modes, as_json = values.pop("mode"), values.pop("json")
    options = Options(**values)
    if options.width % options.heads:
        parser.error(f"argument --width: got {options.width}, expected a multiple of --heads, {options.heads}")
    text, vocabulary = load_tokens()
    if options.context >= len(text):
        parser.error(f"argument --context: got {options.context}, expected less than the text's length, {len(text)}")
    rows = train(modes, text, vocabulary, options)
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if as_json else format_table(rows))


if __name__ == "__main__":
    main()
