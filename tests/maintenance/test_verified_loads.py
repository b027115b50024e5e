# SPDX-License-Identifier: Apache-2.0
"""What `verify` says of a file holds for every way to read it, and no way to read it ends in an undocumented error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ckptmgr import (
    CheckpointManager,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    Ranks,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from ckptmgr.cli.selectors import select_one
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import digest_of
from tests.cli.running import run
from tests.parallel.ranks import WORLD, Meeting, Seat, run_ranks
from tests.support import api
from tests.support.manifests import manifest

GOLDEN = Path(__file__).parents[1] / "golden"
BROKEN = sorted((GOLDEN / "files/broken").glob("*.[cs]*"))
KEY = bytes(range(32))
FUZZED = 150


def verified(path: Path, key: bytes | None) -> api.Verification:
    """Return what `verify` says of one file."""
    options = api.reading(keys=None if key is None else api.Key(key))

    def open_store(directory: Path) -> api.Place:
        return api.place(directory, trust=options.trust)

    found = select_one(str(path), path.parent, open_store)
    return api.verify(found.store, found.checkpoint, options=options)


def loaded(path: Path, key: bytes | None) -> Exception | None:
    """Load a file, its CRC32 compared where it has one; return why it does not load."""
    format = "safetensors" if ".safetensors" in path.name else "ckpt"
    is_empty = False
    try:
        with open_checkpoint(path, dec_key=key) as reader:
            mode, has_crc = reader._opened.cipher, reader._opened.index.crc is not None
            is_empty = not reader._opened.index.entries
            for name in reader.names():
                reader.read(name)
        read = partial(
            load_checkpoint, path, format=format, dec_key=key, dec_mode=mode or "AES-GCM"
        )
        read(crc_check=has_crc)
        read()
    except CkptmgrError as error:
        return error
    except ValueError as error:  # what MindSpore says of a file without parameters
        if not is_empty or "parameter dict is empty" not in str(error):
            raise
    return None


def check_that_verify_and_load_agree(path: Path, key: bytes | None) -> api.Status:
    answer, error = verified(path, key), loaded(path, key)
    if answer.status in (api.Status.OK, api.Status.UNVERIFIED, api.Status.PARTIAL):
        is_locked = key is None and isinstance(error, KeyProblem) and "encrypted" in str(answer)
        is_other = "holds a file that is no checkpoint" in str(error)
        assert error is None or is_locked or is_other, (answer, error)
    elif answer.status is not api.Status.UNPROVEN:  # which says that nothing proves its step
        assert error is not None, answer
    return answer.status


@pytest.mark.parametrize("key", [None, KEY, KEY[:16]], ids=["plain", "key", "short key"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda path: path.name)
def test_broken_file_loads_as_verify_says(tmp_path: Path, broken: Path, key: bytes | None) -> None:
    path = tmp_path / broken.name
    shutil.copyfile(broken, path)
    check_that_verify_and_load_agree(path, key)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda path: path.name)
def test_no_command_calls_a_broken_file_a_bug(tmp_path: Path, broken: Path) -> None:
    path = tmp_path / broken.name
    shutil.copyfile(broken, path)
    (tmp_path / "key").write_bytes(KEY[:16])
    (tmp_path / "key").chmod(0o600)
    is_encrypted = broken.name.startswith(("gcm", "cbc", "sm4"))
    key = ["--key", f"file:{tmp_path / 'key'}"] if is_encrypted else []
    target = ["-o", tmp_path / f"out{path.suffix}"]
    commands = (["verify"], ["inspect"], ["decrypt", *target], ["convert", "--compression", "zstd"])
    for command in commands:
        result = run(*command, path, *key)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "bug in ckptmgr" not in result.stderr, (command, result.stderr)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_directory_with_a_broken_file_is_resumed_from_the_one_before(
    tmp_path: Path, format: str
) -> None:
    with CheckpointManager(tmp_path, prefix="net") as manager:
        manager.save(1, {"w": np.ones(2)})
        manager.save(2, {"w": np.full(2, 2.0)})
    newest = next(path for path in tmp_path.iterdir() if path.name.startswith("net-2."))
    for broken in BROKEN:
        if broken.suffix != f".{format}":
            continue
        newest.chmod(0o600)
        newest.write_bytes(broken.read_bytes())
        with CheckpointManager(tmp_path, prefix="net") as manager:
            found = manager.resume()
        assert (found.step, len(found.skipped)) == (1, 1)


@pytest.mark.parametrize("name", ["ckpt", "safetensors", "container", "zstd"])
def test_fuzzed_file_loads_as_verify_says(tmp_path: Path, name: str) -> None:
    targets = pytest.importorskip("tools.fuzz.targets", reason="needs a checkout")
    target = next(one for one in targets.TARGETS if one.name == name)
    endings = {"container": ".safetensors.ckpe", "zstd": ".safetensors.ckpz"}
    path = tmp_path / f"net{endings.get(name, f'.{name}')}"
    key = KEY if name == "container" else None
    rng, seeds = Random(11), target.seeds()
    found = set()
    for number in range(FUZZED):
        seed = seeds[number % len(seeds)]
        path.write_bytes(seed if number < len(seeds) else target.mutate(rng, seed))
        found.add(check_that_verify_and_load_agree(path, key))
    assert api.Status.DAMAGED in found
    assert found & {api.Status.OK, api.Status.UNVERIFIED, api.Status.UNPROVEN}


def with_shape(shape: str) -> bytes:
    header = b'{"w":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % shape.encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "shape", ["8456394893526610284,0", "0,4611686018427387904", "0," * 64 + "0"]
)
def test_shape_that_no_array_can_have_is_refused_by_verify_and_by_every_reader(
    tmp_path: Path, shape: str
) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(with_shape(shape))
    assert check_that_verify_and_load_agree(path, None) is api.Status.UNREADABLE
    for command in (["verify"], ["inspect"], ["convert", "--compression", "zstd"]):
        result = run(*command, path)
        assert "no array has the shape" in result.output or "dimensions" in result.output
        assert result.exit_code != 0


def behind_a_link(path: Path) -> None:
    elsewhere = path.parent.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def of_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def of_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replaced", [behind_a_link, of_a_pipe, of_a_directory])
def test_link_or_other_thing_in_place_of_the_data_is_refused_by_verify_as_by_resume(
    tmp_path: Path, replaced: Callable[[Path], None]
) -> None:
    runs = tmp_path / "runs"
    with CheckpointManager(runs, prefix="net") as manager:
        manager.save(1, {"w": np.ones(2)})
        manager.save(2, {"w": np.ones(2)})
        newest = manager.latest()
    assert newest is not None
    path = newest.path
    replaced(path)
    result = run("verify", runs, "--json")
    assert (result.exit_code, "link or no regular file" in result.stdout) == (1, True)
    if not path.is_dir():  # which would be one to look for checkpoints in
        result = run("verify", path)
        assert (result.exit_code, "link or no regular file" in result.output) == (1, True)
    with pytest.raises(CorruptCheckpoint, match="link or no regular file"):
        load_checkpoint(path, format=path.suffix[1:])
    with pytest.raises(CorruptCheckpoint, match="link or no regular file"):
        open_checkpoint(path)
    with CheckpointManager(runs, prefix="net") as manager:
        with pytest.raises(CorruptCheckpoint, match="link or no regular file"):
            manager.load(2)
        found = manager.resume()
        assert (found.step, len(found.skipped)) == (1, 1)
        assert "link or no regular file" in found.skipped[0].reason


@pytest.mark.parametrize("replaced", [behind_a_link, of_a_pipe, of_a_directory])
def test_link_or_other_thing_in_place_of_the_manifest_is_damage_to_every_reader(
    tmp_path: Path, replaced: Callable[[Path], None]
) -> None:
    runs = tmp_path / "runs"
    with CheckpointManager(runs, prefix="net") as manager:
        manager.save(1, {"w": np.ones(2)})
        manager.save(2, {"w": np.ones(2)})
        newest = manager.latest()
    assert newest is not None
    path = newest.path
    replaced(runs / api.manifest_name(path.name))
    listed = json.loads(run("ls", runs, "--json").stdout)["items"]
    assert sorted(one["state"] for one in listed) == ["corrupt", "ok"]
    plan = run("prune", runs, "--keep", "last(1)", "--dry-run").stdout
    for said in (plan, run("verify", runs).stdout, run("inspect", path).stderr):
        assert "the manifest is a link or no regular file" in said
    assert run("diff", runs / "net-1.ckpt", path).exit_code == 2
    with pytest.raises(CorruptCheckpoint, match="the manifest is a link or no regular file"):
        load_checkpoint(path)
    with CheckpointManager(runs, prefix="net") as manager:
        found = manager.resume()
        assert (found.step, len(found.skipped)) == (1, 1)


def test_link_in_place_of_the_file_of_a_rank_is_refused_by_verify(tmp_path: Path) -> None:
    meeting = Meeting()

    def save(rank: int) -> None:
        seat = Seat(meeting, rank)
        with CheckpointManager(tmp_path / "runs", ranks=Ranks(seat), prefix="net") as manager:
            manager.save(1, {"w": np.full(2, float(rank))})

    assert [outcome.raised for outcome in run_ranks(meeting, save)] == [None] * WORLD
    behind_a_link(next((tmp_path / "runs").glob("*.0-of-*")))
    result = run("verify", tmp_path / "runs")
    assert (result.exit_code, "link or no regular file" in result.output) == (1, True)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_truth_values_in_memory_that_nobody_filled_are_saved_as_true(
    tmp_path: Path, format: str
) -> None:
    unfilled = np.frombuffer(bytes([0, 1, 2, 255] * 5000), np.uint8).view(np.bool_)
    path = save_checkpoint({"w": unfilled, "x": unfilled[:4]}, tmp_path / "net", format=format).path
    assert run("verify", path).exit_code == 0
    found = load_checkpoint(path, format=format)
    assert bytes(np.asarray(found["w"])) == bytes([0, 1, 1, 1] * 5000)
    assert bytes(np.asarray(found["x"])) == bytes([0, 1, 1, 1])


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_bool_of_two_in_a_file_that_somebody_vouches_for_is_named_by_verify(
    tmp_path: Path, key: bytes | None
) -> None:
    header = b'{"w":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}'
    path = tmp_path / "net-1.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x01\x02")
    assert check_that_verify_and_load_agree(path, None) is api.Status.DAMAGED
    digest = digest_of(BytesSource(path.read_bytes()))
    file = api.FileEntry(
        name=path.name, digest=digest, format="safetensors", cipher=None, key_id=None
    )
    described = replace(manifest(), file=file)
    ring = None if key is None else api.Key(key)
    (tmp_path / api.manifest_name(path.name)).write_bytes(
        api.encode_manifest(described, trust=api.Trust(keys=ring))
    )
    assert check_that_verify_and_load_agree(path, None) is api.Status.DAMAGED


def test_link_that_a_user_made_is_followed(tmp_path: Path) -> None:
    path = save_checkpoint({"w": np.ones(2)}, tmp_path / "net.ckpt").path
    (tmp_path / "latest.ckpt").symlink_to("net.ckpt")
    assert load_checkpoint(tmp_path / "latest.ckpt").keys() == {"w"}
    (tmp_path / "newest.ckpt").symlink_to("latest.ckpt")
    behind_a_link(path)
    with pytest.raises(CorruptCheckpoint, match="link or no regular file"):
        load_checkpoint(tmp_path / "newest.ckpt")
    (tmp_path / api.manifest_name("net.ckpt")).unlink()
    assert load_checkpoint(tmp_path / "newest.ckpt").keys() == {"w"}


def test_endless_link_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").symlink_to("a.ckpt")
    with pytest.raises(CkptmgrError, match="does not exist"):
        load_checkpoint(tmp_path / "a.ckpt")
