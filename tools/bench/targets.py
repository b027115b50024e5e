# SPDX-License-Identifier: Apache-2.0
"""The targets T1 to T14, each with its measured value.

All are ratios of medians of one run, so that the machine cancels out, except the memory, the times of T10, T12 and T14, and
what compression leaves, which no machine changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from tools.bench.figures import OURS, Figures
from tools.bench.loops import LOOPS
from tools.bench.memory import MIB, Peak
from tools.bench.scale import Line, curves, line_over_bytes, seconds_per_tensor

_MEMCPY = "one memcpy"
_RAW = "raw O_DIRECT"
_PLAIN = ("ckpt", "ckpt-crc", "safetensors", "safetensors-crc")
_AES = (  # target, mode, share of raw, MindSpore's mode, how often ours is faster
    ("T2", "ckpt-gcm", 0.95, "ckpt-gcm", 15.0),
    ("T2", "container-gcm", 0.95, "ckpt-gcm", 15.0),
    ("T3", "ckpt-cbc", 0.9, "ckpt-cbc", 12.0),
)
_EXTRA_MEMORY_MIB = 64.0
_LAZY_MS = 20.0
_PLAN_S = 2.0
# Promises of the README about compressed weights; of the others the ratio is only stated.
_RATIOS = {"fp32": 0.85, "bf16": 0.7, "fp16": None, "int64": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One line of the table of targets.

    Attributes:
        target: T1 to T14.
        what: The compared values.
        limit: The least value that meets it, or the largest where `is_ceiling`; None where a value is only stated.
        value: The measured value, or None.
        is_ceiling: Whether smaller is better.
        unit: Of both values.
        detail: The parts of the value.
    """

    target: str
    what: str
    limit: float | None
    value: float | None
    is_ceiling: bool = False
    unit: str = "x"
    detail: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where there is none, or nothing was measured."""
        if self.limit is None or self.value is None:
            return None
        return self.value <= self.limit if self.is_ceiling else self.value >= self.limit

    def as_json(self) -> dict[str, object]:
        """Return its fields and the verdict."""
        return {**asdict(self), "is_met": self.is_met}


def verdicts(figures: Figures, peaks: Sequence[Peak], about: Mapping[str, str]) -> list[Verdict]:
    """Return all targets in order; those of which nothing was measured are left out."""
    found = [
        *_saves(figures),
        *_sm4(figures, about),
        *_loads(figures),
        *_backgrounds(figures),
        *_loops(figures),
        *_memory(peaks),
        *_counts(figures),
        *_sizes(figures),
        *_lazy(figures),
        *_compression(figures),
        *_plan(figures),
    ]
    measured = [verdict for verdict in found if verdict.value is not None]
    return sorted(measured, key=lambda verdict: int(verdict.target[1:]))


def _ratio(slower: float | None, faster: float | None) -> float | None:
    return slower / faster if slower is not None and faster else None


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _saves(figures: Figures) -> Iterator[Verdict]:
    def median(who: str, mode: str = "") -> float | None:
        return figures.median("files", "save", who=who, mode=mode)

    raw = median(_RAW)
    stock = _least([median("safetensors.numpy"), median("safetensors.torch")])
    for mode in _PLAIN:
        ours = median(OURS, mode)
        yield Verdict(target="T1", what=f"save {mode}, of raw", limit=0.95, value=_ratio(raw, ours))
        yield Verdict(
            target="T1",
            what=f"save {mode}, faster than safetensors",
            limit=3.5,
            value=_ratio(stock, ours),
        )
    for target, mode, of_raw, their_mode, faster in _AES:
        ours = median(OURS, mode)
        yield Verdict(
            target=target, what=f"save {mode}, of raw", limit=of_raw, value=_ratio(raw, ours)
        )
        yield Verdict(
            target=target,
            what=f"save {mode}, faster than MindSpore",
            limit=faster,
            value=_ratio(median("mindspore", their_mode), ours),
        )


def _sm4(figures: Figures, about: Mapping[str, str]) -> Iterator[Verdict]:
    has_lanes = about.get("sm4", "OpenSSL") != "OpenSSL"
    for what in ("save", "load"):
        ours, theirs = (
            figures.median("slow files", what, who=who, mode="ckpt-sm4")
            for who in (OURS, "mindspore")
        )
        yield Verdict(
            target="T4",
            what=f"{what} ckpt-sm4 ({about.get('sm4', '')}), faster than MindSpore",
            limit=15.0 if has_lanes else 4.0,
            value=_ratio(theirs, ours),
        )


def _loads(figures: Figures) -> Iterator[Verdict]:
    """Ask for a share of the raw read, and state that of a raw read which does the work that cannot be avoided."""
    modes = [one.subject.mode for one in figures.find("files", "load", who=OURS)]
    rows = (
        ("T5", "load", 0.8, "load", "raw"),
        ("T5", "load", None, "load new", "raw into new memory"),
        ("T5", "load", 1 / 1.15, "load new digested", "the bare loop into new memory"),
        ("T5", "into own", 1 / 1.15, "into digested", "the bare loop into memory that lies alike"),
        ("T5", "into", None, "into digested", "the bare loop into memory that lies alike"),
        ("T5", "load warm", 1 / 1.3, "load warm digested", "readinto with BLAKE3"),
        ("T5", "into", 0.95, "load", "raw"),
        ("T6", "verify", 0.95, "load", "raw"),
        ("T6", "verify", None, "load digested", "raw with BLAKE3"),
    )
    for target, what, limit, floor, name in rows:
        raw = figures.median("files", floor, who=_RAW)
        for mode in modes:
            ours = figures.median("files", what, who=OURS, mode=mode)
            yield Verdict(
                target=target,
                what=f"{what} {mode}, of {name}",
                limit=limit,
                value=_ratio(raw, ours),
            )
    for _, mode, _, their_mode, _ in _AES:
        yield Verdict(
            target="T5",
            what=f"load {mode}, faster than MindSpore",
            limit=5.0,
            value=_ratio(
                figures.median("files", "load", who="mindspore", mode=their_mode),
                figures.median("files", "load", who=OURS, mode=mode),
            ),
        )


def _backgrounds(figures: Figures) -> Iterator[Verdict]:
    unit = figures.median("background", "blocked", who=_MEMCPY)
    for mode, limit in (("thread", 1.25), ("process", 1.25), ("zero-stall", 0.05)):
        ours = figures.median("background", "blocked", who=OURS, mode=mode)
        yield Verdict(
            target="T7",
            what=f"blocked, {mode}, of one memcpy",
            limit=limit,
            value=_ratio(ours, unit),
            is_ceiling=True,
        )


def _loops(figures: Figures) -> Iterator[Verdict]:
    for who, mode, beside, limits in (
        (OURS, "process", "process", {"python": 3.0, "numpy": 3.0, "torch": 3.0}),
        (OURS, "thread", "thread", {"python": None, "numpy": 5.0, "torch": 5.0}),
        (_RAW, "limit", "raw writes", dict.fromkeys(LOOPS)),
    ):
        for loop, limit in limits.items():
            lost = figures.median("loops", f"lost {loop}", who=who, mode=mode)
            yield Verdict(
                target="T8",
                what=f"steps lost by a {loop} loop, {beside}",
                limit=limit,
                value=None if lost is None else lost * 100,
                is_ceiling=True,
                unit="%",
            )


def _memory(peaks: Sequence[Peak]) -> Iterator[Verdict]:
    for peak in peaks:
        for what, size_bytes in (("save", peak.save_bytes), ("load", peak.load_bytes)):
            yield Verdict(
                target="T9",
                what=f"extra memory, {what} {peak.mode}",
                limit=_EXTRA_MEMORY_MIB,
                value=size_bytes / MIB,
                is_ceiling=True,
                unit=" MiB",
            )


def _counts(figures: Figures) -> Iterator[Verdict]:
    for what, limit in (("save", 8.0), ("load", 5.0)):
        for (who, mode), curve in curves(figures, "counts", what).items():
            slope = seconds_per_tensor(curve)
            if who == OURS:
                yield Verdict(
                    target="T10",
                    what=f"{what} {mode}, for each tensor",
                    limit=limit,
                    value=None if slope is None else slope * 1e6,
                    is_ceiling=True,
                    unit=" us",
                )


def _sizes(figures: Figures) -> Iterator[Verdict]:
    for what, floor, name, limit in (
        ("save", "save", "raw's", 1.1),
        ("load", "load", "raw's", 1.1),
        ("load", "load new", "that of raw into new memory", None),
    ):
        raw = line_over_bytes(curves(figures, "sizes", floor).get((_RAW, "limit"), []))
        for (who, mode), curve in curves(figures, "sizes", what).items():
            ours = line_over_bytes(curve)
            if who == OURS and ours is not None and raw is not None:
                yield Verdict(
                    target="T11",
                    what=f"{what} {mode}, slope over bytes, of {name}",
                    limit=limit,
                    value=_ratio(ours.slope, raw.slope),
                    is_ceiling=True,
                    detail=_slopes(ours, raw),
                )


def _slopes(ours: Line, raw: Line) -> str:
    slopes = " against ".join(f"{line.slope * (1 << 30):.3f}" for line in (ours, raw))
    residuals = " and ".join(f"{line.residual_s:.3f}" for line in (ours, raw))
    return f"{slopes} s/GiB, residuals {residuals} s"


def _lazy(figures: Figures) -> Iterator[Verdict]:
    """Ask the time of the container, and state that of the others."""
    for what in ("with opening", "alone"):
        for one in figures.find("lazy", f"warm, {what}"):
            mode, size_bytes = one.subject.mode, one.subject.size_bytes
            yield Verdict(
                target="T12",
                what=f"1 MiB of {size_bytes / (1 << 30):.2g} GiB, {mode}, warm, {what}",
                limit=_LAZY_MS if mode == "container-gcm" else None,
                value=one.median * 1e3,
                is_ceiling=True,
                unit=" ms",
            )


def _compression(figures: Figures) -> Iterator[Verdict]:
    for elements, limit in _RATIOS.items():
        for kind in ("plain", "container"):
            mode = f"{elements} {kind}"
            yield Verdict(
                target="T13",
                what=f"zstd, {mode}, of the bytes before",
                limit=limit,
                value=figures.median("compression", "ratio", who=OURS, mode=mode),
                is_ceiling=True,
            )


def _plan(figures: Figures) -> Iterator[Verdict]:
    for one in figures.find("ranks", "plan"):
        yield Verdict(
            target="T14",
            what=f"plan for {one.subject.mode}",
            limit=_PLAN_S,
            value=one.median,
            is_ceiling=True,
            unit=" s",
        )
