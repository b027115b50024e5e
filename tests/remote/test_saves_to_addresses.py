# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager("s3://bucket/run")`: saves that count once they are uploaded."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    KeyProblem,
    Ranks,
    Resume,
    StoreFull,
    StoreLocked,
    UnsafeWrite,
    UnsupportedCheckpoint,
)
from ckptmgr.events import Event
from ckptmgr.parallel import AutoParallelContext, SharedDirectory
from ckptmgr.remote import upload as writers
from tests.cli.running import run
from tests.support import api
from tests.support.counted_objects import CountedObjects
from tests.support.failingdisk import FailingDisk
from tests.support.runs import manager_on
from tests.support.saved import KEY, OTHER_KEY, flip

pytest.importorskip("obstore")

from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.requests import FetchedRange, StoredObject
from tests.remote.buckets import directory_of, listed, new_url, whole_names

_WAIT_S = 30.0

pytestmark = pytest.mark.usefixtures("machine")


def _state(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(50.0) * step}


def _staged(machine: Path) -> list[str]:
    found = [path for path in machine.rglob("*") if path.is_file()]
    return [path.name for path in found if not path.name.startswith(".")]


@pytest.fixture
def stores_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[api.Objects], None]:
    """Replace the store that the next managers open."""

    def use(objects: api.Objects) -> None:
        monkeypatch.setattr(writers, "open_objects", lambda url: objects)

    return use


@pytest.mark.parametrize("mode", [False, "thread", "process"])
def test_save_is_whole_at_the_address_when_it_counts_as_saved_and_nothing_stays_here(
    tmp_path: Path, machine: Path, mode: bool | str
) -> None:
    url = new_url()
    events: list[Event] = []
    config = CheckpointConfig(async_save=mode)
    with CheckpointManager(url, config, observe=events.append) as manager:
        handle = manager.save(1, _state(1))
        assert handle is not None
        assert str(handle.wait(_WAIT_S).path) == f"{url}/ckpt-1.ckpt"
        assert whole_names(api.open_objects(url), tmp_path) == {"ckpt-1.ckpt"}
        assert handle.mirrored is None
    assert _staged(machine) == []
    (saved,) = [one for one in events if one.name == "save.durable"]
    assert str(saved.path) == f"{url}/ckpt-1.ckpt"


def test_run_resumes_from_the_address_on_another_machine(
    on_machine: Callable[[str], Path],
) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        for step in (1, 2):
            manager.save(step, _state(step), metrics={"loss": step})
    on_machine("second")
    state = _state(0)
    with CheckpointManager(UrlPath(url)) as manager:
        found = manager.resume(state)
        assert (found.step, found.fetched_from) == (2, None)
        assert np.array_equal(state["w"], _state(2)["w"])
        assert [one.step for one in manager.checkpoints()] == [1, 2]
        best = manager.best("loss")
        assert best is not None
        assert best.step == 1
        restored = manager.load(1)
        assert isinstance(restored, dict)
        assert np.array_equal(restored["w"], _state(1)["w"])
        manager.save(3, _state(3))
        assert manager.rollback(state).step == 2
    assert listed(api.open_objects(url)).keys() == {f"ckpt-{step}.ckpt" for step in (1, 2, 3)}


def test_background_save_returns_before_its_upload_and_is_durable_after_it(
    stores_of: Callable[[api.Objects], None],
) -> None:
    url, is_open = new_url(), threading.Event()

    class Gate(CountedObjects):
        def create(self, key: str, data: bytes) -> None:
            assert is_open.wait(_WAIT_S)
            super().create(key, data)

    stores_of(Gate(api.open_objects(url)))
    with CheckpointManager(url, CheckpointConfig(async_save=True)) as manager:
        handle = manager.step_end(1, _state(1))
        assert handle is not None
        assert handle.staged.done()
        assert not handle.durable.done()
        assert listed(api.open_objects(url)) == {}
        is_open.set()
        assert handle.wait(_WAIT_S).step == 1


def test_policy_of_the_configuration_is_applied_at_the_address() -> None:
    url = new_url()
    events: list[Event] = []
    config = CheckpointConfig(keep="last(1) | best(1, loss, min)")
    with CheckpointManager(url, config, observe=events.append) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
            manager.save(step, _state(step), metrics={"loss": loss})
        assert [one.step for one in manager.plan().kept] == [4, 2]
    assert listed(api.open_objects(url)).keys() == {"ckpt-2.ckpt", "ckpt-4.ckpt"}
    assert len(api.open_objects(url).list("data/")) == 2
    pruned = [one for one in events if one.name == "prune"]
    assert [one.notes for one in pruned] == [("dropped ckpt-1.ckpt",), ("dropped ckpt-3.ckpt",)]
    assert str(pruned[0].path) == url


@pytest.mark.parametrize("error", [PermissionError(13, "object lock"), ConnectionError("gone")])
def test_removal_that_fails_is_reported_and_the_save_stands(
    stores_of: Callable[[api.Objects], None], caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    url = new_url()

    class Locked(CountedObjects):
        def delete(self, keys: object) -> None:
            raise error

    stores_of(Locked(api.open_objects(url)))
    with CheckpointManager(url, CheckpointConfig(keep_checkpoint_max=1)) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
    assert str(error) in caplog.text
    assert len(listed(api.open_objects(url))) == 2


def test_old_data_of_no_checkpoint_is_removed_once_in_a_run(
    tmp_path: Path, stores_of: Callable[[api.Objects], None], caplog: pytest.LogCaptureFixture
) -> None:
    url = new_url()
    objects = api.open_objects(url)
    objects.put(f"data/{'0' * 64}/ckpt-9.ckpt", [b"x"], 1)
    later = 8 * 86_400.0

    class Unlisted(CountedObjects):
        has_failed = False

        def list(self, folder: str = "") -> list[StoredObject]:
            if folder and len(self.requests) > 12 and not self.has_failed:
                self.has_failed = True
                raise ConnectionError("not listed")
            return super().list(folder)

    stores_of(Unlisted(objects))
    with manager_on(url, clock=lambda: time.time() + later) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
    assert "not listed" in caplog.text
    assert len(objects.list("data/")) == 2
    assert whole_names(objects, tmp_path) == {"ckpt-1.ckpt", "ckpt-2.ckpt"}


def _remove_staging(machine: Path, *, only_lease: bool) -> None:
    """Do as programs that remove old files from temporary folders."""
    (lease,) = machine.rglob(".*.lease")
    if only_lease:
        lease.unlink()
    else:
        shutil.rmtree(lease.parents[1])


@pytest.mark.parametrize("only_lease", [True, False])
@pytest.mark.parametrize("mode", [False, "thread"])
def test_run_goes_on_when_its_temporary_folder_was_cleaned(
    machine: Path, tmp_path: Path, mode: bool | str, *, only_lease: bool
) -> None:
    url = new_url()
    with CheckpointManager(url, CheckpointConfig(async_save=mode)) as manager:
        manager.save(1, _state(1))
        manager.wait()
        _remove_staging(machine, only_lease=only_lease)
        manager.save(2, _state(2))
        manager.save(3, _state(3))
    names = {f"ckpt-{step}.ckpt" for step in (1, 2, 3)}
    assert whole_names(api.open_objects(url), tmp_path) == names


def test_folder_that_another_run_has_taken_is_not_taken_back(machine: Path) -> None:
    url = new_url()
    with CheckpointManager(url) as first, CheckpointManager(url) as second:
        first.save(1, _state(1))
        _remove_staging(machine, only_lease=True)
        second.save(2, _state(2))
        for _ in range(2):
            with pytest.raises(StoreLocked):
                first.save(3, _state(3))


@pytest.mark.parametrize(
    "key",
    [
        "data/imagenet/train.tar",
        "data/ckpt-9.ckpt",
        "data/exp.safetensors.manifest.json",
        f"data/{'0' * 64}/0.parquet",
        f"data/{'0' * 64}/deeper/ckpt-9.ckpt",
    ],
)
def test_objects_of_others_beside_the_data_of_a_run_are_not_removed(key: str) -> None:
    url = new_url()
    objects = api.open_objects(url)
    objects.put(key, [b"x"], 1)
    later = 8 * 86_400.0
    config = CheckpointConfig(keep="last(1)")
    with manager_on(url, config, clock=lambda: time.time() + later) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
    assert run("prune", url, "--keep", "last(1)", "--now", "--yes").exit_code == 0
    assert "leftover" not in run("ls", "--all", url).stdout
    assert objects.get(key) == b"x"


def test_failed_upload_fails_the_save_and_the_next_one_works(
    tmp_path: Path, machine: Path, stores_of: Callable[[api.Objects], None]
) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, _state(1))
    requests = CountedObjects(api.open_objects(url))
    stores_of(requests)
    manager = CheckpointManager(url)
    original = requests.put

    def put(key: str, pieces: object, size_bytes: int) -> None:
        requests.put = original  # type: ignore[method-assign]
        raise ConnectionError("no route to the store")

    requests.put = put  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="no route"):
        manager.save(2, _state(2))
    assert _staged(machine) == []
    assert whole_names(api.open_objects(url), tmp_path) == {"ckpt-1.ckpt"}
    manager.save(2, _state(2))
    manager.close()
    assert whole_names(api.open_objects(url), tmp_path) == {"ckpt-1.ckpt", "ckpt-2.ckpt"}


def test_failed_upload_is_tried_again_as_on_error_says(
    stores_of: Callable[[api.Objects], None],
) -> None:
    url = new_url()
    stores_of(
        CountedObjects(
            api.open_objects(url), last=6, error=lambda: ConnectionError("cut"), is_over=False
        )
    )
    config = CheckpointConfig(async_save=True, on_error="retry(2)")
    with CheckpointManager(url, config) as manager:
        manager.save(1, _state(1))
    assert listed(api.open_objects(url)) == {"ckpt-1.ckpt": api.State.OK}


def test_address_may_be_a_path_which_has_lost_a_slash() -> None:
    manager = CheckpointManager(Path("s3://bucket/run"))
    assert str(manager.directory) == "s3://bucket/run"


def test_second_run_on_the_same_machine_is_refused() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, _state(1))
        other = CheckpointManager(url)
        with pytest.raises(StoreLocked):
            other.save(2, _state(2))
        with CheckpointManager(url, prefix="other") as beside:
            beside.save(2, _state(2))
    assert len(listed(api.open_objects(url))) == 2


def test_run_that_another_machine_has_overtaken_refuses_to_save_until_it_resumes(
    on_machine: Callable[[str], Path],
) -> None:
    url = new_url()
    first = CheckpointManager(url)
    first.save(1, _state(1))
    on_machine("second")
    second = CheckpointManager(url)
    assert second.resume().step == 1
    second.save(2, _state(2))
    with pytest.raises(StoreLocked, match="another run writes this series: it saved step 2") as why:
        first.save(2, _state(2))
    assert "address of its own" in str(why.value)
    second.save(3, _state(3))
    with pytest.raises(StoreLocked):
        first.save(3, _state(3))
    second.close()
    assert first.resume().step == 3
    first.save(4, _state(4))
    first.close()
    assert [one.step for one in CheckpointManager(url).checkpoints()] == [1, 2, 3, 4]


def test_run_that_goes_on_is_not_overtaken_by_one_that_has_only_resumed(
    on_machine: Callable[[str], Path],
) -> None:
    url = new_url()
    first = CheckpointManager(url)
    first.save(1, _state(1))
    on_machine("second")
    second = CheckpointManager(url)
    second.resume()
    first.save(2, _state(2))
    with pytest.raises(StoreLocked):
        second.save(2, _state(2))
    first.save(3, _state(3))
    for one in (first, second):
        one.close()


def test_of_two_runs_that_save_at_the_same_instant_one_goes_on(
    on_machine: Callable[[str], Path], stores_of: Callable[[api.Objects], None]
) -> None:
    url = new_url()
    on_machine("second")
    second = CheckpointManager(url)
    on_machine("first")

    class Overtaken(CountedObjects):
        has_saved = False

        def put(self, key: str, pieces: object, size_bytes: int) -> None:
            if not self.has_saved:
                self.has_saved = True
                second.save(7, _state(7))
            super().put(key, pieces, size_bytes)  # type: ignore[arg-type]

    stores_of(Overtaken(api.open_objects(url)))
    first = CheckpointManager(url)
    first.save(1, _state(1))  # both found the address empty
    outcomes = []
    for manager in (first, second, first, second):
        try:
            manager.save(9, _state(9))
            outcomes.append((manager is first, True))
        except StoreLocked:
            outcomes.append((manager is first, False))
    assert outcomes[0][1] != outcomes[1][1]
    assert outcomes[:2] == outcomes[2:]
    for one in (first, second):
        one.close()


def test_name_that_another_run_takes_during_the_upload_fails_the_save(
    tmp_path: Path, on_machine: Callable[[str], Path], stores_of: Callable[[api.Objects], None]
) -> None:
    url = new_url()
    on_machine("second")
    second = CheckpointManager(url)
    on_machine("first")

    class Overtaken(CountedObjects):
        def create(self, key: str, data: bytes) -> None:
            second.save(1, _state(7))
            super().create(key, data)

    stores_of(Overtaken(api.open_objects(url)))
    first = CheckpointManager(url)
    with pytest.raises(UnsafeWrite, match="another checkpoint has this name there"):
        first.save(1, _state(1))
    for one in (first, second):
        one.close()
    assert whole_names(api.open_objects(url), tmp_path) == {"ckpt-1.ckpt"}


def test_new_start_is_beside_what_is_there() -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(5, _state(5))
    with CheckpointManager(url) as manager:
        assert manager.resume(None, Resume(start="new")).is_fresh
        manager.save(5, _state(6))
    assert listed(api.open_objects(url)).keys() == {"ckpt-5.ckpt", "ckpt-5-r1.ckpt"}


def test_damaged_checkpoint_is_skipped_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    url = f"file://{folder}"
    with CheckpointManager(url) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
    (newest,) = folder.glob("data/*/ckpt-2.ckpt")
    newest.chmod(0o600)
    flip(newest, 200)
    with CheckpointManager(url) as manager:
        found = manager.resume()
    assert found.step == 1
    assert [one.is_damaged for one in found.skipped] == [True]


@pytest.mark.parametrize("error", [ConnectionError("no route"), PermissionError(13, "denied")])
def test_resume_takes_no_older_checkpoint_while_the_newest_cannot_be_read(
    stores_of: Callable[[api.Objects], None], error: OSError
) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))

    class Unreadable(CountedObjects):
        def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
            if "ckpt-2" in key:
                raise error
            return super().fetch(key, offset, length)

    stores_of(Unreadable(api.open_objects(url)))
    manager = CheckpointManager(url)
    with pytest.raises(type(error)):
        manager.resume()
    manager.close()


def test_run_with_a_key_uploads_ciphertext_only(machine: Path) -> None:
    url = new_url()
    config = CheckpointConfig(format="safetensors", enc_key=KEY.raw)
    with CheckpointManager(url, config) as manager:
        manager.save(1, _state(1))
    objects = api.open_objects(url)
    (stored,) = objects.list("data/")
    assert stored.key.endswith(".ckpe")
    assert _state(1)["w"].tobytes()[80:160] not in objects.get(stored.key)
    with CheckpointManager(url, config) as manager:
        assert manager.resume().step == 1
    other = CheckpointConfig(format="safetensors", enc_key=OTHER_KEY.raw)
    manager = CheckpointManager(url, other)
    with pytest.raises(KeyProblem):
        manager.resume()
    manager.close()


def test_save_of_a_failed_run_is_uploaded_and_replaced_by_the_next_one() -> None:
    url = new_url()
    config = CheckpointConfig(save_checkpoint_steps=5, exception_save=True)
    for step in (7, 8):
        with contextlib.suppress(ZeroDivisionError), CheckpointManager(url, config) as manager:
            if manager.resume().is_fresh:
                manager.step_end(5, _state(5))
            manager.step_end(step, _state(step))
            raise ZeroDivisionError
    with CheckpointManager(url, config) as manager:
        assert {one.step for one in manager.checkpoints() if one.is_emergency} == {8}
        assert manager.resume().step == 5


def test_what_a_killed_run_has_staged_is_removed_by_the_next(
    machine: Path, stores_of: Callable[[api.Objects], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_url()
    with monkeypatch.context() as patched:
        patched.setattr(writers, "discard_staged", lambda store, name: None)
        with CheckpointManager(url) as manager:
            manager.save(1, _state(1))
    assert sorted(_staged(machine)) == ["ckpt-1.ckpt", "ckpt-1.ckpt.manifest.json"]
    with CheckpointManager(url) as manager:
        manager.resume()
        assert _staged(machine) == []


def test_staging_folder_is_private_and_must_be(machine: Path) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, _state(1))
        (folder,) = machine.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="TMPDIR"):
        CheckpointManager(url).save(2, _state(2))
    assert len(listed(api.open_objects(url))) == 1


def test_full_disk_here_is_named_with_the_way_out(machine: Path) -> None:
    disk = FailingDisk(api.OsFileSystem(), operation="write_at", error=errno.ENOSPC, call=1)
    with (
        pytest.raises(StoreFull) as caught,
        manager_on(new_url(), fs=disk) as manager,
    ):
        manager.save(1, _state(1))
    (sentence,) = caught.value.__notes__
    assert "TMPDIR names another folder" in sentence
    assert str(machine) in sentence
    assert _staged(machine) == []


def test_error_that_is_not_of_the_disk_says_nothing_of_folders() -> None:
    class Short(api.OsFileSystem):
        def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> api.OutputFile:
            raise MemoryError("no buffer")

    with (
        pytest.raises(MemoryError, match="no buffer") as caught,
        manager_on(new_url(), fs=Short()) as manager,
    ):
        manager.save(1, _state(1))
    assert not getattr(caught.value, "__notes__", [])


def test_forked_child_is_told_that_it_cannot_save(tmp_path: Path) -> None:
    program = """
import os, sys
from ckptmgr import CheckpointManager, SaveFailed
manager = CheckpointManager("memory://bucket/run")
child = os.fork()
if child == 0:
    try:
        manager.save(1, {"a": 1})
    except SaveFailed as error:
        print(error)
    sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 7, done.stderr
    assert "do not survive a fork" in done.stdout


def test_forecast_knows_no_limit_of_the_store() -> None:
    with CheckpointManager(new_url()) as manager:
        manager.save(1, _state(1))
        forecast = manager.forecast()
    assert forecast.demand.free_bytes is None
    assert forecast.demand.present_bytes > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda manager: manager.pin(1),
        lambda manager: manager.unpin(1),
        lambda manager: manager.record(1, {"loss": 1.0}),
    ],
    ids=["pin", "unpin", "record"],
)
def test_change_of_a_saved_checkpoint_is_refused_by_name(
    change: Callable[[CheckpointManager], None],
) -> None:
    with CheckpointManager(new_url()) as manager:
        manager.save(1, _state(1))
        with pytest.raises(UnsupportedCheckpoint, match="pins, and metrics after the save"):
            change(manager)


def test_option_without_effect_at_an_address_is_refused_by_name(tmp_path: Path) -> None:
    url = new_url()
    coordinator = SharedDirectory(tmp_path / "ranks", rank=0, world=1)
    context = AutoParallelContext(device_num=2, global_rank=0)
    for name, options in {
        "coordinator": {"ranks": Ranks(coordinator)},
        "mirror": {"mirror": new_url()},
        "context": {"context": context},
    }.items():
        with pytest.raises(ValueError, match=f"{name} has no effect in a run that saves to {url}"):
            CheckpointManager(url, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="file_mode has no effect in a run that saves to an addr"):
        CheckpointManager(url, CheckpointConfig(file_mode=0o640))
    with (
        pytest.raises(ValueError, match="allow_bare has no effect in an object store"),
        CheckpointManager(url) as manager,
    ):
        manager.resume(None, Resume(allow_bare=True))
    for how in (Resume(on_difference="raise"), Resume(tolerance={"loss": 1.0})):
        with (
            pytest.raises(
                ValueError, match=r"has no effect in a run that saves to .*: no steps are"
            ),
            CheckpointManager(url) as manager,
        ):
            manager.resume(None, how)
    assert directory_of(api.open_objects(url)).names() == []
