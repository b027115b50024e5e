# SPDX-License-Identifier: Apache-2.0
"""Records of the steps of a run, 64 bytes each, and their comparison. Pure.

Integers are little-endian:

| bytes | |
|---|---|
| 8 | step |
| 40 | five metrics as float64, in the order of the head; all ones: not given |
| 4 | number of the record, from 0; its place in the file is that modulo 65,536 |
| 4 | mark of the batch (`DataState.marks`); 0: unknown |
| 4 | mark of the global generators at the end of the step (`state.global_random.mark_of`); 0: unknown |
| 4 | CRC32 of the 60 bytes before |

They follow a head of 4 KiB: a JSON object with the names of the metrics, and the runs that wrote them.
Of two records of a step the later number counts.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckptmgr.formats.file_crc import crc32

HEAD_BYTES = 4096
MOST_RECORDS = 65_536
RECORD_BYTES = 64
MOST_BYTES = HEAD_BYTES + MOST_RECORDS * RECORD_BYTES
MOST_METRICS = 5
MOST_NAME_BYTES = 500
"""Of a metric, in the head."""

_VERSION = 1
_BODY = struct.Struct("<Q40s3I")
_CRC = struct.Struct("<I")
_VALUES, _BITS = struct.Struct("<5d"), struct.Struct("<5Q")
_GONE_BITS = (1 << 64) - 1  # a NaN that no computation returns
NOT_GIVEN: float = struct.unpack("<d", b"\xff" * 8)[0]
_CUDA = 1 << 15  # of the upper half of a mark of generators
_NUMBERS = np.dtype([
    ("step", "<u8"), ("metrics", "S40"), ("number", "<u4"), ("batch", "<u4"), ("generators", "<u4"), ("crc", "<u4"),
])  # fmt: skip


class Record(NamedTuple):
    """A step: its metrics, packed, and marks of its batch and of the generators at its end."""

    step: int
    metrics: bytes
    batch: int = 0
    generators: int = 0


def packed_metrics(values: Sequence[float]) -> bytes:
    """Return five metrics as they are in a record; `NOT_GIVEN` where there is none."""
    return _VALUES.pack(*values)


def packed(record: Record, number: int) -> bytes:
    """Return the bytes of a record."""
    step, metrics, batch, generators = record
    body = _BODY.pack(step, metrics, number % (1 << 32), batch, generators)
    return body + _CRC.pack(crc32(body))


def place_of(number: int) -> int:
    """Return the offset of a record in the file."""
    return HEAD_BYTES + number % MOST_RECORDS * RECORD_BYTES


def head_of(names: Sequence[str], runs: Sequence[str]) -> bytes:
    """Return the head of a file."""
    text = json.dumps({"version": _VERSION, "metrics": list(names), "runs": list(runs)})
    return text.encode().ljust(HEAD_BYTES - 1) + b"\n"


class Recorded(NamedTuple):
    """Content of a file: names of the metrics, runs, some of its records by step, and the next number."""

    names: list[str]
    runs: frozenset[str]
    records: dict[int, Record]
    next_number: int


def parsed(data: bytes, *, after: int) -> Recorded | None:
    """Return the content of a file, with the records of steps after `after`; None for a damaged one."""
    if not HEAD_BYTES <= len(data) <= MOST_BYTES:
        return None
    try:
        head = json.loads(data[:HEAD_BYTES])
        version, names, runs = head["version"], head["metrics"], frozenset(map(str, head["runs"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if version != _VERSION or not isinstance(names, list) or len(names) > MOST_METRICS:
        return None
    rows = np.frombuffer(data, _NUMBERS, (len(data) - HEAD_BYTES) // RECORD_BYTES, HEAD_BYTES)
    order = np.argsort(rows["number"], kind="stable")
    newest = next((one for one in order[::-1] if _record_at(data, one)), None)
    later = [_record_at(data, one) for one in order[rows["step"][order] > after]]
    return Recorded(
        [str(name) for name in names],
        runs,
        {one.step: one for one in later if one is not None},
        0 if newest is None else int(rows["number"][newest]) + 1,
    )


def _record_at(data: bytes, index: int) -> Record | None:
    """Return the record at an index; None for a damaged one."""
    start = HEAD_BYTES + int(index) * RECORD_BYTES
    body = data[start : start + _BODY.size]
    if _CRC.unpack_from(data, start + _BODY.size)[0] != crc32(body):
        return None
    step, metrics, _, batch, generators = _BODY.unpack(body)
    return Record(step, metrics, batch, generators)


def difference_of(
    before: Record, now: Record, names: Sequence[str], within: Mapping[str, float]
) -> str | None:
    """Return the difference of a step that comes again; an empty text if nothing can be compared.

    None means that it is equal, apart from metrics that differ by no more than `within` allows.
    """
    has_batch = bool(before.batch and now.batch)
    if has_batch and before.batch != now.batch:
        return "another batch"
    halves = zip(divmod(before.generators, 1 << 16), divmod(now.generators, 1 << 16), strict=True)
    drawn = [one == other for one, other in halves if one and other and not (one ^ other) & _CUDA]
    has_random = bool(drawn)
    if not all(drawn):
        return "same batch, other random numbers" if has_batch else "other random numbers"
    is_known = has_batch or has_random
    bits = zip(names, _BITS.unpack(before.metrics), _BITS.unpack(now.metrics), strict=False)
    given = [name for name, *both in bits if _GONE_BITS not in both]
    if before.metrics == now.metrics:
        return None if is_known or given else ""
    was, found = (dict(zip(names, _VALUES.unpack(one.metrics), strict=False)) for one in (before, now))  # fmt: skip
    for name in given:
        apart = abs(found[name] - was[name])
        is_equal = struct.pack("<d", found[name]) == struct.pack("<d", was[name])
        if not is_equal and not apart <= within.get(name, -1.0):
            same = "same batch, " * has_batch + "same random numbers, " * has_random
            by = f", {apart:.3g} apart" if math.isfinite(apart) else ""
            why = ": kernels that are not deterministic?" if has_batch and has_random else ""
            return f"{same}other {name}: {found[name]!r} in place of {was[name]!r}{by}{why}"
    return None if is_known or given else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """Result of the steps that come again after a resumption, so far.

    Attributes:
        recorded: Number of recorded steps after the resumed one.
        equal: How many of them came again, and were equal.
        difference: The first that differs, and in what; None for none.
        is_over: Whether the comparison has ended: at a difference, or after the last recorded step.
        within: Metric to the difference that it may have.
        others: Why the program is another than the one that was recorded, such as a chosen step.
    """

    recorded: int = 0
    equal: int = 0
    difference: str | None = None
    is_over: bool = False
    within: Mapping[str, float] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as one sentence."""
        if self.difference is not None:
            found = f"continued, but not equal: {self.difference}"
        elif self.is_over and self.equal:
            within = "".join(f", {name} within {one:g}" for name, one in self.within.items())
            found = f"continued; proven equal over {self.equal} step{'s'[: self.equal > 1]}{within}"
        elif self.recorded:
            found = f"continued; equal over {self.equal} of {self.recorded} recorded steps so far"
        else:
            return "no recorded step comes again"
        why = f"; and the program is another: {', '.join(self.others)}"
        return found + (why if self.others else "")
