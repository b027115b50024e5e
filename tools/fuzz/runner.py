# SPDX-License-Identifier: Apache-2.0
"""Run a target on changed inputs for a while, and note every outcome that is neither a value nor a documented error.

* An input that ends in a place of the code where none ended before joins the corpus, and is changed further.
* An input may use a bounded time and a bounded memory; beyond that it is a finding.
"""

from __future__ import annotations

import contextlib
import hashlib
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import FrameType, TracebackType
from typing import NoReturn

from tools.fuzz.mutators import MAX_INPUT_BYTES
from tools.fuzz.targets import Target

INPUT_CPU_S = 2.0
"""Of one input of at most 64 KiB; the slowest that is accepted takes some milliseconds."""


class TooSlow(BaseException):
    """Report an input that takes too long; no target catches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input with an outcome that is not allowed."""

    data: bytes
    report: str

    @property
    def name(self) -> str:
        """A name for its file."""
        return hashlib.sha256(self.data).hexdigest()[:16]


@dataclass(slots=True, kw_only=True)
class Figures:
    """The work that was done."""

    inputs: int = 0
    cpu_s: float = 0.0
    accepted: int = 0
    slowest_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


def fuzz(
    target: Target,
    rng: Random,
    *,
    corpus: Sequence[bytes] = (),
    old_findings: Sequence[bytes] = (),
    goes_on: Callable[[Figures], bool],
    watch: Callable[[bytes], None] = lambda data: None,
    report: Callable[[Finding], None] = lambda finding: None,
) -> Figures:
    """Feed a target, first with old findings, its seeds and the corpus, then with changed inputs.

    Args:
        target: The parser.
        rng: Chooses the changes; the same one gives the same inputs.
        corpus: Inputs from earlier runs.
        old_findings: Inputs that were findings, which are tried in any case.
        goes_on: Asked before each other input.
        watch: Called with each input before it is used, because the process may not survive it.
        report: Called with each finding at once.
    """
    figures = Figures()
    seen: set[object] = set()
    reported: set[object] = set()
    pool: list[bytes] = []
    started = time.process_time()
    known = [*old_findings, *target.seeds(), *corpus]
    for number, data in enumerate(_inputs(target, rng, pool, known)):
        if number >= len(old_findings) and not goes_on(figures):
            break
        watch(data)
        before = time.process_time()
        outcome, finding = judge(target, data)
        now = time.process_time()
        figures.slowest_s = max(figures.slowest_s, now - before)
        figures.cpu_s = now - started
        figures.inputs += 1
        figures.accepted += outcome[0] == "value"
        if finding is not None:
            if outcome not in reported:
                reported.add(outcome)
                figures.findings.append(finding)
                report(finding)
        elif outcome not in seen:
            seen.add(outcome)
            pool.append(data)
            figures.new.append(data)
    return figures


def _inputs(
    target: Target, rng: Random, pool: list[bytes], known: Sequence[bytes]
) -> Iterator[bytes]:
    yield from known
    pool.extend(data for data in target.seeds() if data not in pool)
    while True:
        data = target.mutate(rng, rng.choice(pool))
        yield data[:MAX_INPUT_BYTES]


def judge(target: Target, data: bytes) -> tuple[tuple[object, ...], Finding | None]:
    """Return what kind of outcome an input has, and the finding if that is not allowed."""
    try:
        with _bounded():
            return ("value", target.run(data)), None
    except target.errors as error:
        return _place_of(error), None
    except (Exception, TooSlow) as error:  # everything else is what we look for
        report = "".join(traceback.format_exception(error, limit=-12))[-8000:]
        return _place_of(error), Finding(data=data, report=report)


def _place_of(error: BaseException) -> tuple[object, ...]:
    """Return where an error was raised, and where those before it were."""
    places: list[object] = []
    at: BaseException | None = error
    while at is not None and len(places) < 3:
        trace: TracebackType | None = at.__traceback__
        last = None
        while trace is not None:
            last, trace = (trace.tb_frame.f_code, trace.tb_lineno), trace.tb_next
        places.append((type(at).__name__, last))
        at = at.__context__
    return tuple(places)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_VIRTUAL, INPUT_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@contextlib.contextmanager
def alarms() -> Iterator[None]:
    """Have inputs that take too long interrupted."""
    before = signal.signal(signal.SIGVTALRM, _too_slow)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _too_slow(number: int, frame: FrameType | None) -> NoReturn:
    raise TooSlow(f"takes more than {INPUT_CPU_S} s")


def limit_memory(more_bytes: int) -> None:
    """Let this process have so much more address space than it has now; an input that needs more gets a MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + more_bytes, hard))
