"""README: each sentence has a test, or a reason why it has none; links lead somewhere; the first table is that of a run."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import ckpt_hooks
from tests.measure import is_a_test

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
#: A line for each sentence of README: four digits of its hash, its first words, and after a bar its tests, or a dash and why
#: there are none. A sentence that has changed has another hash, so that somebody looks at its tests.
PROMISES = (ROOT / "tests" / "promises.txt").read_text().splitlines()
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "bench/README.md", "bench/RESULTS.md"]


def sentences() -> Iterator[str]:
    """Yields the sentences, and the rows of tables. Left out are heads, pictures, and code, which other tests run."""
    prose = re.sub(r"^```.*?^```$|^\|[^\n]*\n\|---[^\n]*", "", README, flags=re.M | re.S)
    for block in re.split(r"\n\n|\n(?=[-|])", prose):
        text = " ".join(block.split()).removeprefix("- ")
        if text and not text.startswith(("#", "![")):
            yield from [text] if text.startswith("|") else re.split(r"(?<=[.!?])(?:\*\*)? (?=[A-Z`*\"\[])", text)


def start_of(sentence: str) -> str:
    """Returns what stands before the bar."""
    return f"{hashlib.sha1(sentence.encode()).hexdigest()[:4]} {' '.join(sentence.split(' ')[:7]).replace('|', '/')}"


def test_each_sentence_has_tests_or_a_reason():
    lines = dict(line.split(" | ") for line in PROMISES)
    assert len(lines) == len(PROMISES)
    expected = [start_of(sentence) for sentence in sentences()]
    assert [start for start in expected if start not in lines] == [], "Find tests of these, and add lines to promises.txt."
    assert [*lines] == expected, "Take lines out of promises.txt, or put them in README's order."
    tests = {start: right.split() for start, right in lines.items() if not right.startswith("- ")}
    assert [(start, test) for start, found in tests.items() for test in found if not is_a_test(test)] == []


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_to_files(name):
    text, folder = (ROOT / name).read_text(), (ROOT / name).parent
    for path, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text):
        target = folder / path if path else ROOT / name
        assert target.exists(), path
        assert not anchor or anchor in anchors_of(target.read_text()), anchor
    for path in re.findall(r"`([\w/]+/\w+\.(?:py|md|txt))`", text):
        assert any((root / path).exists() for root in (ROOT, pathlib.Path(ckpt_hooks.__file__).parent)), path


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13" or torch.__version__ >= "2.14", reason="README's figures are of torch 2.13")
def test_the_first_table():
    """Peaks to the digit, but for the plan's: its choice goes by measured seconds, and is within the budget."""
    modes = {"none": "without", "torch": "`torch.utils", "checkpoint": "`checkpoint`", "region": "`checkpoint_region`"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "train_charlm.py"), "--steps", "1", "--json", "--mode"]
    done = subprocess.run([*command, ",".join([*modes, "budget:40MiB"])], check=True, capture_output=True, text=True)
    *found, planned = json.loads(done.stdout)["rows"]
    assert planned["peak_bytes"] <= 40 << 20
    assert re.search(r"^\| a budget of 40 MiB, planned \| at most 40 MiB \|", README, re.M)
    for row in found:
        words = rf"^\| {re.escape(modes[row['mode']])}[^|]* \| ([\d.]+) MiB \|"
        assert re.findall(words, README, re.M) == [f"{row['peak_bytes'] / 2**20:.1f}"], row
