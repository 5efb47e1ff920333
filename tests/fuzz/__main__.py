"""``python -m tests.fuzz``: how many programs differ, of which kinds, and the first of them made small."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch

from .features import parse
from .implementations import IMPLEMENTATIONS
from .run import Tally, fuzz, is_failure, minimal


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many programs to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each program takes the next one")
    parser.add_argument("--impl", choices=list(IMPLEMENTATIONS), default="ours", help="what runs the regions")
    parser.add_argument("--features", default="core", help="as in core,buffers or all,-ambient")
    parser.add_argument("--device", help="where the tensors of programs are, as in cuda")
    parser.add_argument("--stop-at-first", action="store_true", help="stop at the first program that differs")
    parser.add_argument("--scripts", type=int, default=1, help="how many of those that differ to shrink and print")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    faulthandler.enable()
    implementation = IMPLEMENTATIONS[options.impl]
    try:
        features = parse(options.features, options.impl)
    except ValueError as error:
        parser.error(str(error))

    write = sys.stdout.write
    start = time.monotonic()
    tally = Tally()
    seeds = range(options.seed, options.seed + options.programs)
    for found in fuzz(implementation, seeds, features, tally, options.device):
        if is_failure(found, features) and options.stop_at_first:
            break
    if options.device is not None:
        torch.get_device_module(options.device).synchronize()  # raises where a program has brought the device down
    write(
        f"{tally.programs} programs in {time.monotonic() - start:.0f} s, {tally.raising} of which raise under plain autograd; "
        f"{len(tally.differences)} differ under {implementation.name}\n"
    )
    for kind, number in tally.by_kind().most_common():
        seeds = [found.seed for found in tally.differences if found.kind == kind]
        write(f"{number:6} {kind}: seeds {', '.join(map(str, seeds[:12]))}{' ...' if len(seeds) > 12 else ''}\n")
    errors = ("raised", "clear error")
    explanations = Counter(found.explanation.splitlines()[0][:110] for found in tally.differences if found.kind in errors)
    for explanation, number in explanations.most_common(8):
        write(f"{number:12} {explanation}\n")
    failures = [found for found in tally.differences if is_failure(found, features)]
    for found in failures[: options.scripts]:
        write(f"\n{minimal(found, implementation, features, options.device)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
