"""Names of packages, found when asked for: a first region needs few of the package's modules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module

_lock = threading.RLock()  # of modules which need each other, two threads may find one half made


def names_of(package: str, names_in: dict[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` of a package, given the names in each module; its own modules are names too."""
    namespace = vars(sys.modules[package])
    places = {name: module for module, names in names_in.items() for name in (*names.split(), module[1:])}

    def find(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with _lock:
            module = import_module(places[name], package)
        if places[name] == f".{name}":
            return module
        found: object = getattr(module, name)
        if places[name].startswith("."):  # other packages may exchange theirs
            namespace[name] = found
        return found

    return find, lambda: sorted({*namespace, *filter(str.isidentifier, places)})
