"""Watching the runtime without its knowing: traces, reports and tests hang here.

An observer is picked up by each frame when its forward begins; where nobody watches, that is one look-up a region and one
attribute test an unpacked tensor, and packing uses a hook that knows nothing of observers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .frame import Frame, Observer
from .settings import current_settings, override

__all__ = ["observe"]


class _Several(Observer):
    """Passes every event on to each of several observers, the outermost first."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self.observers = observers

    def entered(self, frame: Frame) -> None:
        for observer in self.observers:
            observer.entered(frame)

    def packed(self, frame: Frame, index: int, tensor: torch.Tensor) -> None:
        for observer in self.observers:
            observer.packed(frame, index, tensor)

    def exited(self, frame: Frame, error: BaseException | None) -> None:
        for observer in self.observers:
            observer.exited(frame, error)

    def recomputing(self, frame: Frame) -> None:
        for observer in self.observers:
            observer.recomputing(frame)

    def recomputed(self, frame: Frame, error: BaseException | None) -> None:
        for observer in self.observers:
            observer.recomputed(frame, error)

    def unpacked(self, frame: Frame, index: int, tensor: torch.Tensor) -> None:
        for observer in self.observers:
            observer.unpacked(frame, index, tensor)


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Lets an observer watch every region whose forward begins in this block, its backward included, on this thread.

    Blocks nest; the outer observers go on watching.
    """
    outer = current_settings().observer
    if outer is not None:
        observer = _Several((*(outer.observers if isinstance(outer, _Several) else (outer,)), observer))
    with override(observer=observer):
        yield
