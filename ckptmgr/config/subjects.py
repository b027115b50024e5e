# SPDX-License-Identifier: Apache-2.0
"""Options of a run in one object for each subject: a stop, snapshots, and how a run resumes.

Those of proof are `core.trust.Trust`, of ranks `parallel.team.Ranks`, of a mirror
`remote.mirror.Mirror`. A new option becomes a field of one of them, not an argument.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from numbers import Real
from typing import Any, Literal

from ckptmgr.core.arguments import check_is_bool, checked_count, checked_interval, no_effect

_ENDING = frozenset(
    f"SIG{name}"
    for name in (
        *("TERM", "USR1", "INT", "QUIT", "HUP", "KILL", "STOP", "TSTP", "TTIN", "TTOU", "XCPU"),
        *("ABRT", "IOT", "BUS", "FPE", "ILL", "SEGV", "SYS", "TRAP", "PIPE", "CHLD", "CLD"),
    )
)
"""Names of signals that stop a process, or that are of its errors and children."""


@dataclass(frozen=True, slots=True)
class Stop:
    """How signals and the clock stop a run, or have it save: `CheckpointManager(..., stop=Stop(grace=90))`.

    Attributes:
        grace: Seconds between the signal that announces the end of the process and its end, for
            `should_stop`; None to stop at once.
        after: Time from the start of the manager to a stop without a signal, for `should_stop`:
            seconds, or a text such as `11h30min`; None for no limit. `grace` counts from there, too.
        save_now: Name of a signal, such as `SIGUSR2`, after which the next step is saved and the
            run goes on; None for none.
        signals: Whether SIGTERM also has a program in the `with` block of its manager saved that
            does not ask `should_stop`: the next `step_end` saves, and the call after it ends the
            program by `SystemExit(143)`. Where none comes within `grace`, or 25 seconds without
            one, the signal ends the process as ever.
        put_aside: Whether a copy of the last step's state is kept in memory while the program
            validates, or runs on after its loop, if there is room and the copy is cheap: a
            stop that comes meanwhile, and the exit of the manager, save the copy.

    Raises:
        TypeError: `grace` is no number, `after` neither a number nor a text, `save_now` no text.
        ValueError: `signals` or `put_aside` is no bool. A time is not positive; `save_now` names no signal, or one that stops.
    """

    grace: float | None = None
    _: KW_ONLY
    after: float | str | None = None
    save_now: str | None = None
    signals: bool = True
    put_aside: bool = True

    @property
    def after_s(self) -> float | None:
        """`after` in seconds."""
        if not isinstance(self.after, str):
            return self.after
        from ckptmgr.policy.text import parse_duration

        duration = parse_duration(self.after)
        return None if duration is None else duration.total_seconds()

    def __post_init__(self) -> None:
        _check_time("grace", self.grace)
        if not isinstance(self.after, str):
            _check_time("after", self.after, or_text=" or a text such as '11h30min'")
        elif not self.after_s:
            raise ValueError(
                f"after must be a time such as '90s', '30min' (m may be months) or '11h30min', but got {self.after!r}"
            )
        _check_signal(self.save_now)
        check_is_bool("signals", self.signals)
        check_is_bool("put_aside", self.put_aside)


def _check_signal(name: str | None) -> None:
    given: Any = name
    if not isinstance(given, str | None):
        raise TypeError(f"save_now must be the name of a signal, but got {given!r}")
    if name is not None and name not in signal.Signals.__members__:
        raise ValueError(
            f"save_now must be the name of a signal such as 'SIGUSR2', but got {name!r}"
        )
    if name in _ENDING:
        raise ValueError(
            f"save_now={name!r}: {name} stops a process; take one that does not, such as 'SIGUSR2'"
        )


def _check_time(name: str, seconds: float | None, *, or_text: str = "") -> None:
    given: Any = seconds
    if isinstance(given, bool) or not isinstance(given, Real | None):
        raise TypeError(f"{name} must be a number of seconds{or_text}, but got {given!r}")
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"{name} must be a positive number of seconds, but got {seconds!r}")


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Copies of the state in memory, for `rollback`: `CheckpointManager(..., snapshots=Snapshots(10))`.

    Attributes:
        every: Interval in steps at which `step_end` copies the state; None for never.
        most: Maximum number of these copies; `memory.snapshot_budget_bytes` of the configuration
            also limits them.

    Raises:
        ValueError: One of them is less than 1.
    """

    every: int | None = None
    _: KW_ONLY
    most: int = 2

    def __post_init__(self) -> None:
        checked_interval("most of Snapshots", self.most)
        if self.every is not None:
            checked_interval("every of Snapshots", self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """How a run resumes: `manager.resume(state, Resume(start="new"))`, `resume=` of an adapter.

    Attributes:
        start: `newest`, or `new` to start at step 0 beside the present checkpoints, which stay and
            count as those of another run.
        at: The checkpoint to go back to, in place of the newest: a step, a file name, or a selector
            such as `best:val_loss:min`, as for `load`. Those after it stay, and count as those of
            another run. A damaged one is an error. A program that is started again with it goes
            back again.
        allow_bare: Where no checkpoint loads, take the newest data file of the series without a
            manifest. Its name alone says which step it is, so it is never preferred to a checkpoint
            with a manifest. With a key `allow_unsealed` of `Trust` asks for it.
        only: `healthy` passes over checkpoints whose floats are not finite, as `health` of their
            manifests says: those of a run that has diverged.
        renamed: Stored names and those in the program now: `{"encoder.*": "backbone.*"}`. They
            are renamed before the comparison; what does not fit then is refused as ever.
        skip_batches: Number of batches that the first loader of `manager.batches` is asked for and
            that are not given, to get past bad data; steps are not counted for them. A run that is
            started again without it goes on behind them once it has saved.
        read_back: Compare the restored state with the stored one, bit for bit. It takes up to half
            of the time of a load from the page cache.
        may_differ: Names of what may be other than stored, as paths or parts of one: `ema`,
            `model/head`.
        strict: Whether plain values in the `state_dict()` of an object, of which a difference is a
            warning, may not differ either.
        on_difference: What follows if a step that the saved run had trained before it died comes out
            otherwise (`CheckpointManager.witness`): `warn`, or `raise` a StateMismatch.
        tolerance: Metric to the difference that it may have in such a step: for kernels that are not
            deterministic.

    Raises:
        TypeError: `at` is no number and no text; `may_differ` is one string, or has something else than strings;
            `tolerance` is no mapping of names to numbers; `renamed` is no dict of strings.
        ValueError: `start`, `only` or `on_difference` is no such word; a switch is no bool; a tolerance is no
            number from 0 on; an option has no effect with another one; names in `renamed` differ in the
            number of `*` or `/`.
    """

    start: Literal["newest", "new"] = "newest"
    at: int | str | None = None
    allow_bare: bool = False
    only: Literal["healthy"] | None = None
    renamed: Mapping[str, str] | None = field(default=None, hash=False)
    skip_batches: int = 0
    read_back: bool = True
    may_differ: Sequence[str] = ()
    strict: bool = False
    on_difference: Literal["warn", "raise"] = "warn"
    tolerance: Mapping[str, float] | None = field(default=None, hash=False)

    @property
    def given(self) -> list[str]:
        """Names of the fields that are not as by default."""
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]

    def __post_init__(self) -> None:
        if self.start not in ("newest", "new"):
            raise ValueError(f"start must be 'newest' or 'new', but got {self.start!r}")
        if self.only not in (None, "healthy"):
            raise ValueError(f"only must be None or 'healthy', but got {self.only!r}")
        at: Any = self.at
        if isinstance(at, bool) or not isinstance(at, int | str | None):
            raise TypeError(f"at must be a step, a name or a selector, but got {at!r}")
        for name in ("allow_bare", "read_back", "strict"):
            check_is_bool(name, getattr(self, name))
        checked_count("number of batches to skip", self.skip_batches)
        given: Any = self.may_differ
        if isinstance(given, str) or not all(isinstance(one, str) for one in given):
            raise TypeError(f"may_differ must be a sequence of names, but got {given!r}")
        object.__setattr__(self, "may_differ", tuple(given))
        self._check_witness()
        if self.renamed is not None:
            object.__setattr__(self, "renamed", checked_renames(self.renamed))
        if self.start == "new":
            for name in [one for one in self.given if one != "start"]:
                raise no_effect(name, "with start='new', which takes no checkpoint", "leave it out")
        if self.at is not None:
            for name in [one for one in ("allow_bare", "only") if one in self.given]:
                raise no_effect(name, "with at=, which takes one checkpoint", "leave it out")
        if self.strict and not self.read_back:
            raise no_effect("strict", "with read_back=False", "leave one of them out")

    def _check_witness(self) -> None:
        if self.on_difference not in ("warn", "raise"):
            raise ValueError(
                f"on_difference must be 'warn' or 'raise', but got {self.on_difference!r}"
            )
        if self.on_difference == "raise" and (self.skip_batches or "data" in self.may_differ):
            where = "with skip_batches" if self.skip_batches else 'with may_differ=["data"]'
            raise no_effect("on_difference", where, "the steps that repeat get other batches")
        given: Any = self.tolerance
        if not isinstance(given, Mapping | None):
            raise TypeError(f"tolerance must be a mapping of metrics to numbers, but got {given!r}")
        for name, one in (given or {}).items():
            if isinstance(one, bool) or not isinstance(one, Real) or not isinstance(name, str):
                raise TypeError(f"tolerance maps metrics to numbers, but got {name!r}: {one!r}")
            if not 0 <= float(one) < math.inf:
                raise ValueError(
                    f"the tolerance of {name!r} must be a number from 0 on, but got {one!r}"
                )


def checked_renames(renames: object) -> dict[str, str]:
    """Return stored and new names; raise TypeError or ValueError unless each pair is of one form."""
    if not isinstance(renames, Mapping) or not all(
        isinstance(one, str) for pair in renames.items() for one in pair
    ):
        raise TypeError(f"renamed must be a dict of stored names to new ones, but got {renames!r}")
    for old, new in renames.items():
        if not (old and new) or any(old.count(one) != new.count(one) for one in "*/"):
            raise ValueError(
                f"renamed: {old!r} and {new!r} must have as many '*' and '/', and not be empty"
            )
    return dict(renames)


NEWEST = Resume()
