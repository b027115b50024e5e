# SPDX-License-Identifier: Apache-2.0
"""Parts of a directory, for fleets: which of N processes verifies which checkpoints. Pure.

The part of a checkpoint depends on its name alone, so that N processes which list a directory at
different times verify each of its checkpoints once.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_One = TypeVar("_One")
_PART = re.compile(r"([0-9]{1,7})/([0-9]{1,7})")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%")


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count`, from 1; parts of another `purpose` cut across these."""

    index: int
    count: int
    purpose: str = "part"

    def __str__(self) -> str:
        """Return e.g. `2/8`."""
        return f"{self.index}/{self.count}"

    def holds(self, name: str) -> bool:
        """Return whether the checkpoint of this name is in the part.

        >>> [sum(Part(i, 4).holds(f"net-{step}.ckpt") for step in range(100)) for i in (1, 2, 3, 4)]
        [26, 30, 22, 22]
        """
        text = f"{self.purpose}:{name}".encode("utf-8", "surrogateescape")
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        return number % self.count == self.index - 1


def parse_part(text: str, *, purpose: str = "part") -> Part:
    """Return the part that a text such as `2/8` names.

    Raises:
        ValueError: It names none.
    """
    match = _PART.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"{text[:40]!r} is no part, such as 2/8")
    return Part(int(match[1]), int(match[2]), purpose)


def part_of_job(environment: Mapping[str, str], count: int | None = None) -> Part:
    """Return the part of this process in a job array or job step of Slurm, or an indexed job of Kubernetes.

    `count` is needed where the environment has the index alone, as in Kubernetes.

    Raises:
        ValueError: There is no index, or no count; names the missing value.
    """
    if "SLURM_ARRAY_TASK_ID" in environment:
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_STEP")  # fmt: skip
        task, first, known, step = (_number(environment, name) for name in names)
        index = None if task is None else (task - (first or 0)) // (step or 1)
    elif "JOB_COMPLETION_INDEX" in environment:
        index, known = _number(environment, "JOB_COMPLETION_INDEX"), None
    elif "SLURM_PROCID" in environment:
        index, known = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
    else:
        raise ValueError(
            "neither SLURM_ARRAY_TASK_ID, nor JOB_COMPLETION_INDEX of Kubernetes, nor SLURM_PROCID is set"
        )
    count = known if count is None else count
    if index is None or count is None:
        raise ValueError("the environment does not say of how many parts, such as auto/8")
    if not 0 <= index < count:
        raise ValueError(f"this is process {index + 1}, but there are {count} parts")
    return Part(index + 1, count)


def parse_share(text: str) -> float:
    """Return the share that a text such as `5%` names, above 0 and up to 1.

    Raises:
        ValueError: It names none.
    """
    match = _SHARE.fullmatch(text.strip())
    share = 0.0 if match is None else float(match[1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"{text[:40]!r} is no share, such as 5%")
    return share


def sampled(
    found: Sequence[_One], share: float, of: Callable[[_One], str], chance: random.Random
) -> list[_One]:
    """Return a random share of the checkpoints in their order, at least one of any; `of` gives a name."""
    count = min(len(found), math.ceil(len(found) * share))
    chosen = {of(one) for one in chance.sample(found, count)}
    return [one for one in found if of(one) in chosen]


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
