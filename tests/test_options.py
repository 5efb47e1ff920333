"""The table of options: each form of a region takes the options of its rows, by its signature, with defaults and checks."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing

import pytest
import torch

from ckpt_hooks import checkpoint, checkpoint_region, patch_torch
from ckpt_hooks._checkpoint.chunks import Chunks
from ckpt_hooks._options import OPTIONS, Form, RegionOptions, defaults_of, options_from, options_of
from ckpt_hooks.modules.forward import ModuleKeywords, RegionKeywords
from tests.measure import leaf


def block(x):
    return x.sin().exp()


def signatures():
    """Yields forms with the keywords and defaults of their signatures."""
    yield Form.DIRECT, checkpoint
    yield Form.RECORDED, checkpoint_region.__init__
    if sys.version_info >= (3, 11):
        direct, *_, curried = typing.get_overloads(inspect.unwrap(checkpoint))
        yield Form.DIRECT, direct
        yield Form.CURRIED, curried


@pytest.mark.parametrize(("form", "function"), list(signatures()))
def test_signatures_have_the_options_of_their_form(form, function):
    """With the defaults of the table."""
    keywords = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert sorted(keywords) == sorted(options_of(form))
    assert {name: keywords[name] for name in defaults_of(form)} == defaults_of(form)


def test_keywords_of_modules_are_those_of_both_forms():
    """And of chunks; type checkers read these."""
    options = {*options_of(Form.CURRIED), *options_of(Form.RECORDED)} - {"name", "policy"}
    assert RegionKeywords.__optional_keys__ == options
    assert ModuleKeywords.__optional_keys__ == options | {*Chunks._fields}


@pytest.mark.parametrize("form", list(Form))
def test_documented(form):
    """Each by its name."""
    documentation = checkpoint_region.__doc__ if form is Form.RECORDED else checkpoint.__doc__
    assert [name for name in options_of(form) if not re.search(rf"^ +(- )?`*{name}`*: ", documentation, re.MULTILINE)] == []


OTHERS = {"determinism_check": "none", "respect_saved_tensors_hooks": False}


@pytest.mark.parametrize("name", list(defaults_of(Form.DIRECT)))
def test_patch_torch_passes_on_what_torch_has(name, monkeypatch):
    """Of a flag torch asks for its truth."""
    torchs = torch.utils.checkpoint.checkpoint
    if name not in inspect.signature(torchs).parameters and name != "preserve_rng_state":
        pytest.skip("torch has no such option yet")
    value = OTHERS.get(name, not OPTIONS[name].default)
    seen = []
    module = sys.modules["ckpt_hooks.integrations.patch_torch"]
    frame_of_call = module.frame_of_call
    monkeypatch.setattr(module, "frame_of_call", lambda *args: (seen.append(args[3]), frame_of_call(*args))[1])
    with patch_torch():
        torchs(block, leaf(3), use_reentrant=False, **{name: value}).sum().backward()
        if isinstance(value, bool) and name not in OTHERS:
            torchs(block, leaf(3), use_reentrant=False, **{name: "yes" if value else ""}).sum().backward()
    expected = options_from(**{name: value})
    assert expected != RegionOptions()
    assert seen == [expected] * len(seen)


def test_options_of_frames_have_the_defaults_of_the_table():
    """And each row that frames know has a field of theirs."""
    fields = {name: option for name, option in OPTIONS.items() if option.check and name != "policy"}  # None is no policy
    checked = {option.field or name: option.check(option.default, name) for name, option in fields.items()}
    assert vars(RegionOptions()) == {**checked, "policy": None}


def test_options_made_quickly_are_those_of_the_class():
    """As Dynamo makes them, which follows no ``object.__new__``."""
    made = options_from(RegionOptions(name="block"), debug=True, offload_inputs=True, split_backward=False)
    assert made == dataclasses.replace(RegionOptions(), name="block", debug=True, offload_from=made.offload_from)
    assert list(vars(made)) == [field.name for field in dataclasses.fields(RegionOptions)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.debug = False
