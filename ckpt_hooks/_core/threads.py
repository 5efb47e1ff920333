"""Whether Python runs other threads."""

from __future__ import annotations

import sys
import threading

from torch.autograd import graph


def are_other_threads_alive() -> bool:
    """Whether Python has other threads, which may wait."""
    return len(threading._active) > 1  # type: ignore[attr-defined]


def other_threads_run() -> bool:
    """Whether other threads of Python run, besides threads that wait for a backward of autograd."""
    if not are_other_threads_alive():
        return False
    own, frames = threading.get_ident(), sys._current_frames()
    del frames[own]  # which holds this dict: a cycle with all that is on the stack
    others = [one.ident for one in threading.enumerate() if one.ident != own and not isinstance(one, threading._DummyThread)]
    return any(one in frames and frames[one].f_code is not graph._engine_run_backward.__code__ for one in others if one)
