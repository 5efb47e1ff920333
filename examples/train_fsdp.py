"""Train the GPT of train_charlm.py under FSDP2, with and without activation checkpointing, and compare the losses.

    torchrun --nproc-per-node 2 examples/train_fsdp.py
    torchrun --nproc-per-node 2 examples/train_fsdp.py --mode none,checkpoint,region --steps 20
    torchrun --nproc-per-node 2 examples/train_fsdp.py --no-reshard-after-forward

Every block is a unit of FSDP: its parameters are spread over the processes, gathered before the block runs, and freed after
it. Each process trains on data of its own; gradients are averaged. Checkpointing runs a block again in backward, where FSDP
has gathered its parameters once more anyway. Only where one region holds several units (mode `one_region`) does the region
ask FSDP to gather.

The losses of all modes must be equal bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_charlm import MODES, CharLM, Options, add_model_options, draw_batch, load_tokens, way_to_run

from ckpt_hooks import checkpoint_module, checkpoint_region


def run_one_region(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Runs all blocks in one recorded region, whose replay gathers the parameters of each block again."""
    with checkpoint_region():
        for block in blocks:
            x = block(x)
    return x


def run_modules(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Runs blocks which are regions themselves; see `model_for`."""
    for block in blocks:
        x = block(x)
    return x


RUNS: dict[str, Callable[..., Tensor]] = {**MODES, "module": run_modules, "one_region": run_one_region}
DEFAULT = "none,torch,checkpoint,selective,region,module,one_region"


def model_for(mode: str, vocabulary: int, options: Options, *, reshard_after_forward: bool) -> CharLM:
    """Returns a model whose blocks, and the rest of it, are units of FSDP. Checkpointing is applied before FSDP."""
    run = RUNS[mode] if mode not in MODES else way_to_run(mode, options.policy)
    model = CharLM(vocabulary, options, run)
    mesh = init_device_mesh(torch.device(options.device).type, (dist.get_world_size(),))
    for block in model.blocks:
        if mode == "module":
            checkpoint_module(block)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def train(mode: str, text: Tensor, vocabulary: int, options: Options, *, reshard_after_forward: bool) -> list[float]:
    """Trains a fresh model in one mode; returns the loss of each step, averaged over all processes."""
    torch.manual_seed(options.seed)  # equal parameters everywhere
    model = model_for(mode, vocabulary, options, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own_seed = options.seed + dist.get_rank()
    torch.manual_seed(own_seed)  # dropout of each process's own
    generator = torch.Generator().manual_seed(own_seed)
    losses = []
    for _ in range(options.steps):
        tokens, targets = draw_batch(text, options, generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main() -> None:
    """Trains in each mode asked for; the first process prints a table."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT under FSDP2, with and without checkpointing, and compare the losses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", default=DEFAULT, help=f"one or more of {', '.join(RUNS)}")
    add_model_options(parser, steps=5, layers=4, width=64, context=64, batch=4)
    add("--policy", default="save_compute_and_communication", help="what the selective modes keep")
    add("--reshard-after-forward", action=argparse.BooleanOptionalAction, default=True, help="free gathered parameters")
    values = vars(parser.parse_args())
    modes, reshard = values.pop("mode").split(","), values.pop("reshard_after_forward")
    if unknown := sorted(set(modes) - set(RUNS)):
        parser.error(f"argument --mode: got {', '.join(unknown)}, expected one or more of {', '.join(RUNS)}")
    if "RANK" not in os.environ:
        parser.error("run this by torchrun: torchrun --nproc-per-node 2 examples/train_fsdp.py")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        options = Options(device=device, **values)
        text, vocabulary = load_tokens()
        losses = {mode: train(mode, text, vocabulary, options, reshard_after_forward=reshard) for mode in modes}
        if dist.get_rank() == 0:
            for mode, found in losses.items():
                print(f"{mode:<16} {' '.join(f'{loss:.6f}' for loss in found)}")
            equal = all(found == losses[modes[0]] for found in losses.values())
            print(f"losses of all modes bitwise equal: {'yes' if equal else 'NO'}")
        gc.collect()  # models that are garbage by now hold the process group, which torch does not always survive at exit
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
