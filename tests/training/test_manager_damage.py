# SPDX-License-Identifier: Apache-2.0
"""A `CheckpointManager` with damaged, forged and foreign files, and with other writers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    KeyProblem,
    Resumption,
    StoreLocked,
    Trust,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
)
from tests.faults.training import (
    KEY,
    KEYS,
    RUNS,
    SERIES,
    Trainer,
    disk_with,
    name_of,
    saved,
    state_of,
    value_of,
)
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.damage import copy, flip_bit, manifest_of, put, replace_in, truncate
from tests.support.runs import manager_on

OTHER_KEY = bytes([7] * 32)
ONE, TWO, THREE = name_of(1), name_of(2), name_of(3)
with_and_without_key = pytest.mark.parametrize("key", KEYS, ids=["plain", "encrypted"])


def resumed(disk: ModelDisk, key: bytes | None = None) -> Resumption:
    with Trainer(disk, key=key).manager() as manager:
        return manager.resume()


DAMAGES: dict[str, Callable[[ModelDisk], None]] = {
    "bit of the data": lambda disk: flip_bit(disk, TWO),
    "first bit of the data": lambda disk: flip_bit(disk, TWO, 0),
    "data cut": lambda disk: truncate(disk, TWO, 100),
    "data empty": lambda disk: truncate(disk, TWO, 0),
    "data longer": lambda disk: put(disk, RUNS / TWO, disk.read_bytes(RUNS / TWO) + b"x"),
    "data of another": lambda disk: copy(disk, ONE, TWO),
    "manifest of another": lambda disk: copy(disk, manifest_of(ONE), manifest_of(TWO)),
    "manifest cut": lambda disk: truncate(disk, manifest_of(TWO), 100),
    "manifest empty": lambda disk: truncate(disk, manifest_of(TWO), 0),
    "manifest of zeros": lambda disk: put(disk, RUNS / manifest_of(TWO), bytes(700)),
    "manifest with a list": lambda disk: replace_in(
        disk, manifest_of(TWO), b'"metrics": {}', b'"metrics": []'
    ),
}


@with_and_without_key
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_is_skipped_with_a_reason(damage: str, key: bytes | None) -> None:
    disk = disk_with(10.0, 20.0, key=key)
    DAMAGES[damage](disk)
    resumption = resumed(disk, key)
    assert value_of(resumption.state) == 10.0
    (skipped,) = resumption.skipped
    assert skipped.checkpoint.name == TWO
    assert skipped.reason


@with_and_without_key
@pytest.mark.parametrize("damage", DAMAGES)
def test_run_goes_on_after_damage_and_overwrites_nothing(damage: str, key: bytes | None) -> None:
    disk = disk_with(10.0, 20.0, key=key)
    DAMAGES[damage](disk)
    before = disk.read_bytes(RUNS / TWO)
    with Trainer(disk, key=key).manager() as manager:
        manager.resume()
        again = saved(manager, 2, 21.0)
    assert again.name == f"{SERIES}-2-r1.ckpt"
    assert disk.read_bytes(RUNS / TWO) == before
    assert value_of(resumed(disk, key).state) == 21.0


def test_skipped_checkpoints_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    disk = disk_with(10.0, 20.0)
    flip_bit(disk, TWO)
    resumed(disk)
    assert [r.levelname for r in caplog.records if f"skipped {RUNS / TWO}" in r.message] == [
        "WARNING"
    ]


def test_everything_damaged_is_a_fresh_start_that_tells_everything() -> None:
    disk = disk_with(10.0, 20.0)
    flip_bit(disk, ONE)
    truncate(disk, manifest_of(TWO), 3)
    resumption = resumed(disk)
    assert resumption.is_fresh
    assert {skip.checkpoint.name for skip in resumption.skipped} == {ONE, TWO}


def test_damaged_checkpoint_is_not_counted_by_retention() -> None:
    disk = disk_with(10.0, 20.0, 30.0)
    truncate(disk, TWO, 5)
    with Trainer(disk, keep="last(2)").manager() as manager:
        manager.resume()
        manager.save(4, state_of(40.0))
        left = {c.name: c.state for c in manager.checkpoints()}
    assert left == {TWO: api.State.CORRUPT, THREE: api.State.OK, name_of(4): api.State.OK}


def test_latest_is_never_one_that_is_known_to_be_damaged() -> None:
    disk = disk_with(10.0, 20.0)
    truncate(disk, TWO, 5)
    latest = Trainer(disk).manager().latest()
    assert latest is not None
    assert latest.name == ONE


def test_load_of_a_damaged_checkpoint_raises_and_gives_nothing() -> None:
    disk = disk_with(10.0)
    flip_bit(disk, ONE)
    state = state_of(0.0)
    with Trainer(disk).manager() as manager, pytest.raises(CkptmgrError, match="digest"):
        manager.load(1, state)
    assert value_of(state) == 0.0


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE])
def test_manifests_that_the_disk_does_not_give_are_an_error_and_no_fresh_start(error: int) -> None:
    disk = disk_with(10.0, 20.0)
    failing = FailingDisk(disk, error=error, operation="open", call=1, is_lasting=True)
    with Trainer(disk, fs=failing).manager() as manager, pytest.raises(OSError) as caught:  # noqa: PT011
        manager.resume()
    assert caught.value.errno == error


def make_newer(disk: ModelDisk, name: str) -> None:
    replace_in(disk, manifest_of(name), b"ckptmgr.manifest/1", b"ckptmgr.manifest/3")


def test_manifests_of_a_newer_version_are_an_error_and_no_fresh_start() -> None:
    disk = disk_with(10.0, 20.0)
    make_newer(disk, ONE)
    make_newer(disk, TWO)
    with pytest.raises(UnsupportedCheckpoint, match="upgrade ckptmgr"):
        resumed(disk)


def test_manifest_of_a_newer_version_is_passed_over_and_neither_counted_nor_removed() -> None:
    disk = disk_with(10.0, 20.0, 30.0)
    make_newer(disk, TWO)
    with Trainer(disk, keep="last(2)").manager() as manager:
        resumption = manager.resume()
        assert (resumption.step, [skip.checkpoint.name for skip in resumption.skipped]) == (
            3,
            [TWO],
        )
        manager.save(4, state_of(40.0))
        assert {c.name for c in manager.checkpoints()} == {TWO, THREE, name_of(4)}


def test_wrong_key_is_an_error_and_no_fresh_start() -> None:
    disk = disk_with(10.0, 20.0, key=KEY)
    with pytest.raises(KeyProblem):
        resumed(disk, OTHER_KEY)


def test_wrong_key_is_an_error_even_when_something_is_damaged_too() -> None:
    disk = disk_with(10.0, 20.0, 30.0, key=KEY)
    truncate(disk, manifest_of(THREE), 5)
    truncate(disk, TWO, 5)
    with pytest.raises(KeyProblem):
        resumed(disk, OTHER_KEY)


def test_missing_key_is_an_error_and_no_fresh_start() -> None:
    with pytest.raises(KeyProblem, match="a key is needed"):
        resumed(disk_with(10.0, key=KEY))


def test_run_under_another_key_removes_and_overwrites_nothing() -> None:
    disk = disk_with(10.0, 20.0, key=KEY)
    with Trainer(disk, key=OTHER_KEY, keep="last(1)").manager() as manager:
        for step in (2, 3):
            manager.save(step, state_of(float(step)))
    assert value_of(resumed(disk, KEY).state) == 20.0


def test_plain_checkpoints_are_refused_with_a_key_unless_allowed() -> None:
    disk = disk_with(10.0)
    with pytest.raises(KeyProblem, match="allow_unencrypted"):
        resumed(disk, KEY)
    config = CheckpointConfig(enc_key=KEY)
    with (
        manager_on(
            RUNS, config, fs=disk, trust=Trust(allow_unsealed=True), prefix=SERIES
        ) as manager,
        pytest.raises(KeyProblem, match="allow_unencrypted"),
    ):
        manager.resume()
    with manager_on(
        RUNS, config, fs=disk, trust=Trust(allow_unencrypted=True), prefix=SERIES
    ) as manager:
        assert value_of(manager.resume().state) == 10.0


def strip_authentication(disk: ModelDisk, name: str) -> None:
    document = json.loads(disk.read_bytes(RUNS / manifest_of(name)))
    del document["auth"]
    put(disk, RUNS / manifest_of(name), json.dumps(document).encode())


@pytest.mark.parametrize(
    "forge",
    [
        lambda disk: replace_in(disk, manifest_of(TWO), b'"step": 2', b'"step": 9'),
        lambda disk: replace_in(
            disk, manifest_of(TWO), b'"pins": []', b'"pins": [{"name":"a","reason":""}]'
        ),
        lambda disk: strip_authentication(disk, TWO),
    ],
)
def test_forged_manifest_is_skipped(forge: Callable[[ModelDisk], None]) -> None:
    disk = disk_with(10.0, 20.0, key=KEY)
    forge(disk)
    resumption = resumed(disk, KEY)
    assert value_of(resumption.state) == 10.0
    assert [skip.checkpoint.name for skip in resumption.skipped] == [TWO]


def replay(disk: ModelDisk, old: str, new: str, *, with_manifest: bool) -> None:
    """Pass an old checkpoint off as a newer one."""
    copy(disk, old, new)
    if with_manifest:
        renamed = disk.read_bytes(RUNS / manifest_of(old)).replace(old.encode(), new.encode())
        put(disk, RUNS / manifest_of(new), renamed)


@pytest.mark.parametrize("with_manifest", [False, True])
@pytest.mark.parametrize("new", [THREE, "net-9.ckpt"])
def test_older_file_under_a_newer_name_is_noticed(new: str, with_manifest: bool) -> None:
    disk = disk_with(10.0, 20.0, 30.0, key=KEY)
    replay(disk, ONE, new, with_manifest=with_manifest)
    assert value_of(resumed(disk, KEY).state) in ((20.0,) if new == THREE else (30.0,))


def test_older_file_without_any_manifest_left_is_not_resumed_from() -> None:
    disk = disk_with(10.0, 20.0, key=KEY)
    copy(disk, ONE, TWO)
    for name in (ONE, TWO):
        disk.unlink(RUNS / manifest_of(name))
    with pytest.raises(UnsealedCheckpoint, match="no manifest"):
        resumed(disk, KEY)


def test_bare_file_of_the_series_needs_leave_when_there_is_a_key() -> None:
    disk = disk_with(10.0, key=KEY)
    disk.replace(RUNS / ONE, RUNS / "net-1_1.ckpt")
    disk.unlink(RUNS / manifest_of(ONE))
    with pytest.raises(UnsealedCheckpoint, match="no manifest"):
        resumed(disk, KEY)
    config = CheckpointConfig(enc_key=KEY)
    with manager_on(
        RUNS, config, fs=disk, trust=Trust(allow_unsealed=True), prefix=SERIES
    ) as manager:
        assert value_of(manager.resume().state) == 10.0


def test_recovery_does_not_authenticate_what_somebody_else_wrote() -> None:
    disk = disk_with(10.0, 20.0, key=KEY)
    document = json.loads(disk.read_bytes(RUNS / manifest_of(ONE)))
    del document["auth"]
    forged = {**document, "replaces": {**document}, "sequence": 99, "step": 99}
    put(disk, RUNS / manifest_of(ONE), json.dumps(forged).encode())
    assert resumed(disk, KEY).step == 2
    assert "auth" not in json.loads(disk.read_bytes(RUNS / manifest_of(ONE)))


def test_second_manager_in_the_process_is_refused_and_the_first_goes_on() -> None:
    disk = disk_with(10.0)
    with Trainer(disk).manager() as first:
        first.resume()
        second = Trainer(disk).manager()
        with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
            second.resume()
        with pytest.raises(StoreLocked):
            second.save(2, state_of(2.0))
        with pytest.raises(StoreLocked):
            second.pin(1)
        assert value_of(second.load(1)) == 10.0
        first.save(2, state_of(20.0))
    assert value_of(second.resume().state) == 20.0
    second.close()


HOLD = """
import sys, numpy
from ckptmgr.training.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1], prefix="net")
manager.resume()
manager.save(1, {"weights": numpy.full(3, 10.0, numpy.float32), "value": 10.0})
print("saved", flush=True)
sys.stdin.read()
"""


def test_live_process_is_named_and_the_lease_of_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder, CheckpointManager(tmp_path, prefix=SERIES) as manager:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "saved\n"
        with pytest.raises(StoreLocked, match=f"process {holder.pid} on "):
            manager.resume()
        holder.kill()
        holder.wait()
        assert value_of(manager.resume().state) == 10.0


def make_directories(*paths: Path) -> None:
    for path in paths:
        path.mkdir()


def make_ancient(path: Path) -> None:
    path.write_bytes(b"")
    os.utime(path, (2**38, 2**38))


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "directory with the name of data": lambda d: (d / "net-7_1.ckpt").mkdir(),
    "directory with the name of a manifest": lambda d: (d / "net-7.ckpt.manifest.json").mkdir(),
    "directories for data and manifest": lambda d: make_directories(
        d / "net-7.ckpt", d / "net-7.ckpt.manifest.json"
    ),
    "directory with the name of a temporary file": lambda d: (
        d / ".net-7.ckpt.0-0-1-1.ab.0-0.tmp"
    ).mkdir(),
    "pipe": lambda d: os.mkfifo(d / "net-7_1.ckpt"),
    "pipe for a manifest": lambda d: os.mkfifo(d / "net-1.ckpt.manifest.json.manifest.json"),
    "broken link": lambda d: (d / "net-7_1.ckpt").symlink_to("nowhere"),
    "link for a manifest": lambda d: (d / "net-7.ckpt.manifest.json").symlink_to("nowhere"),
    "time of no calendar": lambda d: make_ancient(d / "net-7_1.ckpt"),
    "name that is no UTF-8": lambda d: (d / os.fsdecode(b"n\xff-7_1.ckpt")).write_bytes(b""),
    "huge number": lambda d: (d / f"net-{'9' * 100}_1.ckpt").write_bytes(b"x"),
    "empty file": lambda d: (d / "net-7_1.ckpt").write_bytes(b""),
    "foreign temporary file": lambda d: (d / ".something.tmp").write_bytes(b"x"),
}


@pytest.mark.parametrize("odd", ODD_FILES)
def test_odd_files_in_the_directory_do_no_harm(tmp_path: Path, odd: str) -> None:
    with CheckpointManager(tmp_path, prefix=SERIES) as manager:
        manager.save(1, state_of(10.0))
    ODD_FILES[odd](tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    with CheckpointManager(tmp_path, CheckpointConfig(keep="last(1)"), prefix=SERIES) as manager:
        assert manager.latest() is not None
        assert value_of(manager.resume().state) == 10.0
        manager.save(8, state_of(80.0))
        manager.save(9, state_of(90.0))
    assert names <= {path.name for path in tmp_path.iterdir()} | {name_of(8)}


def test_keys_are_in_no_error() -> None:
    disk = disk_with(10.0, key=KEY)
    with pytest.raises(KeyProblem) as caught:
        resumed(disk, OTHER_KEY)
    text = f"{caught.value!r} {caught.value}"
    for key in (KEY, OTHER_KEY):
        assert key.hex() not in text
        assert repr(key) not in text


def test_real_and_model_disk_agree_about_a_damaged_newest(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, prefix=SERIES) as manager:
        for step in (1, 2):
            manager.save(step, state_of(10.0 * step))
    path = tmp_path / TWO
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    with manager_on(tmp_path, fs=api.OsFileSystem(), prefix=SERIES) as manager:
        resumption = manager.resume()
    assert (resumption.step, len(resumption.skipped)) == (1, 1)
