"""Arguments that nobody thought of: what they plainly say, or an error that names the argument."""

from __future__ import annotations

from fractions import Fraction

import pytest
from torch import nn

from ckpt_hooks import apply_checkpointing
from ckpt_hooks._core.misuse import checked_bytes

pytest.importorskip("hypothesis")

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

many = settings(max_examples=300, derandomize=True, deadline=None, database=None)

UNITS = {"b": 1, "k": 1024, "kib": 1024, "kB": 1000, "M": 1024**2, "mib": 1024**2, "MB": 10**6, "GiB": 1024**3, "t": 1024**4}


@many
@given(st.from_regex(r"\A[0-9]{1,18}(\.[0-9]{1,6})?\Z"), st.sampled_from([*UNITS]), st.sampled_from(["", " "]))
def test_words_for_bytes_are_exact(number, unit, space):
    expected = int(Fraction(number) * UNITS[unit])
    assume(expected < 2**63)
    assert checked_bytes(f"{number}{space}{unit}", "limit") == expected


@many
@given(st.text("0123456789.ekmgib _-+", max_size=500) | st.text() | st.integers() | st.floats() | st.none() | st.binary())
@example("9" * 400 + "b")
def test_bytes_are_bytes_or_an_error(value):
    try:
        assert 0 <= checked_bytes(value, "limit") < 2**63
    except (TypeError, ValueError) as error:
        assert str(error).startswith("limit should be a number of bytes, but got")  # noqa: PT017


class Net(nn.Module):
    """Two lists of layers, and a layer."""

    def __init__(self):
        super().__init__()
        self.a = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
        self.b, self.head = nn.ModuleList(nn.ReLU() for _ in range(2)), nn.Linear(2, 2)


numbers, parts = (
    st.none() | st.integers(-4, 4),
    st.sampled_from(["a", "b", "head", "*", "**", "0", "1", "?", "a*", "", "[0]", r"\d"]),
)
keys = (
    *(st.lists(parts, min_size=1, max_size=4).map(".".join), st.integers(-5, 5), st.builds(range, st.integers(-4, 4))),
    *(st.sampled_from([nn.Linear, nn.ReLU, nn.Module, nn.Conv1d, None, 1.5, b"a"]),),
)
slices = st.builds(slice, numbers, numbers, st.sampled_from([None, 1, 2, -1]))


@many
@given(
    st.one_of(*keys, slices)
    | st.lists(st.one_of(*keys, slices), max_size=3)
    | st.dictionaries(st.one_of(*keys), st.sampled_from([None, "dots_saveable"]), max_size=3)
)
@example([range(0), 1])
def test_selections_are_regions_in_order_or_an_error(select):
    """And both leave the model as it was, the regions once they are undone."""
    model = Net()
    names, before = [name for name, _ in model.named_modules()], [dict(vars(module)) for module in model.modules()]
    try:
        applied = apply_checkpointing(model, select)
    except (TypeError, ValueError) as error:
        assert "select" in str(error).lower()  # noqa: PT017
    else:
        places = [names.index(region.name) for region in applied]
        assert places == sorted({*places} - {0})
        applied.undo()
    assert [dict(vars(module)) for module in model.modules()] == before
