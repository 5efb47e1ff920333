"""A device with streams, in the place of the CPU: its tensors are on the host, and its streams know in which order they run.

A stream is a clock for each stream: how far that one is at least when this one goes on. To wait for a stream is to take over
its clocks. A tensor has a time, at which an operator made it; an operator that reads a tensor whose time its stream does not
know of would read it too early on a device.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.measure import as_library


def storage_of(tensor):
    """Returns the address of a tensor's storage."""
    return tensor.untyped_storage()._cdata


@as_library
class FakeStream:
    """A stream of a device."""

    def __init__(self, device, name):
        self.device, self.name = device, name
        self.clocks = collections.Counter()

    def __repr__(self):
        return self.name

    def wait_stream(self, other):
        self.device.notes.append(f"{self} waits for {other}")
        self.clocks |= other.clocks  # the larger of each

    def run(self):
        """Runs an operator; returns its time."""
        self.clocks[self] += 1
        return self, self.clocks[self]


@as_library
class FakeAccelerator(types.SimpleNamespace):
    """A device module with streams and current devices, of each thread.

    Attributes:
        notes: Which streams waited for which.
        reads: How often the current device was asked for.
    """

    __hash__ = object.__hash__  # as modules have it

    def __init__(self, devices=1, *, initialized=True):
        super().__init__(initialized=initialized, notes=[], reads=0, host=torch.cpu, here=threading.local())
        self.default_generators = tuple(torch.Generator().manual_seed(i) for i in range(devices))
        self.defaults = [FakeStream(self, f"default {index}") for index in range(devices)]
        self.homes = {stream: index for index, stream in enumerate(self.defaults)}

    def __getattr__(self, name):
        return getattr(self.host, name)

    def stream(self, name, index=0):
        """Returns a new stream."""
        stream = FakeStream(self, name)
        self.homes[stream] = index
        return stream

    def is_initialized(self):
        return self.initialized

    def get_rng_state(self, index=0):
        return self.default_generators[index].get_state()

    def current_device(self):
        self.reads += 1
        return getattr(self.here, "index", 0)

    def set_device(self, index):
        self.here.index = index

    def current_stream(self, index=None):
        index = getattr(self.here, "index", 0) if index is None else index
        return getattr(self.here, "streams", self.defaults)[index]

    def set_stream(self, stream):
        streams = list(getattr(self.here, "streams", self.defaults))
        streams[self.homes[stream]] = stream
        self.here.streams, self.here.index = streams, self.homes[stream]

    @contextlib.contextmanager
    def on(self, stream):
        """Runs on a stream for a while."""
        index, streams = getattr(self.here, "index", 0), getattr(self.here, "streams", self.defaults)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.here.index, self.here.streams = index, streams


@as_library
class Order(TorchDispatchMode):
    """Notes operators that read tensors too early, and the stream that each operator runs on.

    Attributes:
        early: Those that read too early.
        ran: Operators and streams, in order.
        used: Streams by which tensors are used, by the address of a storage.
    """

    def __init__(self, device):
        super().__init__()
        self.device, self.early, self.ran = device, [], []
        self.made = {}
        self.used = collections.defaultdict(set)
        self.kept = []  # so that no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        stream = self.device.current_stream(0)
        name = func._schema.name.removeprefix("aten::")
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        for tensor in tensors:
            maker, time = self.made.get(storage_of(tensor), (stream, 0))
            if stream.clocks[maker] < time:
                self.early.append(f"{name} on {stream} of what {maker} made")
        out = func(*args, **(kwargs or {}))
        time = stream.run()
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in map(storage_of, tensors):
                self.made[storage_of(tensor)] = time
                self.kept.append(tensor.untyped_storage())
        self.ran.append((name, str(stream)))
        return out
