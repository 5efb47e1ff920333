"""A device that is not there: tensors on the host that come and go by streams whose work is done late, and in order.

Operators on host tensors run at once, as if the stream that computes were always idle. A copy on another stream is put down as
work, and what it writes to holds poison (bytes of ones: NaN, or -1) until a stream that computes waits for it. When its turn
comes, a copy reads and writes memory as it is then. Memory that was freed meanwhile is somebody else's: to read it leaves the
poison, to write to it is a fault, which the fixture raises at the end. Only ``Tensor.record_stream`` holds memory for a stream;
it is a real operator, which modes see.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ckpt_hooks._recorded import functions
from ckpt_hooks._state import contents, trees
from ckpt_hooks._tensors import transfers
from ckpt_hooks._tensors.transfers import Transfers
from tests.measure import as_library

_copy = torch.Tensor.copy_
_numbers = itertools.count(1)
_one_at_a_time = threading.RLock()


@as_library
class FakeEvent:
    """A place in the work of a stream."""

    def __init__(self, stream: FakeStream, position: int, name: str) -> None:
        self.stream, self.position, self.name = stream, position, name

    def land(self) -> None:
        """Does the work that comes before it."""
        self.stream.run(self.position)


@as_library
class FakeStream(torch.Stream):
    """A stream that computes, and is never behind, or one that copies, and does its work when it is waited for."""

    def __new__(cls, name: str, notes: list[Any], *, computes: bool = True) -> FakeStream:
        return super().__new__(cls, stream_id=next(_numbers), device_index=0, device_type=0)

    def __init__(self, name: str, notes: list[Any], *, computes: bool = True) -> None:
        self.name, self.notes, self.computes = name, notes, computes
        self.work: list[Any] = []
        self.done = self.events = 0

    def __hash__(self) -> int:
        return self.stream_id

    def run(self, end: int) -> None:
        """Does its work up to a place, which no mode of the waiting thread sees."""
        with _one_at_a_time, _disable_current_modes():
            while self.done < end:
                todo, self.work[self.done] = self.work[self.done], None
                self.done += 1
                todo()

    def _wait(self, event: FakeEvent) -> None:
        if self.computes:
            event.land()
        else:
            self.work.append(event.land)

    def wait_stream(self, other: FakeStream) -> None:
        self.notes.append((self.name, "waits for", other.name))
        self._wait(FakeEvent(other, len(other.work), other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self.notes.append((self.name, "waits for", event.name))
        self._wait(event)

    def record_event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, len(self.work), f"{self.name} {self.events}")


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))


@as_library
class FakeTransfers(Transfers):
    """Transfers of a device whose tensors are on the host.

    Attributes:
        main: The stream that computes.
        notes: What streams were told, copies and marks, in order.
        faults: What a real device would have gone wrong by.
        sources: The memory that each copy to the host has to read, while that is there.
        fetched: The memory of each tensor that was fetched, likewise.
    """

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.faults: list[str] = []
        self.sources: list[weakref.ref[torch.UntypedStorage]] = []
        self.fetched: list[weakref.ref[torch.UntypedStorage]] = []
        self.main = FakeStream("main", self.notes)
        self._thread = threading.local()
        self._hosts: list[weakref.ref[torch.UntypedStorage]] = []
        self._streams: list[FakeStream] = []

        @contextlib.contextmanager
        def stream(new: FakeStream) -> Iterator[None]:
            before, self.running = self.running, new
            yield
            self.running = before

        def new_stream(device: Any) -> FakeStream:
            self._streams.append(FakeStream("back" if self._streams else "out", self.notes, computes=False))
            return self._streams[-1]

        torch.fake = types.SimpleNamespace(Stream=new_stream, stream=stream, current_stream=lambda device: self.running)
        try:
            super().__init__(types.SimpleNamespace(type="fake"))
        finally:
            del torch.fake
        self._device = torch.device("cpu")

    @property
    def running(self) -> FakeStream:
        """The present stream of this thread."""
        return getattr(self._thread, "running", self.main)

    @running.setter
    def running(self, stream: FakeStream) -> None:
        self._thread.running = stream

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self._hosts.append(weakref.ref(host.untyped_storage()))
        return host

    def copy_(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """What stands for ``Tensor.copy_``."""
        stream = self.running
        if stream.computes or not non_blocking:
            return _copy(to, source, non_blocking)
        assert to.dtype is source.dtype
        assert to.stride() == source.stride()
        memory, read = to.untyped_storage(), source.untyped_storage()
        is_sent = any(host() is memory for host in self._hosts)
        self.notes.append(("send" if is_sent else "fetch", to.numel()))
        _bytes_of(memory).fill_(255)
        if to.is_conj() != source.is_conj():
            to.conj_physical_()  # at once, before the copy lands
        start, size = source.storage_offset() * source.itemsize, source.nbytes
        begin = to.storage_offset() * to.itemsize
        where = weakref.ref(memory)
        # Pinned memory waits for copies by itself when it is freed.
        kept = read if not is_sent else None
        origin = weakref.ref(read)
        (self.sources if is_sent else self.fetched).append(origin if is_sent else where)
        del memory, read

        def land() -> None:
            found, target = origin() if kept is None else kept, where()
            if target is None:
                if not is_sent:
                    self.faults.append(f"a copy of {size} bytes landed in memory that was free")
            elif found is None or found.nbytes() < start + size:
                self.faults.append(f"a copy of {size} bytes read memory that was free")
            else:
                _copy(_bytes_of(target)[begin : begin + size], _bytes_of(found)[start : start + size])

        stream.work.append(land)
        return to

    def record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """What the operator does: the memory stays until the stream has done its work."""
        (fake,) = (one for one in (self.main, *self._streams, *self.others) if one.stream_id == stream.stream_id)
        self.notes.append((fake.name, "uses", tuple(tensor.shape)))
        if not fake.computes:
            fake.work.append(tensor.untyped_storage().nbytes)

    others: tuple[FakeStream, ...] = ()

    def new_stream(self, name: str) -> FakeStream:
        """Returns another stream that computes."""
        self.others = (*self.others, FakeStream(name, self.notes))
        return self.others[-1]

    def in_flight(self) -> int:
        """Returns how many tensors that were sent still have their memory."""
        return sum(memory() is not None for memory in self.sources)

    def on_device(self) -> int:
        """Returns how many tensors that were fetched are there."""
        return sum(memory() is not None for memory in self.fetched)

    def moved(self) -> list[Any]:
        """Returns what was sent and fetched, in order."""
        return [note for note in self.notes if note[0] in ("send", "fetch")]

    def count(self, what: str) -> int:
        """Returns how many tensors were sent (``"send"``), or fetched."""
        return sum(note[0] == what for note in self.notes)

    def synchronize(self) -> None:
        """Does all the work there is."""
        for stream in self._streams:
            stream.run(len(stream.work))


@contextlib.contextmanager
def fake_device(min_offload_size: int = 1024) -> Iterator[FakeTransfers]:
    """Makes the host a device that offloads; raises for what a real one would have gone wrong by.

    Args:
        min_offload_size: Bytes from which policies move a tensor.
    """
    fake = FakeTransfers()
    before, cpu = transfers.DEFAULT_MIN_OFFLOAD_SIZE, torch.device("cpu")
    library = torch.library.Library("aten", "IMPL")
    library.impl("record_stream", fake.record_stream, "CPU")

    def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return fake.copy_(to, source, non_blocking)

    try:
        torch.Tensor.copy_ = copy_  # type: ignore[assignment]
        transfers.DEFAULT_MIN_OFFLOAD_SIZE = min_offload_size
        transfers._transfers[cpu] = fake
        yield fake
        fake.synchronize()
        assert fake.faults == []
    finally:
        del transfers._transfers[cpu]
        transfers.DEFAULT_MIN_OFFLOAD_SIZE = before
        del torch.Tensor.copy_
        library._destroy()


def count_waits_for_buffers(monkeypatch: Any) -> Counter[str]:
    """Has buffers pass for those of a device, where each comparison of contents makes the program wait; returns a count."""
    counts: Counter[str] = Counter()
    same_bits = contents.same_bits

    def counted(*tensors: torch.Tensor) -> bool:
        counts["waits"] += 1
        return same_bits(*tensors)

    monkeypatch.setattr(contents, "same_bits", counted)
    monkeypatch.setattr(contents, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(trees, "is_small_on_host", lambda note: False)
    return counts


def note_comparisons(monkeypatch: Any) -> list[tuple[int, ...]]:
    """Has the arguments of custom functions pass for those of a device; returns the shapes of those that are compared.

    The answer is a tensor there, which nobody looks at before backward.
    """
    differs, compared = functions.differs, []

    def later(tensor: torch.Tensor, image: Any) -> torch.Tensor:
        compared.append(tuple(tensor.shape))
        return torch.tensor(differs(tensor, image))

    monkeypatch.setattr(functions, "differs", later)
    return compared
