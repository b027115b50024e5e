# SPDX-License-Identifier: Apache-2.0
"""Retention of a configuration: checks of `keep` and of `save_only_kept`."""

from __future__ import annotations

from ckptmgr.config.config import DEFAULT_KEEP_MAX
from ckptmgr.core.arguments import no_effect
from ckptmgr.policy.rules import Best, Epochs, Every, Last, Pinned, RetentionPolicy, Rule
from ckptmgr.policy.tag_rules import Tagged


def check_keep(
    keep: object, keep_max: int | None, keep_minutes: int | None
) -> RetentionPolicy | None:
    """Return the policy of `keep`, or None where it is not given.

    Raises:
        TypeError, ValueError: It is no policy, or there are options that it replaces.
    """
    if keep is None:
        return None
    if keep_max != DEFAULT_KEEP_MAX or keep_minutes != 0:
        raise ValueError(
            "For 'CheckpointConfig', 'keep' replaces 'keep_checkpoint_max' and 'keep_checkpoint_per_n_minutes'; "
            "give one or the other."
        )
    if isinstance(keep, str):
        from ckptmgr.policy.text import parse_policy

        return parse_policy(keep)
    if isinstance(keep, Rule):
        return RetentionPolicy((keep,))
    if not isinstance(keep, RetentionPolicy):
        raise TypeError(
            "For 'CheckpointConfig', the type of 'keep' must be str or RetentionPolicy, "
            f"but got {type(keep)}."
        )
    if not keep.rules:
        raise ValueError(
            "For 'CheckpointConfig', 'keep' has no rules; name what to keep, e.g. last(5)."
        )
    return keep


def check_only_kept(keep: RetentionPolicy | None) -> RetentionPolicy:
    """Return the rules that decide which due saves are made.

    Raises:
        ValueError: There is no `keep`, or one of its rules keeps whatever is newest.
    """
    if keep is None:
        raise ValueError(
            "save_only_kept needs keep=, whose rules say which saves are made: keep='best(3, loss, min)'"
        )
    from ckptmgr.policy.time_rules import EveryTime

    own = Rule.__module__.rpartition(".")[0]
    for rule in keep.rules:
        is_own = type(rule).__module__.rpartition(".")[0] == own
        if is_own and not isinstance(rule, Best | Every | EveryTime | Epochs | Pinned | Tagged):
            raise no_effect(
                "save_only_kept",
                f"with {rule}, which keeps every new checkpoint",
                "leave that rule out; the newest one always stays",
            )
    return keep


def joined_policy(keep: RetentionPolicy) -> RetentionPolicy:
    """Return a policy that keeps something early in a run, too."""
    sparse = Every | Best | Pinned | Tagged
    is_sparse = all(isinstance(rule, sparse) for rule in keep.rules)
    return keep | Last(1) if is_sparse else keep
