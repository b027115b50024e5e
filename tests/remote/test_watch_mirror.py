# SPDX-License-Identifier: Apache-2.0
"""The uploads of a watch, for stores that fail, and for what changes meanwhile."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, parse_policy
from ckptmgr.maintenance.watch.directory import WatchedDirectory
from ckptmgr.maintenance.watch.mirroring import UploadAttempt
from tests.cli.running import run
from tests.support import api
from tests.support.counted_objects import AwayObjects, CountedObjects
from tests.support.saved import save_run

pytest.importorskip("obstore")


from ckptmgr.remote import watch_mirror
from ckptmgr.remote.watch_mirror import WatchMirror
from tests.remote.buckets import listed, new_objects, new_url, whole_names

_WAIT_S = 30.0
_ATTEMPTS_OF_A_DAY = 24 * 60
_LATER_S = 4e9  # long after the objects of this test were written


class Uploading:
    """The mirror of one directory, whose attempts are taken one at a time."""

    def __init__(self, directory: Path, objects: api.Objects, keep: str | None) -> None:
        self.directory = directory
        self.mirror = WatchMirror(
            {directory: objects.url},
            trust=api.DEFAULT_TRUST,
            keep=None if keep is None else parse_policy(keep),
            clock=lambda: _LATER_S,
            retry_s=0.0,
        )
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: list[UploadAttempt] = []
        self.mirror.start(lambda: self._woken.put(None))

    def want(self, *checkpoints: Checkpoint) -> None:
        self.mirror.want(self.directory, checkpoints)

    def next(self) -> UploadAttempt:
        while not self._ended:
            self._woken.get(timeout=_WAIT_S)
            self._ended += self.mirror.ended()
        return self._ended.pop(0)

    def outcomes(self, count: int) -> list[str]:
        return [self.next().outcome for _ in range(count)]


Start = Callable[..., Uploading]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the mirror of a directory in a given store."""
    begun: list[Uploading] = []

    def begin(objects: api.Objects, *, keep: str | None = None) -> Uploading:
        monkeypatch.setattr(watch_mirror, "open_objects", lambda _: objects)
        begun.append(Uploading(tmp_path, objects, keep))
        return begun[-1]

    yield begin
    for one in begun:
        one.mirror.stop()


def saved_in(directory: Path, *steps: int) -> list[Checkpoint]:
    """Save steps, and return their checkpoints as a watch lists them."""
    save_run(directory, steps)
    listing = WatchedDirectory(directory, trust=api.DEFAULT_TRUST).look(at=0.0)
    return sorted((one.checkpoint for one in listing.seen), key=lambda one: one.order)


def test_newest_goes_first(tmp_path: Path, start: Start) -> None:
    saved = saved_in(tmp_path, 1, 2, 3)
    uploading = start(new_objects())
    assert uploading.outcomes(1) == ["listed"]
    uploading.want(*saved)
    steps = [one.step for one in (uploading.next().checkpoint for _ in saved) if one is not None]
    assert steps == [3, 2, 1]
    assert uploading.mirror.is_settled


def test_upload_that_fails_is_tried_again(tmp_path: Path, start: Start) -> None:
    objects = CountedObjects(new_objects(), last=4, error=lambda: ValueError("odd"), is_over=False)
    uploading = start(objects)
    uploading.want(*saved_in(tmp_path, 1))
    assert uploading.outcomes(1) == ["listed"]
    failed = uploading.next()
    assert (failed.outcome, failed.problem) == ("failed", "ValueError: odd")
    assert uploading.outcomes(1) == ["uploaded"]


def test_listing_that_fails_is_tried_again_before_anything_is_uploaded(
    tmp_path: Path, start: Start
) -> None:
    offline = ConnectionError(errno.ECONNABORTED, "no route", "s3://bucket")
    uploading = start(CountedObjects(new_objects(), last=1, error=lambda: offline, is_over=False))
    uploading.want(*saved_in(tmp_path, 1))
    failed = uploading.next()
    assert (failed.checkpoint, failed.problem) == (None, "s3://bucket: no route")
    assert uploading.outcomes(2) == ["listed", "uploaded"]


def test_store_that_was_away_for_a_day_gets_the_upload_when_it_is_back(
    tmp_path: Path, start: Start
) -> None:
    uploading = start(AwayObjects(new_objects(), _ATTEMPTS_OF_A_DAY))
    uploading.want(*saved_in(tmp_path, 1))
    assert uploading.outcomes(_ATTEMPTS_OF_A_DAY) == ["failed"] * _ATTEMPTS_OF_A_DAY
    assert uploading.outcomes(2) == ["listed", "uploaded"]


def test_checkpoint_that_is_being_replaced_is_tried_again_without_a_failure(
    tmp_path: Path, start: Start
) -> None:
    uploading = start(
        CountedObjects(
            new_objects(), last=4, error=lambda: BlockingIOError("replaced"), is_over=False
        )
    )
    uploading.want(*saved_in(tmp_path, 1))
    assert uploading.outcomes(2) == ["listed", "uploaded"]


def test_checkpoint_that_is_gone_is_no_failure(tmp_path: Path, start: Start) -> None:
    first, last = saved_in(tmp_path, 1, 2)
    for path in tmp_path.glob(f"{last.name}*"):
        path.unlink()
    uploading = start(new_objects())
    uploading.want(last)
    assert uploading.outcomes(1) == ["listed"]
    uploading.want(first)
    assert uploading.outcomes(1) == ["uploaded"]


def test_checkpoint_that_another_process_uploaded_meanwhile_is_present(
    tmp_path: Path, start: Start
) -> None:
    saved, url = saved_in(tmp_path, 1), new_url()
    uploading = start(api.open_objects(url))
    assert uploading.outcomes(1) == ["listed"]
    assert run("copy", tmp_path, url).exit_code == 0
    uploading.want(*saved)
    assert uploading.outcomes(1) == ["present"]


def test_old_data_that_no_manifest_names_is_removed_with_a_policy(
    tmp_path: Path, start: Start
) -> None:
    objects = new_objects()
    objects.put(f"data/{'0' * 64}/left.ckpt", [b"x"], 1)
    (one,) = saved_in(tmp_path, 1)
    uploading = start(objects, keep="last(2)")
    uploading.want(one)
    assert uploading.outcomes(2) == ["listed", "uploaded"]
    assert [found.key for found in objects.list("data/")] == [f"data/{one.id}/{one.name}"]


class _Locked(CountedObjects):
    """A store that lets nothing be removed."""

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            raise PermissionError(errno.EACCES, "locked", key)


def test_policy_is_applied_at_the_start_to_what_a_killed_watch_has_left(tmp_path: Path) -> None:
    url = new_url()
    save_run(tmp_path, [1, 2, 3])
    assert run("watch", tmp_path, "--once", "--mirror", url).exit_code == 0
    again = run("watch", tmp_path, "--once", "--mirror", url, "--mirror-keep", "last(2)")
    assert (again.exit_code, again.stdout.count("pruned")) == (0, 1)
    assert f"{url}/net-1_1.ckpt for good" in again.stdout
    assert whole_names(api.open_objects(url), tmp_path / "check") == {
        "net-1_2.ckpt",
        "net-1_3.ckpt",
    }
    last = run("watch", tmp_path, "--once", "--mirror", url, "--mirror-keep", "last(2)")
    assert (last.exit_code, last.stdout.count("pruned")) == (0, 0)


def test_retention_that_fails_there_does_not_fail_the_upload(tmp_path: Path, start: Start) -> None:
    first, last = saved_in(tmp_path, 1, 2)
    uploading = start(_Locked(new_objects()), keep="last(1)")
    uploading.want(first)
    assert uploading.outcomes(2) == ["listed", "uploaded"]
    uploading.want(last)
    done = uploading.next()
    assert (done.outcome, done.removed) == ("uploaded", ())
    assert done.problem is not None
    assert "locked" in done.problem


@pytest.mark.parametrize("last", range(1, 25))
@pytest.mark.parametrize("is_done", [False, True])
def test_watch_that_dies_at_a_request_leaves_whole_checkpoints_and_the_next_one_goes_on(
    tmp_path: Path, start: Start, last: int, is_done: bool
) -> None:
    runs, objects = tmp_path, new_objects()
    saved = saved_in(runs, 1, 2, 3)
    dying = CountedObjects(objects, last=last, is_done=is_done)
    first = start(dying, keep="last(2)")
    first.want(*saved)
    found = [first.next().outcome]
    while found[-1] != "failed" and len(found) < 4:
        found.append(first.next().outcome)
    first.mirror.stop()
    uploaded = [saved[-number].name for number in range(1, found.count("uploaded") + 1)]
    assert set(uploaded) <= set(listed(objects))
    assert set(listed(objects).values()) <= {api.State.OK}
    second = start(objects, keep="last(2)")
    second.want(*saved)
    assert "failed" not in second.outcomes(4)
    assert whole_names(objects, tmp_path / "check") == {one.name for one in saved[1:]}


class _StopsInUpload(CountedObjects):
    """A store whose mirror is stopped while an object is sent."""

    mirror: WatchMirror

    def __init__(self, objects: api.Objects) -> None:
        super().__init__(objects)
        self.stoppers: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        stopper = threading.Thread(target=self.mirror.stop)
        stopper.start()
        self.stoppers.put(stopper)
        while not self.mirror.is_stopping:
            stopper.join(0.001)
        super().put(key, pieces, size_bytes)


def test_watch_that_ends_gives_up_its_upload(tmp_path: Path, start: Start) -> None:
    objects = _StopsInUpload(new_objects())
    uploading = start(objects)
    objects.mirror = uploading.mirror
    uploading.want(*saved_in(tmp_path, 1))
    objects.stoppers.get(timeout=_WAIT_S).join(_WAIT_S)
    assert listed(objects) == {}
    assert objects.list("data/") == []


def test_mirror_that_was_never_started_stops() -> None:
    WatchMirror({}, trust=api.DEFAULT_TRUST, keep=None, clock=lambda: 0.0).stop()
