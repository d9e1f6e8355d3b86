"""Quality in one word: policies for users who do not want to set the fields."""

from __future__ import annotations

from typing import Literal

from spillway_kv.policy import Policy

Quality = Literal["exact", "high", "default", "fast"]

# What the words mean and what they cost: docs/transformers.md.
_POLICIES: dict[str, Policy | None] = {
    "exact": Policy(selector="all"),
    "high": Policy(epsilon=0.05, delta=0.05),
    "default": None,
    "fast": Policy(epsilon=0.2),
}
QUALITIES = tuple(_POLICIES)


def policy_of(quality: str) -> Policy | None:
    """Returns the policy for a word.

    Args:
        quality: `exact`: all rows are attended, as without Spillway. `high`, `default` and
            `fast`: the relative error of the output of an attend is at most 0.05, 0.1 and 0.2,
            except for a share of 0.05, 0.1 and 0.1 of the attends. Certificates say so.

    Returns:
        The policy. None for `default`, which means the default policy of the model.

    Raises:
        ValueError: Another word.
    """
    try:
        return _POLICIES[quality]
    except (KeyError, TypeError):
        raise ValueError(
            f"quality {quality!r} is not one of {', '.join(map(repr, QUALITIES))}"
        ) from None


def chosen_policy(policy: Policy | None, quality: str | None) -> Policy | None:
    """Returns the policy that is given by one of the two.

    Raises:
        ValueError: Both are given, or `quality` is another word.
    """
    if quality is None:
        return policy
    if policy is not None:
        raise ValueError("policy and quality both set the policy: give only one of them")
    return policy_of(quality)
