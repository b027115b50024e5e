# SPDX-License-Identifier: Apache-2.0
"""`--part`, `--subset` and `--sample`: which of the selected checkpoints a command takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from ckptmgr.cli.exits import UsageProblem

_One = TypeVar("_One")


class Chooser(Protocol):
    """Chooses from checkpoints by their paths, which `of` gives."""

    def __call__(self, found: Sequence[_One], of: Callable[[_One], str]) -> list[_One]:
        """Return those that are chosen, in their order."""
        ...


def chooser(
    part: str | None, subset: str | None, sample: str | None, environment: Mapping[str, str]
) -> Chooser | None:
    """Return the choice of the options; None where none is given.

    Raises:
        UsageProblem: A text names no part or share; or `auto`, and the environment gives no index.
    """
    from ckptmgr.maintenance.parts import Part, parse_part, parse_share, part_of_job, sampled

    if part is None and subset is None and sample is None:
        return None
    wanted: list[Part] = []
    option = "--part"
    try:
        if part is not None:
            name, _, count = part.partition("/")
            is_auto = name == "auto" and (not count or (count.isascii() and count.isdigit()))
            wanted.append(
                part_of_job(environment, int(count[:7]) if count else None)
                if is_auto
                else parse_part(part)
            )
        option = "--subset"
        if subset is not None:
            wanted.append(parse_part(subset, purpose="subset"))
        option = "--sample"
        share = None if sample is None else parse_share(sample)
    except ValueError as error:
        raise UsageProblem(
            f"{option}: {error}", hint="write --part 2/8, --part auto, --subset 1/7 or --sample 5%"
        ) from error

    def choose(found: Sequence[_One], of: Callable[[_One], str]) -> list[_One]:
        own = [
            one for one in found if all(each.holds(of(one).rpartition("/")[2]) for each in wanted)
        ]
        return own if share is None else sampled(own, share, of, random.Random())  # noqa: S311 - no secret

    return choose
