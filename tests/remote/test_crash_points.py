# SPDX-License-Identifier: Apache-2.0
"""Uploads, removals and downloads that end between any two requests, and are then repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import api
from tests.support.counted_objects import CountedObjects, Died
from tests.support.saved import save_run
from tests.support.shard_sets import CONTENTS, SET, shard, sharded

pytest.importorskip("obstore")

from ckptmgr.objects.directory import LEFTOVER_AGE
from ckptmgr.objects.place import ObjectPlace
from ckptmgr.remote.download import download
from tests.remote.buckets import directory_of, new_objects, whole_names

_LATER_S = LEFTOVER_AGE.total_seconds() + 60
_FIRST, _SECOND = "net-1_1.ckpt", "net-1_2.ckpt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> api.Place:
    """A local run with two checkpoints."""
    directory = tmp_path_factory.mktemp("run")
    save_run(directory, [1, 2])
    return api.place(directory)


def _points(count: int) -> Iterator[tuple[int, bool]]:
    for number in range(1, count + 1):
        yield number, False
        yield number, True


def _requests_of_upload(run: api.Place) -> int:
    objects = CountedObjects(new_objects())
    directory_of(objects).upload(run, _SECOND)
    return len(objects.requests)


def test_commit_that_dies_at_any_request_shows_whole_checkpoints_only(
    run: api.Place, tmp_path: Path
) -> None:
    count = _requests_of_upload(run)
    assert count == 6
    for last, is_done in _points(count):
        bucket = new_objects()
        directory_of(bucket).upload(run, _FIRST)
        with pytest.raises(Died):
            directory_of(CountedObjects(bucket, last=last, is_done=is_done)).upload(run, _SECOND)
        found = whole_names(bucket, tmp_path)
        assert _FIRST in found, "an acknowledged checkpoint is lost"
        is_new = directory_of(bucket).upload(run, _SECOND)
        assert bool(is_new) == (_SECOND not in found)
        assert whole_names(bucket, tmp_path) == {_FIRST, _SECOND}


def test_upload_after_a_crash_does_not_send_the_data_again(run: api.Place) -> None:
    bucket = new_objects()
    with pytest.raises(Died):
        directory_of(CountedObjects(bucket, last=4)).upload(run, _SECOND)  # at the manifest
    again = CountedObjects(bucket)
    assert directory_of(again).upload(run, _SECOND)
    kinds = [one.partition(" ")[0] for one in again.requests]
    assert "put" not in kinds
    assert "create" in kinds


def test_old_data_of_a_crash_is_sent_again_because_a_sweep_may_remove_it(run: api.Place) -> None:
    bucket = new_objects()
    with pytest.raises(Died):
        directory_of(CountedObjects(bucket, last=4)).upload(run, _SECOND)
    again = CountedObjects(bucket)
    directory_of(again, later_s=_LATER_S).upload(run, _SECOND)
    assert "put" in [one.partition(" ")[0] for one in again.requests]


def test_data_that_a_sweep_removes_during_the_upload_is_sent_again(
    run: api.Place, tmp_path: Path
) -> None:
    bucket = new_objects()
    counted = CountedObjects(bucket)
    original = counted.create

    def create_after_sweep(key: str, data: bytes) -> None:
        bucket.delete([one.key for one in bucket.list("data/")])
        original(key, data)

    counted.create = create_after_sweep  # type: ignore[method-assign]
    directory_of(counted).upload(run, _SECOND)
    assert whole_names(bucket, tmp_path) == {_SECOND}


def test_lost_answer_to_the_manifest_is_no_conflict(run: api.Place, tmp_path: Path) -> None:
    bucket = new_objects()
    with pytest.raises(Died):
        directory_of(CountedObjects(bucket, last=4, is_done=True)).upload(run, _SECOND)
    assert whole_names(bucket, tmp_path) == {_SECOND}
    assert not directory_of(bucket).upload(run, _SECOND)


def test_prune_that_dies_at_any_request_shows_whole_checkpoints_only(
    run: api.Place, tmp_path: Path
) -> None:
    for last, is_done in _points(2):
        bucket = new_objects()
        for name in (_FIRST, _SECOND):
            directory_of(bucket).upload(run, name)
        going = [
            one for one in ObjectPlace(bucket, trust=api.DEFAULT_TRUST).scan() if one.step == 1
        ]
        dying = CountedObjects(bucket, last=last, is_done=is_done)
        with pytest.raises(Died):
            directory_of(dying).remove(going)
        found = whole_names(bucket, tmp_path)
        assert _SECOND in found
        directory_of(bucket).remove(going)
        assert whole_names(bucket, tmp_path) == {_SECOND}
        directory_of(bucket, later_s=_LATER_S).sweep()
        assert len(bucket.list("data/")) == 1, "what an interrupted prune left takes space for ever"


def test_sweep_that_dies_at_any_request_keeps_what_manifests_name(
    run: api.Place, tmp_path: Path
) -> None:
    def with_leftover() -> CountedObjects:
        bucket = CountedObjects(new_objects())
        directory_of(bucket).upload(run, _FIRST)
        with pytest.raises(Died):
            directory_of(CountedObjects(bucket, last=4)).upload(run, _SECOND)
        return bucket

    calm = CountedObjects(with_leftover())
    (swept,) = directory_of(calm, later_s=_LATER_S).sweep()
    assert swept.key.endswith(_SECOND)
    assert not directory_of(calm).sweep(), "leftovers of a live upload were removed"
    for last, is_done in _points(len(calm.requests) - 1):
        bucket = with_leftover()
        dying = CountedObjects(bucket, last=last, is_done=is_done)
        with pytest.raises(Died):
            directory_of(dying, later_s=_LATER_S).sweep()
        assert whole_names(bucket, tmp_path) == {_FIRST}


def test_sweep_removes_nothing_while_a_manifest_cannot_be_read(run: api.Place) -> None:
    bucket = new_objects()
    directory_of(bucket).upload(run, _FIRST)
    bucket.delete([f"{_FIRST}.manifest.json"])
    bucket.create(f"{_FIRST}.manifest.json", b"{}")
    assert directory_of(bucket, later_s=_LATER_S).sweep() == []
    assert len(bucket.list("data/")) == 1


def test_download_that_dies_at_any_request_is_continued(run: api.Place, tmp_path: Path) -> None:
    bucket = new_objects()
    directory_of(bucket).upload(run, _SECOND)
    for last in (1, 2):
        target = api.place(tmp_path / str(last))
        with target.lease("net"), pytest.raises(Died):
            download(directory_of(CountedObjects(bucket, last=last)), _SECOND, target)
        assert target.scan() == []
        with target.lease("net"):
            download(directory_of(bucket), _SECOND, target)
        assert [(one.name, one.state) for one in target.scan()] == [(_SECOND, api.State.OK)]


def test_sharded_checkpoint_that_dies_at_any_request_is_whole_or_absent(tmp_path: Path) -> None:
    for rank, content in enumerate(CONTENTS):
        (tmp_path / shard(rank)).write_bytes(content)
    (tmp_path / api.manifest_name(SET)).write_bytes(api.encode_manifest(sharded()))
    store, name = api.place(tmp_path), SET
    calm = CountedObjects(new_objects())
    directory_of(calm).upload(store, name)
    for last, is_done in _points(len(calm.requests)):
        bucket = new_objects()
        with pytest.raises(Died):
            directory_of(CountedObjects(bucket, last=last, is_done=is_done)).upload(store, name)
        assert whole_names(bucket, tmp_path) <= {name}
        directory_of(bucket).upload(store, name)
        assert whole_names(bucket, tmp_path) == {name}
