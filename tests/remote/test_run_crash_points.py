# SPDX-License-Identifier: Apache-2.0
"""Runs that save to an address, and `prune` of one, that end between any two requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Mirror
from ckptmgr.remote import mirror as mirrors
from ckptmgr.remote import upload as writers
from tests.cli.running import NOW_S, run, run_json
from tests.support import api
from tests.support.counted_objects import CountedObjects, Died
from tests.support.saved import save_run

pytest.importorskip("obstore")

from ckptmgr.objects import requests
from tests.remote.buckets import directory_of, new_url, whole_names

_open = api.open_objects  # a test puts another one into its place
_LAST = 2
_KEPT = "net-1_2.ckpt"
_DAY_S = 86_400
_WRITES = ("put ", "create ", "delete ")
_KEEP = ("--keep", "last(1)", "--now", "--yes")


def _train(url: str, until: int = _LAST) -> list[int]:
    """Save up to a step; return the steps whose saves were acknowledged."""
    acknowledged = []
    config = CheckpointConfig(keep_checkpoint_max=1)
    manager = CheckpointManager(url, config)
    try:
        start = manager.resume({"w": np.zeros(9)}).next_step
        for step in range(max(1, start), until + 1):
            handle = manager.save(step, {"w": np.full(9, float(step))})
            assert handle is not None
            acknowledged.append(handle.wait().step)
    except Died:
        pass
    finally:
        manager.close()
    return acknowledged


def _cuts(seen: list[str]) -> Iterator[tuple[int, bool]]:
    """Yield each request that changes the store, at or after which a process ends.

    An end at a request that only reads leaves the same as one after the change before it.
    """
    yield 1, False
    for number, request in enumerate(seen, start=1):
        if request.startswith(_WRITES):
            yield number, False
            yield number, True


def _steps(names: set[str]) -> set[int]:
    return {int(name.removesuffix(".ckpt").split("-")[1]) for name in names}


def _check_leftovers(bucket: api.Objects, count: int) -> None:
    """Check that the data of no checkpoint is listed, and removed by a later prune."""
    shown = run_json("ls", bucket.url, "--all")["items"]
    assert [one["state"] for one in shown].count("leftover") == count
    later_s = max(time.time(), NOW_S) + 8 * _DAY_S
    assert run("prune", bucket.url, *_KEEP, now_s=later_s).exit_code == 0
    assert len(bucket.list("data/")) == 1, "what was left takes space for ever"


def test_run_that_ends_at_any_request_loses_nothing_and_the_next_one_finishes(
    tmp_path: Path, on_machine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[api.Objects] = []
    monkeypatch.setattr(writers, "open_objects", lambda url: made[-1])
    on_machine("calm")
    calm = CountedObjects(api.open_objects(new_url()))
    made.append(calm)
    assert _train(calm.url) == [1, 2]
    assert [one.split()[0] for one in calm.requests].count("delete") == 2
    for last, is_done in _cuts(calm.requests):
        bucket = api.open_objects(new_url())
        on_machine("first")
        made.append(CountedObjects(bucket, last=last, is_done=is_done))
        acknowledged = _train(bucket.url)
        found = _steps(whole_names(bucket, tmp_path))
        assert not acknowledged or max(found) >= acknowledged[-1], "an acknowledged save is lost"
        on_machine("second")
        made.append(bucket)
        _train(bucket.url, _LAST + 1)
        kept = _steps(whole_names(bucket, tmp_path))
        assert kept == {_LAST + 1, max(found, default=_LAST + 1)}, (
            "other than the last and the resumed one"
        )
        left = len(bucket.list("data/")) - len(kept)
        if left:
            _check_leftovers(bucket, left)


def _train_mirrored(folder: Path, url: str) -> list[int]:
    """Save the missing steps, one in each run; return those whose uploads were acknowledged."""
    acknowledged = []
    for _ in range(_LAST):
        handle = None
        mirror = Mirror(url, keep="last(1)", retry_s=0)
        with CheckpointManager(folder, mirror=mirror) as manager:
            try:
                step = manager.resume().next_step or 1
            except Died:
                break
            if step <= _LAST:
                handle = manager.save(step, {"w": np.full(9, float(step))})
        if handle is not None and handle.mirrored is not None and not handle.mirrored.exception():
            acknowledged.append(step)
    return acknowledged


def test_mirror_that_ends_at_any_request_loses_nothing_and_the_next_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[api.Objects] = []
    monkeypatch.setattr(mirrors, "open_objects", lambda url: made[-1])
    calm = CountedObjects(api.open_objects(new_url()))
    made.append(calm)
    assert _train_mirrored(tmp_path / "calm", calm.url) == [1, 2]
    for number, (last, is_done) in enumerate(_cuts(calm.requests)):
        bucket = api.open_objects(new_url())
        made.append(CountedObjects(bucket, last=last, is_done=is_done))
        folder = tmp_path / str(number)
        acknowledged = _train_mirrored(folder, bucket.url)
        found = _steps(whole_names(bucket, tmp_path))
        assert not acknowledged or max(found) >= acknowledged[-1], "an upload is lost"
        made.append(bucket)
        _train_mirrored(folder, bucket.url)
        assert _steps(whole_names(bucket, tmp_path)) == {_LAST}, (last, is_done)


def test_prune_that_ends_at_any_request_loses_nothing_and_the_next_one_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path / "runs", [1, 2])
    store = api.place(tmp_path / "runs")
    made: list[api.Objects] = []
    monkeypatch.setattr(requests, "open_objects", lambda url: made[-1])

    def uploaded() -> api.Objects:
        bucket = _open(new_url())
        for name in ("net-1_1.ckpt", _KEPT):
            directory_of(bucket).upload(store, name)
        return bucket

    calm = CountedObjects(uploaded())
    made.append(calm)
    assert run("prune", calm.url, *_KEEP).exit_code == 0
    kinds = [one.split()[0] for one in calm.requests]
    assert kinds.count("delete") == 2
    for last, is_done in _cuts(calm.requests):
        bucket = uploaded()
        made.append(CountedObjects(bucket, last=last, is_done=is_done))
        killed = run("prune", bucket.url, *_KEEP)
        assert killed.exit_code != 0
        made.append(bucket)
        found = whole_names(bucket, tmp_path)
        assert _KEPT in found
        again = run("prune", bucket.url, *_KEEP)
        assert again.exit_code == 0, again.stderr
        assert whole_names(bucket, tmp_path) == {_KEPT}, (last, is_done)
        left = len(bucket.list("data/")) - 1
        assert (f"{left} data files that no manifest names stay" in again.stderr) == (left > 0)
        if left:
            _check_leftovers(bucket, left)
