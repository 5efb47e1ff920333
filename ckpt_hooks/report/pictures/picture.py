"""Pictures: figures of matplotlib which save themselves, and which notebooks show."""

from __future__ import annotations

import io
import os
from typing import Any

__all__ = ["Picture", "figure_of", "scale_of"]

_SCALES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


class Picture:
    """A picture. Notebooks show it.

    Attributes:
        figure: The figure of matplotlib, to change or to save otherwise.
    """

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file; the suffix says the format, as in ``"step.svg"``.

        Args:
            path: The file. Equal pictures make equal files.
        """
        import matplotlib as mpl

        with mpl.rc_context({"svg.hashsalt": "ckpt_hooks"}):
            self.figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png")
        return file.getvalue()


def figure_of(width: float, height: float) -> Any:
    """Returns a figure of matplotlib, of 100 pixels an inch, which no window shows.

    Raises:
        ImportError: If matplotlib is absent.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib, which is an extra of this package. Write `pip install 'ckpt_hooks[plot]'`."
        ) from error
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def scale_of(nbytes: int) -> tuple[str, int]:
    """Returns the unit for an axis up to some bytes, and the bytes of the unit."""
    return next((scale for scale in _SCALES if nbytes >= scale[1]), _SCALES[-1])
