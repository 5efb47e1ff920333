"""Ranks that plan together: they exchange measurements, make the same choice, and all end if a rank fails.

They meet in the store of the process group, not in collectives. The step has collectives of its own: a rank that waits there
for a failed rank would take the next message of the failed rank for the answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from ckpt_hooks._core.misuse import wrong
from ckpt_hooks.errors import CheckpointError

T = TypeVar("T")

_LOOK = 0.1  # seconds between two checks for a failed rank, and at most between two checks for awaited keys
_GRACE = 5.0  # seconds for a rank to leave its step after another rank failed, and for all ranks to hear of a failure


class Ranks:
    """The ranks of a process group; a single rank exchanges nothing."""

    def __init__(self, group: Any = None) -> None:
        self._rank, self._names, self._patience = 0, [0], 0.0
        self._store: Any = None  # for all calls; ``_call`` is the store for this call
        self._call: Any = None
        self._number = 0  # the number of the latest exchange in this call
        self._left: list[tuple[Any, tuple[str, str]]] = []  # earlier calls, with this rank's keys in the store
        self._failure: tuple[int, str] | None = None  # the rank that has failed, and its error in words
        is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
        if group is not None and not (is_there and isinstance(group, torch.distributed.ProcessGroup)):
            raise wrong(group, "group", "a process group with this process", "Pass a result of torch.distributed.new_group.")
        size = torch.distributed.get_world_size(group) if is_there else 1
        # Whether ranks outside of the group have plans of their own.
        self.is_part = is_there and size < torch.distributed.get_world_size()
        if size == 1:
            return
        from ckpt_hooks._torch import groups  # needs torch.distributed

        self._groups = groups
        self._names = torch.distributed.get_process_group_ranks(group)
        self._rank = torch.distributed.get_rank(group)
        group = group or torch.distributed.group.WORLD
        self._patience = groups.patience_of(group)
        members = hashlib.sha256(repr(self._names).encode()).hexdigest()
        self._store = groups.store_in(f"ckpt_hooks/{group.group_name}/{members}", groups.default_store())

    @property
    def is_alone(self) -> bool:
        return self._store is None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Makes an exception of any rank an exception on all ranks."""
        if self._store is not None and not torch.distributed.is_initialized():  # a plan may outlive its group
            vars(self).update(vars(Ranks()))
        if self._store is None:
            yield
            return
        around = self._call, self._number
        if len(self._left) > 1:  # all ranks met in the latest call, so they have left the call before it
            call, keys = self._left.pop(0)
            for key in keys:
                call.delete_key(key)
        number = self._store.add(f"calls/{self._rank}", 1)
        self._call = call = self._groups.store_in(str(number), self._store)
        self._number, self._failure = 0, None
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(call, ended), daemon=True).start()
        try:
            yield
            with contextlib.suppress(RuntimeError):  # raised if the store is gone
                call.set(f"left/{self._rank}", "")
                if self._rank == 0:  # the store may end with this process, while others read it
                    self._missing("left", _GRACE)
        except BaseException as error:
            self._fail(call, error)
            raise
        finally:
            ended.set()
            self._left.append((call, (f"{self._number}/{self._rank}", f"left/{self._rank}")))
            self._call, self._number = around

    def all(self, value: T) -> list[T]:
        if self._store is None:
            return [value]
        self._number += 1
        # Compressed, since a store of torch takes at most 8 MiB.
        self._call.set(f"{self._number}/{self._rank}", zlib.compress(pickle.dumps(value), 1))
        if missing := self._missing(str(self._number), self._patience):
            if self._failure is not None:
                raise self._error()
            raise CheckpointError(
                f"{_in_words(missing)} did not join within {self._patience:g} s, the timeout of the process group. All ranks "
                "have to call plan_memory and the methods of its plan, with steps that take part in the same collectives. Pass "
                "group=... to plan with some ranks only, or a group of one rank."
            )
        keys = [f"{self._number}/{rank}" for rank in range(len(self._names))]
        values = [pickle.loads(zlib.decompress(packed)) for packed in self._call.multi_get(keys)]
        if self._number > 1:  # all ranks have come to this exchange, so they have read the values of the last
            self._call.delete_key(f"{self._number - 1}/{self._rank}")
        return values

    def _missing(self, place: str, patience: float) -> list[int]:
        """Waits until all ranks have set their keys of a place; returns ranks that have not when time is up or a rank fails."""
        keys = {name: f"{place}/{rank}" for rank, name in enumerate(self._names)}
        end, pause = time.monotonic() + patience, 1e-3
        while not self._call.check([*keys.values()]):
            if self._is_lost() or time.monotonic() > end:
                return [name for name, key in keys.items() if not self._call.check([key])]
            time.sleep(pause)
            pause = min(2 * pause, _LOOK)
        return []

    def _is_lost(self) -> bool:
        return self._failure is not None and self._failure[0] != self._names[self._rank]

    def first(self, function: Callable[[], T]) -> T:
        """Returns the result of a function that only the first rank calls."""
        values: Any = self.all(function() if self._rank == 0 else None)
        value: T = values[0]
        return value

    def most(self, value: int) -> int:
        return max(self.all(value))

    def attempt(self, function: Callable[[], T]) -> T | None:
        """Returns the result of a function; None on all ranks if the function raises a CheckpointError on any rank."""
        outcome = None
        with contextlib.suppress(CheckpointError):
            outcome = function()
        return outcome if all(self.all(outcome is not None)) else None

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises on all ranks if any fact differs from the first rank's, and names the fact."""
        digests = {name: hashlib.sha256(repr(fact).encode()).hexdigest() for name, fact in facts.items()}
        peers = self.all(digests)
        for name in dict.fromkeys(name for peer in peers for name in peer):
            if others := [rank for rank, peer in zip(self._names, peers, strict=True) if peer.get(name) != peers[0].get(name)]:
                raise CheckpointError(
                    f"{_in_words(others)} and rank {self._names[0]} differ in {name}. Ranks that plan together have to run the "
                    "same model with the same steps. Pass group=... to plan with some ranks only."
                )

    def _error(self) -> CheckpointError:
        assert self._failure is not None
        name, words = self._failure
        return CheckpointError(
            f"Rank {name} failed while the ranks planned together, or applied a plan: {words}. Fix the error of that rank. If "
            "this rank waited in a collective, its process groups are closed: end the program, or make new groups."
        )

    def _watch(self, call: Any, ended: threading.Event) -> None:
        """Looks for a failure of another rank, and ends the collectives in which this rank waits."""
        with contextlib.suppress(RuntimeError):  # raised if the store is gone
            while not ended.wait(_LOOK):
                if not call.check(["failed"]):
                    continue
                name, words = json.loads(call.get("failed"))
                if name != self._names[self._rank]:
                    self._failure = name, words
                    call.set(f"heard/{self._rank}", "")
                    if not ended.wait(_GRACE):
                        self._groups.close_groups()
                return

    def _fail(self, call: Any, error: BaseException) -> None:
        """Tells other ranks of an error, or confirms that this rank has heard of an earlier error, which may be the cause."""
        failure = self._names[self._rank], f"{type(error).__name__}: {error}".rstrip(": ")
        with contextlib.suppress(RuntimeError):  # raised if the store is gone
            self._failure = self._failure or tuple(json.loads(call.compare_set("failed", "", json.dumps(failure))))
            call.set(f"heard/{self._rank}", "")
            self._missing("heard", _GRACE)  # the store may end with this process
        # If a partner in a collective has failed, the error that torch raises here is only a consequence.
        if self._is_lost() and (type(error) is RuntimeError or isinstance(error, torch.distributed.DistError)):
            raise self._error() from error


def _in_words(names: list[int]) -> str:
    return f"Rank{'s' * (len(names) > 1)} {', '.join(map(str, names))}"
