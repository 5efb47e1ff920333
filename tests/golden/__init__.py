"""Whole texts that nothing may change unseen; ``CKPT_HOOKS_GOLDEN=1`` writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path


def check(name: str, text: str) -> None:
    """Compares a text with a file, but for times, the lines of tests, and the ends of lines."""
    text = re.sub(r" +\d+\.\d\d(?= )|\d+\.\d(?= ms)", " -", text)
    text = re.sub(r" +(?=ms  )", "  ", text)  # a column of times is as wide as its longest, such as 10.00 on a busy host
    text = "".join(f"{line.rstrip()}\n" for line in re.sub(r"(?<=\.py:)\d+", "-", text).strip().splitlines())
    file = Path(__file__).with_name(f"{name.replace(', ', '_')}.txt")
    if os.environ.get("CKPT_HOOKS_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
