"""``python -m bench.cuda``: one table of times and memory on a CUDA device, each figure beside torch's from the same run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

# The transformer's block is that of the example.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from .large import large_tables
from .measure import Bench, Row, as_dict, table_of
from .processes import process_tables
from .small import small_tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and returns the exit status: 1 where a gradient is not exact, or a table failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.cuda", description=__doc__)
    add = parser.add_argument
    add("--device", type=torch.device, default=torch.device("cuda"), help="where to measure: cuda, or cpu to try the code")
    add("--quick", action="store_true", help="half of the rounds")
    add("--tiny", action="store_true", help="the smallest programs, once: to try the code")
    add("--only", default="", help="tables whose names have this in them")
    add("--json", type=Path, help="a file for the rows")
    options = parser.parse_args(arguments)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here, so there is nothing to measure.")
        return 0

    torch.set_num_threads(1)
    bench = Bench(options.device)
    if options.quick:
        bench = Bench(options.device, rounds=bench.rounds // 2, seconds=bench.seconds / 2)
    if options.tiny:
        bench = Bench(options.device, rounds=1, seconds=0, slice_seconds=0, is_tiny=True)
    start, rows, failed = perf_counter(), list[Row](), False
    for tables in (small_tables, process_tables, large_tables):
        for name, make in tables(bench):
            if options.only not in name:
                continue
            begin = perf_counter()
            try:
                rows += make(bench)
            except Exception as error:  # the other tables are worth having
                rows.append(Row(name, "failed", note=f"{type(error).__name__}: {error}"))
                failed = True
            print(f"[{perf_counter() - start:4.0f} s] {name}: {perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    if bench.device.type == "cuda":
        where = f"{torch.cuda.get_device_name(bench.device)}, of {torch.cuda.device_count()}"
    else:
        where = str(bench.device)
    print(f"{where}; torch {torch.__version__}; medians over at most {bench.rounds} rounds, in turn\n")
    print(table_of(rows))
    if options.json is not None:
        found = {"device": where, "torch": torch.__version__, "rows": [as_dict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed or any(row.exact is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
