"""Runs the plain test command under other versions of Python and of torch, each in an environment of its own.

    python -m tests.versions 3.10:2.11.0 3.12:2.12.0 3.13:2.14.1

A pair is a Python, found on the ``PATH`` as ``python3.10``, and a torch, which pip installs; without pairs all of both are
tried. Prints a table in Markdown, a row as soon as it is known; what cannot be installed says so.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")


def tested(python: str, torch: str) -> str:
    """Returns the last line of the tests, or the last one of what went wrong before them."""
    interpreter = shutil.which(f"python{python}")
    if interpreter is None:
        return f"no python{python} on the PATH"
    with tempfile.TemporaryDirectory() as environment:
        own = str(pathlib.Path(environment, "bin", "python"))
        install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        commands = (
            [interpreter, "-m", "venv", environment],
            [*install, f"torch=={torch}"],
            [*install, "-e", ".[test]"],
            [own, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        )
        for command in commands:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                break
        *_, last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no word"]
    if command is not commands[-1]:
        return f"not installed: {last}"
    found = re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)
    return ", ".join(f"{count} {what}" for count, what in found[-4:]) or last


def main(pairs: list[str]) -> None:
    """Prints the table of the pairs."""
    chosen = [pair.split(":") for pair in pairs] or [list(pair) for pair in itertools.product(PYTHONS, TORCHES)]
    sys.stdout.write("| Python | torch | `python -m pytest` |\n|---|---|---|\n")
    for python, torch in chosen:
        sys.stdout.write(f"| {python} | {torch} | {tested(python, torch)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
