"""Warnings of policies: operators and names which never come. Each once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt_hooks._core.call_sites import warn_user

from .base import Policy

__all__ = ["warn_of_unheard", "warn_of_unseen"]

#: Not all regions under a policy are alike: the first may be a stem without what the list is about.
_LOOKED_THROUGH = 3


def warn_of_unseen(policy: Policy, operators: Iterable[Any]) -> None:
    """Warns of a policy whose operators did not run in its first regions; once for a policy.

    Args:
        policy: The policy.
        operators: Operators which ran in a region of the policy, at the region's end.
    """
    expected = policy.expects
    if not expected:
        return
    if expected.isdisjoint(operators):
        policy.looked_through += 1
        if policy.looked_through < _LOOKED_THROUGH:
            return
        names = ", ".join(sorted(map(str, expected)))
        policy.expects = frozenset()
        warn_user(
            f"{policy!r} names operators that did not run in the first {_LOOKED_THROUGH} regions under it, not one of them: "
            f"{names}. Operators are matched below autograd, where linear layers are aten.addmm or aten.mm, and attention has "
            "a name for each backend: pass ckpt_hooks.policies.save_compute_and_communication, which knows them, or a function "
            "that prints the operators which it is asked for."
        )
    policy.expects = frozenset()


def warn_of_unheard(policy: Policy, given: frozenset[str]) -> None:
    """Warns of a policy's names which no ``checkpoint_name`` gave; once for a policy.

    The warning comes after the policy's first region if that region gave none of the names, or after a region which gave a
    similar name (a slip of the pen) in place of a name which has not come yet.

    Args:
        policy: The policy.
        given: Names given in a region of the policy, at the region's end.
    """
    missing = policy.expected_names - given
    slips = {name: near for name in missing if (near := [other for other in given - policy.names if _is_slip(name, other)])}
    if not slips and missing != policy.names:
        policy.expected_names = missing
        return
    policy.expected_names = frozenset()
    meant = sorted({other for near in slips.values() for other in near})
    warn_user(
        f"{policy!r} has names that no tensor of its region has: {_quoted(slips or missing)}. "
        f"{f'Is {_quoted(meant)} meant? ' if meant else ''}Names in the region: {_quoted(given) or 'none'}. Give a tensor its "
        "name by checkpoint_name(tensor, name), among the lines of the region."
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _is_slip(one: str, other: str) -> bool:
    """Whether two names differ in case, signs, one letter too many, or two letters exchanged; never for a digit."""
    one, other = ("".join(filter(str.isalnum, name)).lower() for name in (one, other))
    if one == other:
        return True
    shorter, longer = sorted((one, other), key=len)
    if len(longer) == len(shorter) + 1:
        return any(not letter.isdigit() and shorter == longer[:at] + longer[at + 1 :] for at, letter in enumerate(longer))
    if len(longer) != len(shorter):
        return False
    places = [at for at, (letter, another) in enumerate(zip(one, other, strict=True)) if letter != another]
    if len(places) != 2 or places[1] != places[0] + 1:
        return False
    pair, exchanged = one[places[0] : places[1] + 1], other[places[0] : places[1] + 1]
    return pair == exchanged[::-1] and not pair.isdigit()
