# SPDX-License-Identifier: Apache-2.0
"""`resume` with a mirror: newer ones there are taken; and the effect of a mirror that does not answer."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    Mirror,
    Resume,
    Resumption,
    StoreLocked,
    UnsafeWrite,
)
from ckptmgr.events import Event
from tests.cli.running import run
from tests.support import api
from tests.support.counted_objects import CountedObjects
from tests.support.saved import KEY, flip

pytest.importorskip("obstore")

from ckptmgr.objects.requests import StoredObject
from ckptmgr.remote import mirror as mirrors
from ckptmgr.remote.fallback import ask_for_newer
from tests.remote.buckets import directory_of, listed, new_url

_WAIT_S = 30.0
_KEEP_TWO = CheckpointConfig(keep="last(2)")
StoresOf = Callable[[api.Objects], None]


def _state(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(3, float(value))}


@pytest.fixture
def stores_of(monkeypatch: pytest.MonkeyPatch) -> StoresOf:
    """Replace the store that the next managers open."""

    def use(objects: api.Objects) -> None:
        monkeypatch.setattr(mirrors, "open_objects", lambda url: objects)

    return use


class _Switched(CountedObjects):
    """A store that answers while it is on."""

    is_on = False

    def _request(self, kind: str, key: str, carry_out: Callable[[], object]) -> object:  # type: ignore[override]
        if not self.is_on:
            raise ConnectionError("no route to the store")
        return super()._request(kind, key, carry_out)


def _train(
    directory: Path,
    mirror: Mirror | str | None,
    steps: int = 0,
    *,
    config: CheckpointConfig = _KEEP_TWO,
    value: float = 0.0,
) -> Resumption:
    """Resume, save so many steps, each of which is uploaded, and return where it began."""
    with CheckpointManager(directory, config, mirror=mirror) as manager:
        start = manager.resume(_state(0))
        for step in range(start.step + 1, start.step + 1 + steps):
            handle = manager.save(step, _state(step + value))
            if handle is not None and handle.mirrored is not None:
                handle.mirrored.result(_WAIT_S)
    return start


def _names(directory: Path) -> set[str]:
    return {one.name for one in api.listed(directory)}


def _steps(*steps: int) -> set[str]:
    return {f"ckpt-{step}.ckpt" for step in steps}


def test_node_that_comes_back_goes_on_where_another_one_got_to(tmp_path: Path) -> None:
    mirror = Mirror(new_url(), keep="last(3)")
    _train(tmp_path / "a", mirror, 4)
    _train(tmp_path / "b", mirror, 4, value=100)
    again = _train(tmp_path / "a", mirror, 2)
    assert (again.step, again.fetched_from) == (8, f"{mirror.url}/ckpt-8.ckpt")
    assert isinstance(again.state, dict)
    assert np.array_equal(again.state["w"], _state(108)["w"])
    assert listed(api.open_objects(mirror.url)).keys() == _steps(8, 9, 10)


def _damage(directory: Path) -> None:
    flip(directory / "ckpt-4.ckpt", 100)


def _cut(directory: Path) -> None:
    data = directory / "ckpt-4.ckpt"
    data.chmod(0o600)
    data.write_bytes(data.read_bytes()[:-10])


def _delete(directory: Path) -> None:
    for path in directory.glob("ckpt-4.ckpt*"):
        path.unlink()


def _lose_data(directory: Path) -> None:
    (directory / "ckpt-4.ckpt").unlink()


def _put_old_copy_back(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.with_name("backup").rename(directory)


def _damage_all(directory: Path) -> None:
    for path in directory.glob("ckpt-?.ckpt"):
        flip(path, 100)


@pytest.mark.parametrize(
    "harm", [_damage, _cut, _delete, _lose_data, _put_old_copy_back, _damage_all]
)
def test_newest_that_is_not_whole_here_is_taken_from_the_mirror(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    url, here = new_url(), tmp_path / "a"
    _train(here, url, 2)
    shutil.copytree(here, tmp_path / "backup")
    _train(here, url, 2)
    harm(here)
    events: list[Event] = []
    with CheckpointManager(here, _KEEP_TWO, mirror=url, observe=events.append) as manager:
        found = manager.resume(_state(0))
        manager.save(5, _state(5))
        manager.save(6, _state(6))
    assert (found.step, found.fetched_from) == (4, f"{url}/ckpt-4.ckpt")
    (resumed,) = [one for one in events if one.name == "resume"]
    assert f"took {url}/ckpt-4.ckpt" in resumed.notes
    _train(here, url, 2)
    assert _names(here) == _steps(6, 7, 8)


def test_file_here_whose_manifest_is_damaged_is_not_replaced(tmp_path: Path) -> None:
    url, here = new_url(), tmp_path / "a"
    _train(here, url, 4)
    (here / api.manifest_name("ckpt-4.ckpt")).chmod(0o600)
    (here / api.manifest_name("ckpt-4.ckpt")).write_text("{")
    before = (here / "ckpt-4.ckpt").read_bytes()
    with pytest.raises(UnsafeWrite, match="another file has this name here") as caught:
        _train(here, url)
    assert "ckpt-4.ckpt (step 4) is newer than what is here (step 3)" in str(caught.value.__notes__)
    assert (here / "ckpt-4.ckpt").read_bytes() == before


def test_newest_after_a_rollback_has_a_lower_step(tmp_path: Path) -> None:
    url = new_url()
    config = CheckpointConfig(keep="all")
    _train(tmp_path / "a", url, 4, config=config)
    run("copy", url, tmp_path / "b")
    with CheckpointManager(tmp_path / "b", config, mirror=url) as manager:
        manager.resume(_state(0))
        manager.save(5, _state(5))
        manager.save(3, _state(333))
    found = _train(tmp_path / "a", url, config=config)
    assert (found.step, found.fetched_from) == (3, f"{url}/ckpt-3-r1.ckpt")


def test_damaged_newest_of_the_mirror_is_skipped_for_one_that_is_still_newer(
    tmp_path: Path,
) -> None:
    bucket = tmp_path / "bucket"
    url = f"file://{bucket}"
    _train(tmp_path / "a", url, 2)
    _train(tmp_path / "b", url, 2)
    flip(next(bucket.glob("data/*/ckpt-4.ckpt")), 100)
    found = _train(tmp_path / "a", url)
    assert (found.step, found.fetched_from) == (3, f"{url}/ckpt-3.ckpt")
    assert [(one.checkpoint.name, one.is_damaged) for one in found.skipped] == [
        ("ckpt-4.ckpt", True)
    ]


def test_mirror_whose_newer_ones_are_all_damaged_leaves_what_is_here(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    url = f"file://{bucket}"
    config = CheckpointConfig(keep="all")
    _train(tmp_path / "a", url, 2, config=config)
    _train(tmp_path / "b", url, 12, config=config)
    for path in bucket.glob("data/*/*"):
        if path.name not in _steps(1, 2):
            flip(path, 100)
    found = _train(tmp_path / "a", url, config=config)
    assert (found.step, len(found.skipped)) == (2, 12)


def test_mirror_may_be_waited_for_without_a_limit(tmp_path: Path) -> None:
    inf = float("inf")
    mirror = Mirror(new_url(), at_resume_s=inf, close_timeout_s=inf)
    _train(tmp_path / "a", mirror, 2)
    assert _train(tmp_path / "a", mirror, 1).step == 2


def test_newer_one_whose_data_is_gone_there_is_passed_over(tmp_path: Path) -> None:
    url = new_url()
    _train(tmp_path / "a", url, 2)
    _train(tmp_path / "b", url, 1)
    objects = api.open_objects(url)
    objects.delete([one.key for one in objects.list("data/") if one.key.endswith("ckpt-3.ckpt")])
    found = _train(tmp_path / "a", url)
    assert (found.step, found.fetched_from) == (2, None)
    assert [one.checkpoint.name for one in found.skipped] == ["ckpt-3.ckpt"]


def test_line_that_does_not_go_on_from_this_one_is_not_taken(tmp_path: Path) -> None:
    url = new_url()
    _train(tmp_path / "a", None, 2)
    _train(tmp_path / "stranger", url, 9)
    found = _train(tmp_path / "a", url)
    assert (found.step, found.fetched_from) == (2, None)


def test_of_two_that_went_on_from_one_the_later_is_taken_as_in_one_directory(
    tmp_path: Path,
) -> None:
    url = new_url()
    _train(tmp_path / "a", url, 2)
    _train(tmp_path / "b", url, 4)
    _train(tmp_path / "a", None, 2)  # without the mirror: it went on from step 2, too
    found = _train(tmp_path / "a", url)
    assert (found.step, found.fetched_from) == (6, f"{url}/ckpt-6.ckpt")
    _train(tmp_path / "c", url, 1)
    (tmp_path / "a/ckpt-6.ckpt").unlink()
    (tmp_path / "a" / api.manifest_name("ckpt-6.ckpt")).unlink()
    _train(tmp_path / "a", None, 9)
    last = _train(tmp_path / "a", url)
    assert (last.step, last.fetched_from) == (13, None)


def test_newer_checkpoint_that_the_keys_do_not_prove_decides_nothing(tmp_path: Path) -> None:
    url = new_url()
    config = CheckpointConfig(keep="all", format="safetensors", enc_key=KEY.raw)
    _train(tmp_path / "a", url, 2, config=config)
    objects, name = api.open_objects(url), "ckpt-9.safetensors.ckpe"
    manifest = api.place(tmp_path / "a").read_manifest("ckpt-2.safetensors.ckpe")
    assert manifest is not None
    planted = replace(manifest, step=9, sequence=9, file=replace(manifest.file, name=name))
    objects.create(api.manifest_name(name), api.encode_manifest(planted))
    found = _train(tmp_path / "a", url, config=config)
    assert (found.step, found.fetched_from) == (2, None)
    assert [one.checkpoint.name for one in found.skipped] == [name]


def test_thousands_of_names_take_one_listing_and_few_requests(tmp_path: Path) -> None:
    url, steps = new_url(), 2000
    _train(tmp_path / "a", url, 2)
    _train(tmp_path / "b", url, 1)
    manifest = api.place(tmp_path / "b").read_manifest("ckpt-3.ckpt")
    assert manifest is not None
    objects = api.open_objects(url)
    for step in range(4, steps):
        name = f"ckpt-{step}.ckpt"
        later = manifest.saved_at + timedelta(hours=2 * step)
        one = replace(
            manifest,
            step=step,
            sequence=step,
            saved_at=later,
            file=replace(manifest.file, name=name),
        )
        objects.create(api.manifest_name(name), api.encode_manifest(one))
    counted = CountedObjects(objects)
    here = api.listed(tmp_path / "a")[0]
    asked = ask_for_newer(directory_of(counted), here, trust=api.DEFAULT_TRUST)
    assert max(one.step for one in asked.related) == steps - 1
    assert len(counted.requests) < 20


@pytest.mark.parametrize("is_silent", [False, True])
def test_mirror_that_does_not_answer_leaves_the_run_in_doubt(
    tmp_path: Path, stores_of: StoresOf, caplog: pytest.LogCaptureFixture, is_silent: bool
) -> None:
    url = new_url()
    _train(tmp_path / "a", url, 2)
    released = threading.Event()

    class Silent(CountedObjects):
        def list(self, folder: str = "") -> list[StoredObject]:
            released.wait(_WAIT_S)
            return super().list(folder)

    away = Silent(api.open_objects(url)) if is_silent else _Switched(api.open_objects(url))
    stores_of(away)
    events: list[Event] = []
    mirror = Mirror(url, at_resume_s=0.01, close_timeout_s=0, retry_s=0)
    with CheckpointManager(tmp_path / "a", mirror=mirror, observe=events.append) as manager:
        found = manager.resume(_state(0))
        manager.save(3, _state(3))
    released.set()
    assert found.step == 2
    assert found.doubt is not None
    assert found.doubt.startswith(f"the mirror was not asked: {url}: ")
    assert found.doubt in caplog.text
    assert any(found.doubt in one.notes and not one.is_ok for one in events)


def test_mirror_that_must_answer_is_an_error_at_once(tmp_path: Path, stores_of: StoresOf) -> None:
    url = new_url()
    _train(tmp_path / "a", url, 2)
    stores_of(_Switched(api.open_objects(url)))
    mirror = Mirror(url, at_resume="require", close_timeout_s=0)
    with (
        CheckpointManager(tmp_path / "a", mirror=mirror) as manager,
        pytest.raises(ConnectionError, match="no route"),
    ):
        manager.resume(_state(0))


@pytest.fixture
def doubtful(tmp_path: Path, stores_of: StoresOf) -> tuple[Path, _Switched]:
    """A run at step 4 whose mirror another one brought to step 8, and does not answer now."""
    url = new_url()
    mirror = Mirror(url, keep="last(3)")
    _train(tmp_path / "a", mirror, 4)
    _train(tmp_path / "b", mirror, 4, value=100)
    switched = _Switched(api.open_objects(url))
    stores_of(switched)
    return tmp_path / "a", switched


def test_newer_checkpoint_stops_the_run_before_anything_is_removed(
    doubtful: tuple[Path, _Switched], caplog: pytest.LogCaptureFixture
) -> None:
    here, switched = doubtful
    there = listed(api.open_objects(switched.url)).keys()
    events: list[Event] = []
    mirror = Mirror(switched.url, keep="last(3)", retry_s=0)
    with CheckpointManager(here, _KEEP_TWO, mirror=mirror, observe=events.append) as manager:
        assert manager.resume(_state(0)).step == 4
        manager.save(5, _state(5))
        handle = manager.save(6, _state(6))
        switched.is_on = (
            True  # not before: the mirror asks at once, and a rival stops the next save
        )
        assert handle is not None
        assert handle.mirrored is not None
        with pytest.raises(StoreLocked, match="the mirror has step 8 of another run"):
            handle.mirrored.result(_WAIT_S)
        with pytest.raises(StoreLocked, match="the mirror has step 8") as caught:
            manager.save(7, _state(7))
        assert "resume() goes on from what is there" in str(caught.value)
        assert "an address of its own" in str(caught.value)
        assert _names(here) == _steps(3, 4, 5, 6)
        assert listed(api.open_objects(switched.url)).keys() == there
        assert "the mirror has step 8" in caplog.text
        assert any(one.error_type == "StoreLocked" for one in events if one.name == "mirror")
        found = manager.resume(_state(0))
        assert (found.step, found.fetched_from) == (8, f"{switched.url}/ckpt-8.ckpt")
        manager.save(9, _state(9))
    assert listed(api.open_objects(switched.url)).keys() == _steps(7, 8, 9)


def test_new_start_after_a_rival_saves_again(doubtful: tuple[Path, _Switched]) -> None:
    here, switched = doubtful
    with CheckpointManager(here, mirror=Mirror(switched.url, retry_s=0)) as manager:
        manager.resume(_state(0))
        handle = manager.save(5, _state(5))
        switched.is_on = (
            True  # not before: the mirror asks at once, and a rival stops the next save
        )
        assert handle is not None
        assert handle.mirrored is not None
        assert isinstance(handle.mirrored.exception(_WAIT_S), StoreLocked)
        manager.resume(_state(0), Resume(start="new"))
        assert manager.save(100, _state(100)) is not None


def test_mirror_without_a_newer_one_lets_the_run_go_on_and_remove(
    tmp_path: Path, stores_of: StoresOf
) -> None:
    url = new_url()
    _train(tmp_path / "a", url, 4)
    switched = _Switched(api.open_objects(url))
    stores_of(switched)
    with CheckpointManager(tmp_path / "a", _KEEP_TWO, mirror=Mirror(url, retry_s=0)) as manager:
        assert manager.resume(_state(0)).step == 4
        for step in (5, 6, 7):
            manager.save(step, _state(step))
        assert _names(tmp_path / "a") == _steps(3, 4, 6, 7)
        switched.is_on = True
        handle = manager.save(8, _state(8))
        assert handle is not None
        assert handle.mirrored is not None
        handle.mirrored.result(_WAIT_S)
        manager.save(9, _state(9))
        assert _names(tmp_path / "a") == _steps(4, 8, 9)  # the origin of the resume stays as ever


def test_address_is_noted_for_the_commands_that_do_not_reach_it(tmp_path: Path) -> None:
    url = new_url()
    _train(tmp_path / "a", url, 1)
    for command in ("pin", "unpin"):
        said = run(command, tmp_path / "a/ckpt-1.ckpt").stderr
        assert f"{url}, the mirror of {tmp_path / 'a'}, is as it was" in said
        assert f"ckptmgr copy {tmp_path / 'a'} {url}" in said
    assert url in run("tag", tmp_path / "a/ckpt-1.ckpt", "good").stderr


@pytest.mark.parametrize("note", [b"", b"s3://user:secret@bucket", b"\xff", b"s3://b/\x1b[31m"])
def test_damaged_note_of_an_address_counts_as_absent(tmp_path: Path, note: bytes) -> None:
    _train(tmp_path / "a", None, 1)
    (tmp_path / "a/.ckpt.mirror").write_bytes(note)
    result = run("pin", tmp_path / "a/ckpt-1.ckpt")
    assert (result.exit_code, result.stderr) == (0, "")
