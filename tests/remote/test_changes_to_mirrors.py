# SPDX-License-Identifier: Apache-2.0
"""A change after the upload comes to the mirror: keys, pins, tags and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import Checkpoint, CheckpointConfig, CheckpointManager, Mirror, UnsafeWrite
from ckptmgr.events import Event
from ckptmgr.maintenance.rekey import open_for_rekeying, reencrypt_checkpoint, rekey_checkpoint
from ckptmgr.maintenance.rekey_change import KeyChange
from tests.cli.running import run
from tests.faults.training import RUNS, ModelProcesses
from tests.support import api
from tests.support.counted_objects import CountedObjects, Died
from tests.support.crashmodel import ModelDisk
from tests.support.rekeying import (
    NEW,
    OLD,
    OTHER,
    ROTATION,
    openers,
    rekey,
    ring,
    save_run,
    save_set,
)
from tests.support.saved import flip

pytest.importorskip("obstore")

from ckptmgr.objects.comparison import Difference
from ckptmgr.objects.directory import RemoteDirectory, Uploaded
from ckptmgr.objects.place import ObjectPlace
from ckptmgr.remote import mirror as mirrors
from ckptmgr.remote.download import download
from tests.remote.buckets import directory_of, listed, new_objects, new_url

_WAIT_S = 30.0
_ADD = KeyChange(keys=ring(OLD), add=(ring(NEW),))
_REMOVE = KeyChange(keys=ring(NEW), remove=(ring(OLD),))
_REENCRYPTION = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_exclusive=True)


def _state(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(50.0) * step}


def _openers(objects: api.Objects, keys: Sequence[api.Key] = (OLD, NEW)) -> dict[str, list[int]]:
    """Return which of the keys open each checkpoint of a store alone, by number."""
    found: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        trust = api.Trust(keys=ring(key))
        store = ObjectPlace(objects, trust=trust)
        for one in store.scan():
            answer = api.verify(store, one, options=api.reading(trust=trust))
            found.setdefault(one.name, [])
            if answer.status is api.Status.OK:
                found[one.name].append(number)
    return found


def _upload_all(objects: api.Objects, store: api.Place) -> list[Uploaded]:
    there = directory_of(objects)
    return [there.upload(store, one.name) for one in sorted(store.scan(), key=lambda one: one.name)]


def _contents(objects: api.Objects) -> dict[str, bytes]:
    return {one.key: objects.get(one.key) for one in [*objects.list(), *objects.list("data/")]}


def _filled(contents: dict[str, bytes]) -> api.Objects:
    bucket = new_objects()
    for key, data in contents.items():
        bucket.put(key, [data], len(data))
    return bucket


def _points(
    upload: Callable[[api.Objects], object], contents: dict[str, bytes]
) -> Iterable[api.Objects]:
    """Yield a store for each request of an upload, before and after which the upload died."""
    calm = CountedObjects(_filled(contents))
    upload(calm)
    for last in range(1, len(calm.requests) + 1):
        for is_done in (False, True):
            bucket = _filled(contents)
            with pytest.raises(Died):
                upload(CountedObjects(bucket, last=last, is_done=is_done))
            yield bucket


@pytest.mark.parametrize(
    ("changes", "uploads"),
    [
        ((ROTATION,), 2),
        ((_ADD,), 1),
        ((_ADD, _REMOVE), 2),
    ],
)
def test_mirror_of_changed_keys_opens_for_old_or_new_ones_at_every_request(
    tmp_path: Path, changes: Sequence[KeyChange], uploads: int
) -> None:
    save_run(directory=tmp_path, steps=1)
    store = api.place(tmp_path)
    name = store.scan()[0].name
    before = new_objects()
    _upload_all(before, store)
    contents = _contents(before)
    for change in changes:
        rekey(change, directory=tmp_path)

    def upload(bucket: api.Objects) -> object:
        return directory_of(bucket).upload(store, name)

    calm = CountedObjects(_filled(contents))
    assert upload(calm) == Uploaded.CHANGED
    assert sum(one.startswith("put data/") for one in calm.requests) == uploads
    after = _openers(calm)
    assert after == {name: [0, 1] if changes == (_ADD,) else [1]}
    for bucket in _points(upload, contents):
        assert _openers(bucket)[name], "it opens with neither key"
        upload(bucket)
        assert _openers(bucket) == after
        assert upload(bucket) == Uploaded.PRESENT


def test_set_of_files_with_changed_keys_opens_for_old_or_new_ones_at_every_request() -> None:
    disk = ModelDisk()
    save_set(disk)
    store = api.place(RUNS, fs=disk)

    first = new_objects()
    _upload_all(first, store)
    contents = _contents(first)
    rekey(ROTATION, fs=disk, processes=ModelProcesses(disk))
    (one,) = store.scan()

    def upload(bucket: api.Objects) -> object:
        return directory_of(bucket).upload(store, one.name)

    for bucket in _points(upload, contents):
        assert _openers(bucket)[one.name], "it opens with neither key"
        upload(bucket)
        assert _openers(bucket) == {one.name: [1]}


def test_keys_that_change_again_after_a_cut_change_leave_each_state_open(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    store = api.place(tmp_path)
    name = store.scan()[0].name
    first = new_objects()
    _upload_all(first, store)
    start = _contents(first)

    def upload(bucket: api.Objects) -> object:
        return directory_of(bucket).upload(store, name)

    rekey(ROTATION, directory=tmp_path)
    cut = [_contents(bucket) for bucket in _points(upload, start)]
    rekey(KeyChange(keys=ring(NEW), add=(ring(OTHER),), remove=(ring(NEW),)), directory=tmp_path)
    for state in cut:
        for bucket in _points(upload, state):
            assert _openers(bucket, (OLD, NEW, OTHER))[name], "it opens with no key"


@pytest.mark.parametrize("form", ["safetensors", "ckpt"])
def test_data_that_is_encrypted_again_replaces_the_old_at_one_request(
    tmp_path: Path, form: str
) -> None:
    save_run(directory=tmp_path, steps=1, form=form)
    store = api.place(tmp_path)
    name = store.scan()[0].name

    first = new_objects()
    _upload_all(first, store)
    contents = _contents(first)
    changing = open_for_rekeying(tmp_path, _REENCRYPTION)
    reencrypt_checkpoint(changing, changing.scan()[0], _REENCRYPTION)

    def upload(bucket: api.Objects) -> object:
        return directory_of(bucket).upload(store, name)

    for bucket in _points(upload, contents):
        assert len(_openers(bucket)[name]) == 1
        upload(bucket)
        assert _openers(bucket) == {name: [1]}
    done = _filled(contents)
    upload(done)
    assert len(done.list("data/")) == 1, "data that the old key opens was left"


def test_run_with_the_new_key_brings_its_mirror_to_it(tmp_path: Path) -> None:
    url = new_url()

    def run_with(key: api.Key, directory: Path) -> int:
        config = CheckpointConfig(keep="all", format="safetensors", enc_key=key.raw)
        with CheckpointManager(directory, config, mirror=url) as manager:
            return manager.resume(_state(0)).step

    config = CheckpointConfig(keep="all", format="safetensors", enc_key=OLD.raw)
    with CheckpointManager(tmp_path / "a", config, mirror=url) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
    rekey(ROTATION, directory=tmp_path / "a")
    assert run_with(NEW, tmp_path / "a") == 2
    assert set(map(tuple, _openers(api.open_objects(url)).values())) == {(1,)}
    assert run_with(NEW, tmp_path / "b") == 2


def test_checkpoint_that_is_only_in_the_mirror_is_named_after_a_change_of_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = new_url()

    def config(key: api.Key) -> CheckpointConfig:
        return CheckpointConfig(keep="last(1)", format="safetensors", enc_key=key.raw)

    with CheckpointManager(tmp_path / "a", config(OLD), prefix="net", mirror=url) as manager:
        for step in (1, 2):
            _saved(manager, step)
    rekey(ROTATION, directory=tmp_path / "a")
    events: list[Event] = []
    with CheckpointManager(
        tmp_path / "a", config(NEW), prefix="net", mirror=url, observe=events.append
    ) as manager:
        manager.resume(_state(0))
    assert "do not prove what is only there: net-1.safetensors.ckpe" in caplog.text
    assert [one.error_type for one in events if not one.is_ok] == ["KeyProblem"]
    # The way out that it names:
    run("copy", f"{url}/net-1.safetensors.ckpe", tmp_path / "b")
    rekey(ROTATION, directory=tmp_path / "b")
    assert run("copy", tmp_path / "b", url).exit_code == 0
    assert set(map(tuple, _openers(api.open_objects(url)).values())) == {(1,)}


def test_header_that_was_damaged_there_is_mended_by_a_change(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    objects = api.open_objects(f"file://{bucket}")
    save_run(directory=tmp_path / "a", steps=1)
    _upload_all(objects, api.place(tmp_path / "a"))
    (data,) = bucket.glob("data/*/*.ckpe")
    for offset in (100, 4096 + 100):  # both copies
        flip(data, offset)
    rekey(ROTATION, directory=tmp_path / "a")
    _upload_all(objects, api.place(tmp_path / "a"))
    assert list(_openers(objects).values()) == [[1]]


def test_pin_tag_and_metric_are_brought_there_at_the_end_of_the_run(tmp_path: Path) -> None:
    url = new_url()
    with CheckpointManager(tmp_path, CheckpointConfig(keep="all"), mirror=url) as manager:
        for step in (1, 2):
            handle = manager.save(step, _state(step))
            assert handle is not None
            assert handle.mirrored is not None
            handle.mirrored.result(_WAIT_S)
        manager.pin(1, "paper")
        manager.record(2, {"loss": 0.5})
    first, second = _there(url)
    assert [pin.name for pin in first.pins] == ["paper"]
    assert second.metrics == {"loss": 0.5}
    assert run("tag", tmp_path / "ckpt-2.ckpt", "good").exit_code == 0
    assert run("unpin", tmp_path / "ckpt-1.ckpt").exit_code == 0
    with CheckpointManager(tmp_path, CheckpointConfig(keep="all"), mirror=url) as manager:
        manager.resume(_state(0))
    first, second = _there(url)
    assert (first.pins, second.tags) == ((), ("good",))


def _there(url: str) -> list[Checkpoint]:
    found = ObjectPlace(api.open_objects(url), trust=api.DEFAULT_TRUST).scan()
    return sorted(found, key=lambda one: one.step)


@pytest.mark.parametrize("by", ["copy", "watch"])
def test_pin_is_brought_there_by_command(tmp_path: Path, by: str) -> None:
    url, runs = new_url(), tmp_path / "runs"
    with CheckpointManager(runs) as manager:
        manager.save(1, _state(1))

    def bring() -> str:
        command = (
            ("copy", runs, url) if by == "copy" else ("watch", runs, "--once", "--mirror", url)
        )
        result = run(*command)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    bring()
    run("pin", runs / "ckpt-1.ckpt")
    said = bring()
    assert [pin.name for pin in _there(url)[0].pins] == ["pinned"]
    assert ("brought up to date" if by == "copy" else "mirrored") in said
    assert "up to date" not in bring()


def test_data_of_a_cut_upload_is_sent_again_after_a_change_of_keys(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    store, objects = api.place(tmp_path), new_objects()
    (one,) = store.scan()
    with pytest.raises(Died):
        directory_of(CountedObjects(objects, last=4)).upload(store, one.name)
    assert objects.list("data/")
    assert not objects.list()
    rekey(ROTATION, directory=tmp_path)
    directory_of(objects).upload(store, one.name)
    assert _openers(objects) == {one.name: [1]}


def test_download_that_a_change_of_keys_overtakes_is_begun_again(tmp_path: Path) -> None:
    save_run(directory=tmp_path / "a", steps=1)
    store, objects = api.place(tmp_path / "a"), new_objects()
    (one,) = store.scan()
    directory_of(objects).upload(store, one.name)

    class Overtaken(CountedObjects):
        def read(self, key: str, offset: int, length: int) -> bytes:
            data = super().read(key, offset, length)
            rekey(ROTATION, directory=tmp_path / "a")
            directory_of(objects).upload(store, one.name)
            return data

    target = api.place(tmp_path / "b")
    with target.lease("net"):
        with pytest.raises(ConnectionError, match="its manifest was changed during the download"):
            download(directory_of(Overtaken(objects)), one.name, target)
        assert target.scan() == []
        here = download(directory_of(objects), one.name, target)
    assert openers(here, [ring(OLD), ring(NEW)]) == [1]


@pytest.mark.parametrize("change", ["pin", "keys"])
def test_two_places_that_changed_one_checkpoint_as_often_are_a_conflict(
    tmp_path: Path, change: str
) -> None:
    objects = api.open_objects(new_url())
    save_run(directory=tmp_path / "a", steps=1)
    (one,) = api.listed(tmp_path / "a")
    _upload_all(objects, api.place(tmp_path / "a"))
    assert run("copy", objects.url, tmp_path / "b").exit_code == 0
    key = tmp_path / "old.key"
    key.touch(mode=0o600)
    key.write_text(OLD.raw.hex())
    for place, other in (("a", NEW), ("b", OTHER)):
        if change == "pin":
            pinned = ("pin", tmp_path / place / one.name, "--name", place, "--key", f"file:{key}")
            assert run(*pinned).exit_code == 0
        else:
            rotation = KeyChange(keys=ring(OLD), add=(ring(other),), remove=(ring(OLD),))
            rekey(rotation, directory=tmp_path / place)
    _upload_all(objects, api.place(tmp_path / "a"))
    with pytest.raises(UnsafeWrite, match="there, and in another way here"):
        _upload_all(objects, api.place(tmp_path / "b"))
    assert _openers(objects) == {one.name: [0] if change == "pin" else [1]}


def test_live_run_that_another_one_went_on_from_loses_nothing_in_the_mirror(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = Mirror(new_url(), keep="last(2)")
    with (
        CheckpointManager(tmp_path / "a", mirror=mirror) as first,
        CheckpointManager(tmp_path / "b", mirror=mirror) as second,
    ):
        _saved(first, 1)
        second.resume(_state(0))
        _saved(first, 2)
        _saved(first, 3)
        for step in (10, 11, 12):
            _saved(second, step)
        there = listed(api.open_objects(mirror.url)).keys()
    assert there == {f"ckpt-{step}.ckpt" for step in (2, 3, 11, 12)}
    assert caplog.text.count("another run of this line saves there, too, up to ckpt-") == 1


def _saved(manager: CheckpointManager, step: int) -> None:
    handle = manager.save(step, _state(step))
    assert handle is not None
    assert handle.mirrored is not None
    handle.mirrored.result(_WAIT_S)


def test_copy_brings_pins_back_into_a_directory(tmp_path: Path) -> None:
    url = new_url()
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, _state(1))
    run("copy", tmp_path / "a", url)
    run("copy", url, tmp_path / "b")
    run("pin", tmp_path / "a/ckpt-1.ckpt", "--name", "paper")
    run("copy", tmp_path / "a", url)
    result = run("copy", url, tmp_path / "b")
    assert (result.exit_code, "brought up to date" in result.stdout) == (0, True)
    (one,) = api.listed(tmp_path / "b")
    assert [pin.name for pin in one.pins] == ["paper"]
    again = run("copy", url, tmp_path / "b")
    assert "was there already" in again.stdout


def test_copy_into_a_directory_refuses_newer_keys(tmp_path: Path) -> None:
    url = new_url()
    save_run(directory=tmp_path / "a", steps=1)
    run("copy", tmp_path / "a", url)
    run("copy", url, tmp_path / "b")
    before = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    rekey(ROTATION, directory=tmp_path / "a")
    run("copy", tmp_path / "a", url)
    result = run("copy", url, tmp_path / "b")
    assert result.exit_code == 13
    assert "were changed there later than here" in result.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before


def test_older_copy_takes_no_pin_and_no_key_away(tmp_path: Path) -> None:
    url = new_url()
    objects = api.open_objects(url)
    save_run(directory=tmp_path / "a", steps=2)
    _upload_all(objects, api.place(tmp_path / "a"))
    for name in sorted(one.name for one in api.listed(tmp_path / "a")):
        assert run("copy", f"{url}/{name}", tmp_path / "b").exit_code == 0
    first, second = sorted(one.name for one in api.listed(tmp_path / "a"))
    key = tmp_path / "old.key"
    key.touch(mode=0o600)
    key.write_text(OLD.raw.hex())
    run("pin", tmp_path / "a" / first, "--key", f"file:{key}")
    store = open_for_rekeying(tmp_path / "a", ROTATION)
    (chosen,) = (one for one in store.scan() if one.name == second)
    rekey_checkpoint(store, chosen, ROTATION)
    _upload_all(objects, api.place(tmp_path / "a"))
    stale = api.place(tmp_path / "b")
    for name in (first, second):
        assert directory_of(objects).difference(stale, name) is Difference.THERE
        with pytest.raises(UnsafeWrite, match="were changed there"):
            directory_of(objects).upload(stale, name)
    result = run("copy", tmp_path / "b", url)
    assert result.exit_code == 13
    assert result.stderr.count("were changed there") == 2
    assert [one.pins != () for one in _there(url)] == [True, False]
    assert _openers(objects) == {first: [0], second: [1]}


def test_change_that_a_live_mirror_has_later_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = new_url()
    config = CheckpointConfig(keep="all")
    with CheckpointManager(tmp_path / "a", config, mirror=url) as manager:
        manager.save(1, _state(1))
    run("copy", url, tmp_path / "b")
    run("pin", tmp_path / "a/ckpt-1.ckpt")
    run("copy", tmp_path / "a", url)
    events: list[Event] = []
    caplog.clear()
    with CheckpointManager(tmp_path / "b", config, mirror=url, observe=events.append) as manager:
        manager.resume(_state(0))
        manager.save(2, _state(2))
    assert caplog.text.count("ckpt-1.ckpt: keys, pins, tags or metrics") == 1
    assert [one.error_type for one in events if not one.is_ok] == ["UnsafeWrite"]
    assert _there(url)[0].pins


def test_another_checkpoint_under_a_name_that_is_here_too_is_reported_by_the_next_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = new_url()
    for place, mirror in (("a", url), ("b", None)):
        with CheckpointManager(tmp_path / place, mirror=mirror) as manager:
            manager.save(1, _state(ord(place)))
    events: list[Event] = []
    with CheckpointManager(tmp_path / "b", mirror=url, observe=events.append) as manager:
        assert manager.resume(_state(0)).fetched_from is None
    assert "another checkpoint has this name there" in caplog.text
    (failed,) = [one for one in events if one.name == "mirror"]
    assert (failed.step, failed.error_type) == (1, "UnsafeWrite")


@pytest.mark.parametrize("by", ["run", "watch"])
def test_pinned_checkpoint_here_is_never_removed_there(tmp_path: Path, by: str) -> None:
    url, runs = new_url(), tmp_path / "runs"
    config = CheckpointConfig(keep="last(1)")
    mirror = Mirror(url, keep="last(1)") if by == "run" else None
    for step in (1, 2, 3):
        with CheckpointManager(runs, config, mirror=mirror) as manager:
            manager.resume(_state(0))
            manager.save(step, _state(step))
            if step == 1:
                manager.pin(1)
        if by == "watch":
            if step == 1:  # the uploaded one does not know of the pin
                run("unpin", runs / "ckpt-1.ckpt")
            watched = ("watch", runs, "--once", "--mirror", url, "--mirror-keep", "last(1)")
            assert run(*watched).exit_code == 0
            if step == 1:
                run("pin", runs / "ckpt-1.ckpt")
    assert listed(api.open_objects(url)).keys() == {"ckpt-1.ckpt", "ckpt-3.ckpt"}
    assert _there(url)[0].pins


def test_manifest_that_reads_back_otherwise_is_no_success(tmp_path: Path) -> None:
    objects = new_objects()
    save_run(directory=tmp_path, steps=1)
    store = api.place(tmp_path)
    (one,) = store.scan()
    directory_of(objects).upload(store, one.name)
    rekey(_ADD, directory=tmp_path)

    class Forgetful(CountedObjects):
        def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
            if not key.endswith(".manifest.json"):
                super().put(key, pieces, size_bytes)

    with pytest.raises(ConnectionError, match="not the manifest that was written"):
        RemoteDirectory(Forgetful(objects), clock=lambda: 0.0).upload(store, one.name)


def test_comparison_of_many_checkpoints_takes_two_requests_for_each_and_none_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_url()
    config = CheckpointConfig(keep="all")
    with CheckpointManager(tmp_path, config, mirror=url) as manager:
        for step in range(1, 21):
            manager.save(step, _state(step))
    counted = CountedObjects(api.open_objects(url))
    monkeypatch.setattr(mirrors, "open_objects", lambda _: counted)
    with CheckpointManager(tmp_path, config, mirror=url) as manager:
        manager.resume(_state(0))
        manager.save(21, _state(21))
    compared = [one for one in counted.requests if one.startswith("get ckpt-7.ckpt")]
    assert len(compared) <= 2  # when it resumes, and when it is asked for newer ones
