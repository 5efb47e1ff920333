"""Processes with a process group, started once for many tests."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

__all__ = ["Ranks"]

#: Seconds until a collective gives up whose partner does not come, and until the test does.
PATIENCE = 30

#: Imported once, by the process of which those of all groups are forks.
_FIRST = ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "ckpt_hooks"]


class Ranks:
    """Runs functions in several processes at once, which gloo connects.

    After a failure new processes are started, since the old ones may wait for each other.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._processes: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a function of a module in each process; returns the results.

        Raises:
            AssertionError: With the tracebacks of the processes in which the function raised.
        """
        self._start()
        task = pickle.dumps((function, args, kwargs))
        for _, connection in self._processes:
            connection.send_bytes(task)
        results, errors = [], []
        for rank, (_, connection) in enumerate(self._processes):
            try:
                done, result = pickle.loads(connection.recv_bytes()) if connection.poll(2 * PATIENCE) else (False, "no answer")
            except EOFError:
                done, result = False, "the process died"
            results.append(result)
            if not done:
                errors.append(f"In process {rank}:\n{result}")
        if errors:
            self.stop()
            raise AssertionError("\n".join(errors))
        return results

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_FIRST)
        with tempfile.NamedTemporaryFile(delete=False) as file:
            path = file.name
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._world, path, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))

    def stop(self) -> None:
        """Ends the processes."""
        processes, self._processes = self._processes, []
        for process, connection in processes:
            connection.close()
            process.join(0 if process.exitcode is None else None)
            process.kill()
            process.join()


def _serve(rank: int, world: int, path: str, connection: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # the objects of all that is imported, which a plan would walk over in each of its steps
    store = torch.distributed.FileStore(path, world)
    patience = timedelta(seconds=PATIENCE)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    with contextlib.suppress(EOFError):
        while True:
            function, args, kwargs = pickle.loads(connection.recv_bytes())
            try:
                torch.manual_seed(0)
                answer = (True, function(*args, **kwargs))
            except BaseException:
                answer = (False, traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer))
