# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager(..., mirror=...)`: uploads in the background, and `resume` from the mirror."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    KeyProblem,
    Mirror,
    Ranks,
    Resume,
    SaveFailed,
    UnsafeWrite,
)
from ckptmgr.events import Event
from ckptmgr.parallel import SharedDirectory
from ckptmgr.remote import mirror as mirrors
from tests.support import api
from tests.support.counted_objects import AwayObjects, CountedObjects
from tests.support.failingdisk import FailingDisk
from tests.support.runs import manager_on
from tests.support.saved import KEY, OTHER_KEY, flip

pytest.importorskip("obstore")


from tests.remote.buckets import listed, new_url, whole_names

_WAIT_S = 30.0
_ATTEMPTS_OF_A_DAY = 24 * 60


def _state(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(50.0) * step}


def _offline() -> ConnectionError:
    return ConnectionError("no route to the store")


@pytest.fixture
def stores_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[api.Objects], None]:
    """Replace the store that the next managers open."""

    def use(objects: api.Objects) -> None:
        monkeypatch.setattr(mirrors, "open_objects", lambda url: objects)

    return use


class _Gate(CountedObjects):
    """A store whose uploads wait."""

    def __init__(self, objects: api.Objects) -> None:
        super().__init__(objects)
        self.is_open = threading.Event()
        self.is_reached = threading.Event()

    def create(self, key: str, data: bytes) -> None:
        self.is_reached.set()
        assert self.is_open.wait(_WAIT_S)
        super().create(key, data)


def test_saved_checkpoint_is_uploaded_and_its_handle_names_the_place(tmp_path: Path) -> None:
    url = new_url()
    events: list[Event] = []
    with CheckpointManager(tmp_path / "a", mirror=url, observe=events.append) as manager:
        handle = manager.save(1, _state(1))
        assert handle is not None
        assert handle.mirrored is not None
        assert handle.mirrored.result(_WAIT_S) == f"{url}/ckpt-1.ckpt"
    (event,) = [one for one in events if one.name == "mirror"]
    assert event.is_ok
    assert event.step == 1
    assert event.notes == (f"uploaded to {url}",)
    assert whole_names(api.open_objects(url), tmp_path) == {"ckpt-1.ckpt"}


def test_save_without_mirror_has_no_upload(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        handle = manager.save(1, _state(1))
    assert handle is not None
    assert handle.mirrored is None


def test_save_does_not_wait_for_its_upload(
    tmp_path: Path, stores_of: Callable[[api.Objects], None]
) -> None:
    url = new_url()
    gate = _Gate(api.open_objects(url))
    stores_of(gate)
    with CheckpointManager(tmp_path / "a", mirror=url) as manager:
        first = manager.save(1, _state(1))
        assert gate.is_reached.wait(_WAIT_S)
        second = manager.save(2, _state(2))
        for handle in (first, second):
            assert handle is not None
            assert handle.durable.done()
            assert handle.mirrored is not None
            assert not handle.mirrored.done()
        gate.is_open.set()
    assert whole_names(api.open_objects(url), tmp_path) == {"ckpt-1.ckpt", "ckpt-2.ckpt"}


def test_newest_goes_first_and_what_retention_removed_is_skipped_with_a_reason(
    tmp_path: Path, stores_of: Callable[[api.Objects], None], caplog: pytest.LogCaptureFixture
) -> None:
    url = new_url()
    gate = _Gate(api.open_objects(url))
    stores_of(gate)
    events: list[Event] = []
    config = CheckpointConfig(keep_checkpoint_max=1)
    with CheckpointManager(tmp_path, config, mirror=url, observe=events.append) as manager:
        manager.save(1, _state(1))
        assert gate.is_reached.wait(_WAIT_S)
        handles = [manager.save(step, _state(step)) for step in (2, 3)]
        gate.is_open.set()
    dropped, newest = (one.mirrored for one in handles if one is not None and one.mirrored)
    assert newest.result(_WAIT_S).endswith("ckpt-3.ckpt")
    with pytest.raises(CheckpointNotFound, match="removed here before its upload"):
        dropped.result(_WAIT_S)
    (skipped,) = [one for one in events if one.name == "mirror.skipped"]
    assert skipped.step == 2
    assert "ckpt-2.ckpt is not uploaded" in caplog.text
    # The first was open when retention removed it, so it is whole there.
    assert listed(api.open_objects(url)).keys() == {"ckpt-1.ckpt", "ckpt-3.ckpt"}


def test_full_queue_skips_the_oldest(
    tmp_path: Path, stores_of: Callable[[api.Objects], None]
) -> None:
    gate = _Gate(api.open_objects(new_url()))
    stores_of(gate)
    with CheckpointManager(tmp_path, mirror=Mirror(gate.url, queue=1)) as manager:
        manager.save(1, _state(1))
        assert gate.is_reached.wait(_WAIT_S)
        waiting = manager.save(2, _state(2))
        manager.save(3, _state(3))
        assert waiting is not None
        assert waiting.mirrored is not None
        with pytest.raises(CheckpointNotFound, match="1 newer ones were waiting"):
            waiting.mirrored.result(_WAIT_S)
        gate.is_open.set()
    # The end of the run catches up with those that are still here.
    assert len(listed(gate)) == 3


def test_mirror_keeps_by_its_own_policy(tmp_path: Path) -> None:
    url = new_url()
    events: list[Event] = []
    config = CheckpointConfig(keep_checkpoint_max=2)
    mirror = Mirror(url, keep="every(2) | last(1)")
    with CheckpointManager(tmp_path, config, mirror=mirror, observe=events.append) as manager:
        for step in range(1, 6):
            handle = manager.save(step, _state(step))
            assert handle is not None
            assert handle.mirrored is not None
            handle.mirrored.result(_WAIT_S)
    assert listed(api.open_objects(url)).keys() == {"ckpt-2.ckpt", "ckpt-4.ckpt", "ckpt-5.ckpt"}
    assert len(api.open_objects(url).list("data/")) == 3
    pruned = [one for one in events if one.name == "mirror.pruned"]
    assert pruned[0].notes == (f"dropped {url}/ckpt-1.ckpt",)


@pytest.mark.parametrize("is_done", [False, True])
def test_failure_of_any_request_is_reported_and_tried_again(
    tmp_path: Path, stores_of: Callable[[api.Objects], None], is_done: bool
) -> None:
    for last in range(1, 6):
        url = new_url()
        stores_of(
            CountedObjects(
                api.open_objects(url), last=last, is_done=is_done, error=_offline, is_over=False
            )
        )
        events: list[Event] = []
        mirror = Mirror(url, retry_s=0)
        place = tmp_path / str(last)
        with CheckpointManager(place, mirror=mirror, observe=events.append) as manager:
            handle = manager.save(1, _state(1))
            assert handle is not None
            assert handle.mirrored is not None
            assert handle.mirrored.result(_WAIT_S).startswith(url)
        failed = [one for one in events if one.name == "mirror" and not one.is_ok]
        assert [one.error for one in failed] == ["no route to the store"]
        assert whole_names(api.open_objects(url), tmp_path) == {"ckpt-1.ckpt"}


def test_store_that_cannot_be_reached_does_not_stop_the_run_and_close_says_what_is_left(
    tmp_path: Path, stores_of: Callable[[api.Objects], None], caplog: pytest.LogCaptureFixture
) -> None:
    url = new_url()
    stores_of(CountedObjects(api.open_objects(url), last=1, error=_offline))
    events: list[Event] = []
    mirror = Mirror(url, retry_s=0)
    with CheckpointManager(tmp_path, mirror=mirror, observe=events.append) as manager:
        handles = [manager.save(step, _state(step)) for step in (1, 2)]
    for handle in handles:
        assert handle is not None
        assert handle.durable.result().step
        assert handle.mirrored is not None
        with pytest.raises(SaveFailed, match="ended before it was uploaded"):
            handle.mirrored.result(_WAIT_S)
    (end,) = [one for one in events if one.name == "mirror.unfinished"]
    assert sorted(end.notes) == ["not uploaded: ckpt-1.ckpt", "not uploaded: ckpt-2.ckpt"]
    assert "not uploaded when the run ended" in caplog.text


def test_store_that_was_away_for_a_day_gets_the_upload_when_it_is_back(
    tmp_path: Path, stores_of: Callable[[api.Objects], None]
) -> None:
    url = new_url()
    stores_of(AwayObjects(api.open_objects(url), _ATTEMPTS_OF_A_DAY))
    with CheckpointManager(tmp_path, mirror=Mirror(url, retry_s=0.0)) as manager:
        handle = manager.save(1, _state(1))
        assert handle is not None
        assert handle.mirrored is not None
        assert handle.mirrored.result(_WAIT_S) == f"{url}/ckpt-1.ckpt"


def test_close_waits_no_longer_than_its_limit(
    tmp_path: Path, stores_of: Callable[[api.Objects], None]
) -> None:
    gate = _Gate(api.open_objects(new_url()))
    stores_of(gate)
    events: list[Event] = []
    mirror = Mirror(gate.url, close_timeout_s=0)
    with CheckpointManager(tmp_path, mirror=mirror, observe=events.append) as manager:
        manager.save(1, _state(1))
    assert [one.name for one in events][-1] == "mirror.unfinished"
    gate.is_open.set()


def test_next_run_uploads_what_a_killed_one_left(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
    url = new_url()
    with CheckpointManager(tmp_path / "a", mirror=Mirror(url, keep="last(1)")) as manager:
        assert manager.resume().step == 2
    # Only those that the policy of the mirror keeps.
    assert whole_names(api.open_objects(url), tmp_path) == {"ckpt-2.ckpt"}


def test_resume_on_a_new_machine_takes_the_newest_of_the_mirror_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = new_url()
    with CheckpointManager(tmp_path / "a", mirror=url) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
    events: list[Event] = []
    state = _state(0)
    with CheckpointManager(tmp_path / "b", mirror=url, observe=events.append) as manager:
        found = manager.resume(state)
        manager.save(3, _state(3))
        assert len(manager.checkpoints()) == 2
    assert found.step == 2
    assert found.fetched_from == f"{url}/ckpt-2.ckpt"
    assert np.array_equal(state["w"], _state(2)["w"])
    (resumed,) = [one for one in events if one.name == "resume"]
    assert f"took {url}/ckpt-2.ckpt" in resumed.notes
    assert f"step 2 was downloaded from {url}/ckpt-2.ckpt" in caplog.text
    assert len(listed(api.open_objects(url))) == 3


def test_checkpoint_that_is_fetched_has_the_chosen_modes(tmp_path: Path) -> None:
    url = new_url()
    with CheckpointManager(tmp_path / "a", mirror=url) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
    config = CheckpointConfig(file_mode=0o640)
    with CheckpointManager(tmp_path / "b", config, mirror=url) as manager:
        assert manager.resume(_state(0)).fetched_from is not None
    files = [tmp_path / "b" / name for name in ("ckpt-2.ckpt", "ckpt-2.ckpt.manifest.json")]
    assert [oct(one.stat().st_mode & 0o777) for one in files] == ["0o640", "0o640"]
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o750


def test_resume_prefers_what_is_here(tmp_path: Path) -> None:
    url = new_url()
    with CheckpointManager(tmp_path, mirror=url) as manager:
        manager.save(1, _state(1))
    with CheckpointManager(tmp_path, mirror=url) as manager:
        assert manager.resume().fetched_from is None


def test_resume_with_an_empty_mirror_starts_fresh(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, mirror=new_url()) as manager:
        assert manager.resume().is_fresh


def test_resume_names_the_damaged_checkpoints_of_the_mirror_when_it_starts_fresh(
    tmp_path: Path,
) -> None:
    url = new_url()
    with CheckpointManager(tmp_path / "a", mirror=url) as manager:
        manager.save(1, _state(1))
    objects = api.open_objects(url)
    (data,) = objects.list("data")
    objects.put(data.key, [bytes(data.size_bytes)], data.size_bytes)
    events: list[Event] = []
    with CheckpointManager(tmp_path / "b", mirror=url, observe=events.append) as manager:
        found = manager.resume(_state(0))
    assert found.is_fresh
    (skipped,) = found.skipped
    assert skipped.is_damaged
    (resumed,) = [one for one in events if one.name == "resume"]
    assert any("ckpt-1.ckpt" in note for note in resumed.notes)


def test_new_start_takes_nothing_from_the_mirror(tmp_path: Path) -> None:
    url = new_url()
    with CheckpointManager(tmp_path / "a", mirror=url) as manager:
        manager.save(1, _state(1))
    with CheckpointManager(tmp_path / "b", mirror=url) as manager:
        assert manager.resume(None, Resume(start="new")).is_fresh


def test_resume_refuses_to_start_fresh_while_the_mirror_cannot_be_reached(
    tmp_path: Path, stores_of: Callable[[api.Objects], None]
) -> None:
    url = new_url()
    stores_of(CountedObjects(api.open_objects(url), last=1, error=_offline))
    manager = CheckpointManager(tmp_path, mirror=Mirror(url, retry_s=0))
    with pytest.raises(ConnectionError, match="no route"):
        manager.resume()
    manager.close()


def test_damaged_checkpoint_of_the_mirror_is_skipped_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    url = f"file://{folder}"
    with CheckpointManager(tmp_path / "a", mirror=url) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
    (newest,) = folder.glob("data/*/ckpt-2.ckpt")
    newest.chmod(0o600)
    flip(newest, 200)
    with CheckpointManager(tmp_path / "b", mirror=url) as manager:
        found = manager.resume()
    assert found.step == 1
    (skipped,) = found.skipped
    assert skipped.checkpoint.name == "ckpt-2.ckpt"
    assert skipped.is_damaged
    assert "do not match the digest" in skipped.reason


def test_checkpoint_that_the_keys_do_not_prove_is_not_taken(tmp_path: Path) -> None:
    url = new_url()
    with CheckpointManager(tmp_path / "a", mirror=url) as manager:
        manager.save(1, _state(1))
    config = CheckpointConfig(format="safetensors", enc_key=KEY.raw)
    manager = CheckpointManager(tmp_path / "b", config, mirror=url)
    with pytest.raises(KeyProblem):
        manager.resume()
    manager.close()
    assert not list((tmp_path / "b").glob("ckpt*"))


def test_encrypted_files_are_uploaded_as_they_are(tmp_path: Path) -> None:
    url = new_url()
    config = CheckpointConfig(format="safetensors", enc_key=KEY.raw)
    with CheckpointManager(tmp_path / "a", config, mirror=url) as manager:
        manager.save(1, _state(1))
    objects = api.open_objects(url)
    (stored,) = objects.list("data/")
    (local,) = (tmp_path / "a").glob("*.ckpe")
    assert objects.get(stored.key) == local.read_bytes()
    with CheckpointManager(tmp_path / "b", config, mirror=url) as manager:
        assert manager.resume().step == 1
    other = CheckpointConfig(format="safetensors", enc_key=OTHER_KEY.raw)
    manager = CheckpointManager(tmp_path / "c", other, mirror=url)
    with pytest.raises(KeyProblem):
        manager.resume()
    manager.close()


def test_name_that_another_run_has_there_is_refused_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = new_url()
    handle = None
    for place in ("a", "b"):
        with CheckpointManager(tmp_path / place, mirror=url) as manager:
            handle = manager.save(1, _state(ord(place)))
    assert handle is not None
    assert handle.mirrored is not None
    with pytest.raises(UnsafeWrite, match="another checkpoint has this name there"):
        handle.mirrored.result(_WAIT_S)
    assert "is not uploaded to" in caplog.text
    with CheckpointManager(tmp_path / "c", mirror=url) as manager:
        restored = manager.resume().state
    assert isinstance(restored, dict)
    assert np.array_equal(restored["w"], _state(ord("a"))["w"])


def test_failed_save_has_a_failed_upload(tmp_path: Path) -> None:
    disk = FailingDisk(api.OsFileSystem(), operation="replace", error=errno.EROFS, call=1)
    config = CheckpointConfig(async_save=True)
    manager = manager_on(tmp_path, config, fs=disk, mirror=new_url())
    handle = manager.save(1, _state(1))
    with pytest.raises(OSError, match="Read-only"):
        manager.close()
    assert handle is not None
    assert handle.mirrored is not None
    assert handle.mirrored.exception(_WAIT_S) is handle.durable.exception()


def test_save_of_a_failed_run_is_uploaded_at_its_end(tmp_path: Path) -> None:
    url = new_url()
    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    with (
        contextlib.suppress(ZeroDivisionError),
        CheckpointManager(tmp_path, config, mirror=url) as manager,
    ):
        manager.step_end(7, _state(7))
        raise ZeroDivisionError
    (name,) = listed(api.open_objects(url))
    assert "7" in name


def test_mirror_with_a_coordinator_is_refused(tmp_path: Path) -> None:
    coordinator = SharedDirectory(tmp_path / "ranks", rank=0, world=1)
    with pytest.raises(ValueError, match="mirror has no effect with a coordinator"):
        CheckpointManager(tmp_path, ranks=Ranks(coordinator), mirror=new_url())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": 0}, "queue"),
        ({"queue": True}, "queue"),
        ({"close_timeout_s": -1}, "close_timeout_s of a Mirror"),
        ({"retry_s": float("nan")}, "retry_s of a Mirror"),
        ({"retry_s": "1"}, "retry_s of a Mirror"),
        ({"keep": "lats(3)"}, "did you mean"),
        ({"at_resume": "ask"}, "at_resume of a Mirror"),
        ({"at_resume_s": True}, "at_resume_s of a Mirror"),
    ],
)
def test_unusable_option_of_a_mirror_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Mirror("s3://bucket/run", **options)  # type: ignore[arg-type]


def test_address_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="credentials come from the environment") as caught:
        Mirror("s3://user:hunter2@bucket/run")
    assert "hunter2" not in str(caught.value)
