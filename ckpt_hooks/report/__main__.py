"""Runs a training script, and prints the ledger of one of its steps: ``python -m ckpt_hooks.report script.py``."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_hooks._torch.autograd import graph_task_id

from .ledger import MemoryLedger, ledger_of
from .progress import is_first_rank


class _Measured(SystemExit):
    """Ends the script after the measured step."""


class _ScriptSteps:
    """The steps of a script: a step ends with the calls of ``optimizer.step()`` before the next call of a module."""

    # A ledger begins and ends in calls of ``optimizer.step()``, at the same depth of the program, so that the ledger's function
    # mode is the innermost mode both times.

    def __init__(self, wanted: int, goes_on: bool) -> None:
        self._wanted, self._goes_on, self._thread = wanted, goes_on, threading.get_ident()
        self.ledger: MemoryLedger | None = None
        self.number, self.is_done = 0, False
        self.open = contextlib.ExitStack()
        self._is_called = True  # whether a module was called since the latest step of an optimizer
        self._stepped: list[int] = []  # the optimizers that have stepped in this step
        self._count = 1  # how many did in the step before: the measured step ends when as many have
        if wanted == 1:
            self._begin()

    def called(self, module: Any, args: Any) -> None:
        self._is_called = True

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_done or threading.get_ident() != self._thread or graph_task_id() != -1:
            return
        if self._is_called or id(optimizer) in self._stepped:  # the same optimizer steps again, without a module between
            self._count, self._stepped = len(self._stepped) or self._count, []
            self.number, self._is_called = self.number + 1, False
        self._stepped.append(id(optimizer))
        if self.number == self._wanted - 1:
            self.open.close()  # opened by another optimizer of the same step
            self._begin()
        elif self.ledger is not None and (len(self._stepped) == self._count or self.number > self._wanted):
            self.is_done = True
            self.open.close()
            if not self._goes_on:
                raise _Measured

    def _begin(self) -> None:
        try:
            self.ledger = self.open.enter_context(ledger_of(None))
        except RuntimeError:  # the program profiles this step itself: measure the next
            self._wanted += 1


def _run(script: str, arguments: Sequence[str]) -> None:
    """Runs a script as ``python script.py`` does."""
    path = os.path.abspath(script)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    exec(code, vars(module))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ckpt_hooks.report",
        description="Run a training script, and print the ledger of one of its steps: every byte, by phase, what holds most at "
        "the peak, and what would reduce it. A step ends at optimizer.step(), or at the last of several in a row; calls inside "
        "of backward do not count. With torchrun, write `torchrun -m ckpt_hooks.report script.py`: the first rank prints.",
    )
    parser.add_argument("--step", type=int, default=3, help="number of the step (default: 3; the first makes optimizer states)")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="run the script to its end (default: stop it)")
    parser.add_argument("--snapshot", metavar="FILE", help="write the step for https://pytorch.org/memory_viz, too")
    parser.add_argument("script", help="the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the arguments of the script")
    options = parser.parse_args(arguments)
    if options.step < 1:
        parser.error(f"argument --step: got {options.step}, expected 1 or more")
    if not os.path.isfile(options.script):
        parser.error(f"argument script: {options.script!r} is no file. Pass the path of a Python script")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keeps the profiler from printing
    steps, has_failed = _ScriptSteps(options.step, options.goes_on), False
    try:
        with register_module_forward_pre_hook(steps.called), register_optimizer_step_post_hook(steps.stepped), steps.open:
            _run(options.script, options.args)
    except _Measured:
        pass
    except Exception:
        has_failed = True
        raise
    finally:
        if steps.ledger is not None and (steps.is_done or has_failed) and is_first_rank():
            print(steps.ledger)  # noqa: T201
            if options.snapshot is not None:
                steps.ledger.save_snapshot(options.snapshot)
        elif is_first_rank():
            print(f"No ledger: the script ended after step {steps.number}. Pass a lower --step.", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
