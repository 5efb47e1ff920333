"""What the benchmarks share: threads, the interleaved measurement of each program, and the tables at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from .interleave import interleave
from .programs import IMPLEMENTATIONS, build

Figures = dict[str, dict[str, float]]
TABLES = pytest.StashKey[dict[str, Figures]]()
LINES = pytest.StashKey[list[str]]()

COLUMNS = {
    "us_per_step": ("us a step", ",.1f"),
    "us_over_floor": ("over floor", ",.1f"),
    "share_of_torch_overhead": ("of torch's", ".3f"),
    "ratio_to_torch": ("ratio to torch", ".3f"),
    "peak_bytes": ("peak bytes", ",.0f"),
    "python_bytes_per_saved_tensor": ("Python bytes", ",.1f"),
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Runs all benchmarks on one thread: more of them add noise, and the runtime's own work has only one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def seconds(one_thread: None) -> Callable[[str], dict[str, float]]:
    """Gives seconds a step of each implementation of a program, all measured in turn when the first of them asks."""

    @cache
    def measure(name: str) -> dict[str, float]:
        program = build(name)
        return interleave({implementation: program.step(implementation) for implementation in IMPLEMENTATIONS})

    return measure


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, str, dict[str, float]], None]:
    """Puts figures of one implementation into the table of a program."""

    def put(table: str, implementation: str, figures: dict[str, float]) -> None:
        request.config.stash.setdefault(TABLES, {}).setdefault(table, {})[implementation] = figures

    return put


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line below the tables."""
    return request.config.stash.setdefault(LINES, []).append


# Last, so that the ratios stand below pytest-benchmark's own tables.
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints one table a program, and the notes."""
    tables, lines = config.stash.get(TABLES, {}), config.stash.get(LINES, [])
    if tables or lines:
        terminalreporter.section("measured in turn, minimum over the rounds")
    for name, rows in tables.items():
        terminalreporter.write_line("")
        terminalreporter.write_line(name, bold=True)
        terminalreporter.write_line("  ".join([f"{'':<16}", *(f"{title:>14}" for title, _ in COLUMNS.values())]))
        for implementation, figures in rows.items():
            cells = [f"{figures[key]:{form}}" if key in figures else "-" for key, (_, form) in COLUMNS.items()]
            terminalreporter.write_line("  ".join([f"{implementation:<16}", *(f"{cell:>14}" for cell in cells)]))
    for line in ["", *lines]:
        terminalreporter.write_line(line)
