# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointManager,
    CorruptCheckpoint,
    KeyProblem,
    Skipped,
    UnsupportedCheckpoint,
)
from ckptmgr.core.model import State
from ckptmgr.series.candidates import first_that_loads, newest_first, why_nothing
from tests.support.crashmodel import ModelDisk
from tests.support.given_candidates import GivenCandidates

_Loaded = TypeVar("_Loaded")


def checkpoint(step: int, **fields: object) -> Checkpoint:
    base = Checkpoint(
        path=Path(f"/runs/net-{step}.ckpt"),
        series="net",
        step=step,
        saved_at=datetime(2026, 3, 1, tzinfo=UTC),
        size_bytes=1,
        run_id="run",
        sequence=step,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


ONE, TWO = checkpoint(1), checkpoint(2)


def test_newest_first_goes_by_commit_not_by_step() -> None:
    rolled_back = checkpoint(1, sequence=3)
    assert newest_first([ONE, rolled_back, TWO]) == [rolled_back, TWO, ONE]


def test_newest_first_puts_emergency_saves_last() -> None:
    emergency = checkpoint(9, why="exception: KeyError")
    assert newest_first([emergency, ONE, TWO]) == [TWO, ONE, emergency]


def test_newest_first_leaves_out_what_is_no_checkpoint() -> None:
    others = [checkpoint(3, state=State.LEFTOVER), checkpoint(4, state=State.WRITING)]
    assert newest_first([*others, ONE]) == [ONE]


def test_newest_first_tells_of_unreadable_ones_first() -> None:
    unreadable = checkpoint(0, sequence=0, run_id=None, state=State.CORRUPT)
    damaged = checkpoint(2, state=State.CORRUPT)
    assert newest_first([ONE, unreadable, damaged]) == [unreadable, damaged, ONE]


def first(
    candidates: Sequence[Checkpoint], load: Callable[[Checkpoint], _Loaded]
) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
    return first_that_loads(GivenCandidates(lambda: candidates, load), ModelDisk())


def load_or_raise(errors: dict[int, Exception]) -> object:
    def load(found: Checkpoint) -> int:
        if found.step in errors:
            raise errors[found.step]
        return found.step

    return first([TWO, ONE], load)


def test_first_that_loads_is_the_newest_when_it_loads() -> None:
    assert load_or_raise({}) == (TWO, 2, [])


@pytest.mark.parametrize(
    "error",
    [CorruptCheckpoint("bad"), KeyProblem("bad"), OSError(5, "bad"), FileNotFoundError(2, "bad")],
)
def test_first_that_loads_passes_over_what_fails_with_the_reason(error: Exception) -> None:
    found = load_or_raise({2: error})
    assert isinstance(found, tuple)
    assert found[:2] == (ONE, 1)
    assert [(skip.checkpoint, "bad" in skip.reason) for skip in found[2]] == [(TWO, True)]


def test_first_that_loads_does_not_open_what_is_known_to_be_damaged() -> None:
    opened: list[Checkpoint] = []
    damaged = replace(TWO, state=State.CORRUPT, problem="12 bytes, but the manifest says 13")
    nameless = replace(TWO, state=State.CORRUPT)
    _, _, skipped = first([damaged, nameless, ONE], opened.append)
    assert opened == [ONE]
    assert [skip.reason for skip in skipped] == ["12 bytes, but the manifest says 13", "corrupt"]


def test_first_that_loads_finds_nothing_among_nothing() -> None:
    assert first([], lambda found: found) == (None, None, [])


@pytest.mark.parametrize("error", [CorruptCheckpoint("bad"), FileNotFoundError(2, "gone")])
def test_first_that_loads_finds_nothing_when_all_is_damaged_or_gone(error: Exception) -> None:
    found = load_or_raise({1: error, 2: CorruptCheckpoint("bad")})
    assert isinstance(found, tuple)
    assert found[:2] == (None, None)
    assert len(found[2]) == 2


@pytest.mark.parametrize(
    "error", [KeyProblem("wrong"), UnsupportedCheckpoint("too new"), PermissionError(13, "no")]
)
def test_first_that_loads_raises_when_something_whole_may_be_left(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        load_or_raise({1: error, 2: CorruptCheckpoint("bad")})
    assert caught.value is error


def test_other_series_are_named_where_nothing_is_found() -> None:
    others = [replace(one, series="nett") for one in (ONE, TWO)]
    damaged = checkpoint(9, series="nat", state=State.CORRUPT)
    single = checkpoint(3, series="single", run_id="")
    bare = checkpoint(4, series="bare", run_id=None, epoch=1, state=State.UNVERIFIED)
    (hint,) = why_nothing([*others, damaged, single, bare], lambda one: one.series == "net")
    assert (
        hint == "there are other series: 'bare' (to step 4), 'nett' (to step 2); check the prefix"
    )


def test_of_many_other_series_some_are_named() -> None:
    others = [replace(ONE, series=f"run{n}") for n in range(7)]
    (hint,) = why_nothing(others, lambda one: False)
    assert hint.endswith("'run4' (to step 1) and 2 more; check the prefix")


def test_manifests_without_data_are_told_where_nothing_is_found() -> None:
    manifest = replace(ONE, run_id=None, state=State.LEFTOVER)
    unfinished = replace(manifest, path=Path("/runs/.net-1.ckpt.dead-1.tag.1-1.tmp"))
    assert why_nothing([unfinished], lambda one: True) == []
    (hint,) = why_nothing([unfinished, manifest], lambda one: True)
    assert "without data" in hint


def test_wrong_prefix_is_told_by_the_manager(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, prefix="resnet50") as manager:
        manager.save(5000, {"n": 1})
    with CheckpointManager(tmp_path, prefix="resnet-50") as manager:
        assert manager.resume().is_fresh
    (message,) = caplog.messages
    assert f"{tmp_path}: nothing to resume as 'resnet-50': there are other series" in message
    assert "'resnet50' (to step 5000)" in message


def test_fresh_start_in_an_empty_directory_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume().is_fresh
    assert caplog.messages == []
