# SPDX-License-Identifier: Apache-2.0
"""Decrypting and encrypting files: same bytes, no damage sealed over, no file left after an error."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import (
    CheckpointNotFound,
    ChecksumMismatch,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    StoreLocked,
    UnsafeWrite,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
)
from ckptmgr.formats.tensor import tensor_from_array
from ckptmgr.maintenance import convert
from ckptmgr.maintenance.convert_source import open_plaintext
from ckptmgr.maintenance.convert_target import private_mode
from tests.support import api
from tests.support.saved import GOLDEN_FILES, KEY, OTHER_KEY, flip, only, save_run, tree_of

WITH_KEY = api.reading(keys=KEY)
MODES = ("AES-GCM", "AES-CBC", "SM4-CBC")


def key_for(mode: str) -> api.Key:
    """Return a key that fits a mode."""
    return api.Key(bytes(range(16))) if mode == "SM4-CBC" else KEY


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_crc", [False, True], ids=["no crc", "crc"])
def test_decrypting_gives_byte_for_byte_what_a_plain_save_writes(
    tmp_path: Path, mode: str, has_crc: bool
) -> None:
    key = key_for(mode)
    sealed = api.SaveOptions(key=key, mode=mode, has_crc=has_crc)
    (source,) = save_run(tmp_path / "sealed", [10], options=sealed)
    (plain,) = save_run(tmp_path / "plain", [10], options=api.SaveOptions(has_crc=has_crc))
    (tmp_path / "out").mkdir()
    done = convert.decrypt_file(source, tmp_path / "out/x.ckpt", options=api.reading(keys=key))
    assert done.target.path.read_bytes() == plain.read_bytes()
    with open_plaintext(source, api.reading(keys=key)) as (plaintext, _):
        assert b"".join(map(bytes, plaintext.chunks())) == plain.read_bytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_crc", [False, True], ids=["no crc", "crc"])
def test_encrypting_and_decrypting_gives_the_input(
    tmp_path: Path, mode: str, has_crc: bool
) -> None:
    key = key_for(mode)
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(has_crc=has_crc))
    sealed = convert.encrypt_file(source, tmp_path / "s.ckpt", key=key, mode=mode).target
    again = convert.decrypt_file(sealed.path, tmp_path / "p.ckpt", options=api.reading(keys=key))
    assert again.target.path.read_bytes() == source.read_bytes()
    assert (sealed.cipher, sealed.key_id) == (mode, key.key_id)
    values = load_checkpoint(sealed.path, dec_key=key.raw, dec_mode=mode, crc_check=has_crc)
    assert values["net"] == "lenet"


@given(data=st.data())
def test_encrypted_pipe_opens_for_any_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size = data.draw(st.sampled_from([0, 1, 4096, (4 << 20) - 100, 9 << 20]))
    has_crc = data.draw(st.booleans())
    directory = tmp_path_factory.mktemp("pipe")
    content = [tensor_from_array("w", np.ones(size, np.uint8))]
    (source,) = save_run(directory, [10], options=api.SaveOptions(has_crc=has_crc), content=content)
    piped = directory / "piped.ckpt"
    piped.write_bytes(b"".join(map(bytes, convert.encrypted_chunks(source, key=KEY))))
    with open_plaintext(piped, WITH_KEY) as (plaintext, _):
        assert b"".join(map(bytes, plaintext.chunks())) == source.read_bytes()


@pytest.mark.parametrize("has_crc", [False, True], ids=["plain", "crc"])
def test_encrypted_pipe_takes_sm4_blocks_together(tmp_path: Path, has_crc: bool) -> None:
    content = [tensor_from_array("w", np.arange(9 << 18, dtype=np.int32))]
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(has_crc=has_crc), content=content)
    key, piped = key_for("SM4-CBC"), tmp_path / "piped.ckpt"
    chunks = convert.encrypted_chunks(source, key=key, mode="SM4-CBC")
    piped.write_bytes(b"".join(map(bytes, chunks)))
    with open_plaintext(piped, api.reading(keys=key)) as (plaintext, _):
        assert b"".join(map(bytes, plaintext.chunks())) == source.read_bytes()


def test_target_is_published_with_what_the_manifest_says(tmp_path: Path) -> None:
    (source,) = save_run(
        tmp_path / "runs",
        [25],
        options=api.SaveOptions(key=KEY),
        metrics={25: {"loss": 0.5}},
    )
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / source.name
    convert.decrypt_file(source, target, options=WITH_KEY)
    found = only(api.place(tmp_path / "out"))
    assert (found.series, found.step, found.epoch) == ("net", 25, 3)
    assert (dict(found.metrics), found.run_id) == ({"loss": 0.5}, "run-of-net")
    assert (found.cipher, found.key_id) == (None, None)
    assert api.verify(api.place(tmp_path / "out"), found).status is api.Status.OK


def test_target_beside_the_source_belongs_to_no_run(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [25], options=api.SaveOptions(key=KEY))
    target = convert.decrypt_file(source, tmp_path / "plain.ckpt", options=WITH_KEY).target
    assert (target.series, target.run_id) == ("plain", "")


def test_manifest_of_an_encrypted_target_is_authenticated(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10])
    target = convert.encrypt_file(source, tmp_path / "s.ckpt", key=KEY).target
    store = api.place(tmp_path, keys=KEY)
    assert store.read_manifest(target.name) is not None
    with pytest.raises(KeyProblem):
        api.place(tmp_path, keys=OTHER_KEY, allow_unencrypted=True).read_manifest(target.name)


def test_bare_file_keeps_its_step_from_the_name(tmp_path: Path) -> None:
    shutil.copy(GOLDEN_FILES / "slices_sync_crc.ckpt", tmp_path / "CKP-2_5.ckpt")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out/CKP-2_5.ckpt"
    found = convert.encrypt_file(tmp_path / "CKP-2_5.ckpt", target, key=KEY).target
    assert (found.series, found.epoch, found.step) == ("CKP", 2, 10)


def test_file_with_a_strange_name_has_step_0(tmp_path: Path) -> None:
    source = Path(shutil.copy(GOLDEN_FILES / "slices_sync_crc.ckpt", tmp_path / "weights.bin"))
    target = convert.encrypt_file(
        source, tmp_path / "s.ckpt", key=KEY, clock=lambda: 1_772_359_200.0
    ).target
    assert (target.step, target.saved_at.isoformat()) == (0, "2026-03-01T10:00:00+00:00")


def test_mindspore_file_without_seal_needs_permission(tmp_path: Path) -> None:
    source = Path(shutil.copy(GOLDEN_FILES / "cbc128.ckpt", tmp_path))
    key = api.Key(bytes(range(16)))
    with pytest.raises(UnsealedCheckpoint):
        convert.decrypt_file(source, tmp_path / "p.ckpt", options=api.reading(keys=key))
    allowed = api.reading(keys=key, allow_unencrypted=True)
    convert.decrypt_file(source, tmp_path / "p.ckpt", options=allowed)
    assert load_checkpoint(tmp_path / "p.ckpt")


def test_unsealed_file_with_manifest_is_checked_by_its_digests(tmp_path: Path) -> None:
    source = Path(shutil.copy(GOLDEN_FILES / "cbc128.ckpt", tmp_path / "net-1_1.ckpt"))
    adopt(source)
    allowed = api.reading(keys=api.Key(bytes(range(16))), allow_unencrypted=True)
    convert.decrypt_file(source, tmp_path / "p.ckpt", options=allowed)
    flip(source, 100)
    with pytest.raises(ChecksumMismatch):
        convert.decrypt_file(source, tmp_path / "q.ckpt", options=allowed)


def adopt(path: Path) -> None:
    """Give a bare file the manifest of an ordinary save."""
    from ckptmgr.formats.source import BytesSource
    from ckptmgr.io.digest import digest_of
    from ckptmgr.store.manifest import codec as manifests

    pass

    bare = only(api.place(path.parent))
    digest = digest_of(BytesSource(path.read_bytes()))
    file = api.FileEntry(name=path.name, digest=digest, format="ckpt", cipher="AES-CBC")
    manifest = api.Manifest(
        file=file, series="net", run_id="r", step=1, sequence=1, saved_at=bare.saved_at
    )
    api.manifest_of(path).write_bytes(manifests.encode(manifest))


def test_input_that_is_not_encrypted_is_refused(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10])
    allowed = api.reading(keys=KEY, allow_unencrypted=True)
    with pytest.raises(UnsupportedCheckpoint, match="not encrypted"):
        convert.decrypt_file(source, tmp_path / "p.ckpt", options=allowed)


def test_encrypted_input_is_not_encrypted_again(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    with pytest.raises(UnsupportedCheckpoint, match="encrypted already"):
        convert.encrypt_file(source, tmp_path / "s.ckpt", key=KEY)


def test_key_of_the_wrong_length_is_a_key_problem(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10])
    with pytest.raises(KeyProblem):
        convert.encrypt_file(source, tmp_path / "s.ckpt", key=KEY, mode="SM4-CBC")
    assert not (tmp_path / "s.ckpt").exists()


@pytest.mark.parametrize("damage", ["content", "crc", "structure"])
def test_damaged_input_is_never_sealed(tmp_path: Path, damage: str) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(has_crc=True))
    (tmp_path / api.manifest_name(source.name)).unlink()
    offset = {"content": 60, "crc": -1, "structure": 0}[damage]
    flip(source, offset)
    before = tree_of(tmp_path)
    with pytest.raises(CorruptCheckpoint):
        convert.encrypt_file(source, tmp_path / "s.ckpt", key=KEY)
    with pytest.raises(CorruptCheckpoint):
        list(convert.encrypted_chunks(source, key=KEY))
    assert {name: state[0] for name, state in tree_of(tmp_path).items()} == {
        name: state[0] for name, state in before.items()
    }


def test_damaged_input_is_found_by_its_digest_where_it_has_no_crc(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10])
    flip(source, 60)
    with pytest.raises(ChecksumMismatch):
        convert.encrypt_file(source, tmp_path / "s.ckpt", key=KEY)
    assert not (tmp_path / "s.ckpt").exists()


@given(data=st.data())
def test_tampered_file_gives_no_wrong_byte(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("tampered")
    (source,) = save_run(directory, [10], options=api.SaveOptions(key=KEY, has_crc=True))
    (plain,) = save_run(directory / "plain", [10], options=api.SaveOptions(has_crc=True))
    flip(source, data.draw(st.integers(0, source.stat().st_size - 1)))
    came_out: list[bytes] = []
    with pytest.raises(CkptmgrError):
        take_plaintext(source, came_out)
    assert b"".join(came_out) in plain.read_bytes()
    with pytest.raises(CkptmgrError):
        convert.decrypt_file(source, directory / "out.ckpt", options=WITH_KEY)
    assert not (directory / "out.ckpt").exists()


def take_plaintext(source: Path, into: list[bytes]) -> None:
    """Decrypt as a pipe does, and keep what came out before an error."""
    with open_plaintext(source, WITH_KEY) as (plaintext, _):
        into.extend(bytes(chunk) for chunk in plaintext.chunks())


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to], ids=["symlink", "hard link"])
def test_target_that_is_the_input_is_refused_even_with_force(tmp_path: Path, link: object) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    alias = tmp_path / "alias.ckpt"
    assert callable(link)
    link(alias, source)
    for target in (source, alias):
        with pytest.raises(UnsafeWrite, match="the input itself"):
            convert.decrypt_file(source, target, options=WITH_KEY, force=True)


def test_existing_target_needs_force(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    target = tmp_path / "out.ckpt"
    target.write_bytes(b"precious")
    with pytest.raises(UnsafeWrite, match="exists"):
        convert.decrypt_file(source, target, options=WITH_KEY)
    assert target.read_bytes() == b"precious"
    convert.decrypt_file(source, target, options=WITH_KEY, force=True)
    assert load_checkpoint(target)


@pytest.mark.parametrize("is_link", [False, True])
def test_target_that_is_a_pipe_or_a_device_is_never_replaced(
    tmp_path: Path, *, is_link: bool
) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with pytest.raises(UnsafeWrite, match="a device or a pipe"):
        convert.decrypt_file(source, link if is_link else pipe, options=WITH_KEY, force=True)
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    (tmp_path / "out.ckpt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnsafeWrite, match="exists"):
        convert.decrypt_file(source, tmp_path / "out.ckpt", options=WITH_KEY)


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    with pytest.raises(CheckpointNotFound, match="no such directory"):
        convert.decrypt_file(source, tmp_path / "no/out.ckpt", options=WITH_KEY)
    with pytest.raises(CheckpointNotFound, match="no such file"):
        convert.decrypt_file(tmp_path / "no.ckpt", tmp_path / "out.ckpt", options=WITH_KEY)
    with pytest.raises(UnsafeWrite, match="name of a manifest"):
        convert.decrypt_file(source, tmp_path / "x.manifest.json", options=WITH_KEY)
    with pytest.raises(UnsafeWrite, match="exists"):
        convert.decrypt_file(source, tmp_path, options=WITH_KEY, force=True)


@pytest.mark.parametrize(
    ("input_mode", "expected"), [(0o400, 0o400), (0o644, 0o600), (0o444, 0o400), (0o040, 0o400)]
)
def test_target_is_private_and_never_wider_than_the_input(
    tmp_path: Path, input_mode: int, expected: int
) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    source.chmod(input_mode)
    assert private_mode(source) == expected
    if os.access(source, os.R_OK):
        convert.decrypt_file(source, tmp_path / "out.ckpt", options=WITH_KEY)
        assert stat.S_IMODE((tmp_path / "out.ckpt").stat().st_mode) == expected


def test_series_that_a_run_writes_is_left_alone(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path / "a", [10], options=api.SaveOptions(key=KEY))
    save_run(tmp_path / "b", [20])
    with (
        api.place(tmp_path / "b").lease("net"),
        pytest.raises(StoreLocked),
    ):
        convert.decrypt_file(source, tmp_path / "b" / source.name, options=WITH_KEY)
    convert.decrypt_file(source, tmp_path / "b" / source.name, options=WITH_KEY)
    assert len(api.listed(tmp_path / "b")) == 2


def test_target_that_somebody_else_writes_is_left_alone(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    target = tmp_path / "out.ckpt"
    with api.place(tmp_path).lease(target.name), pytest.raises(StoreLocked):
        convert.decrypt_file(source, target, options=WITH_KEY, force=True)
    assert not target.exists()
    convert.decrypt_file(source, target, options=WITH_KEY)
    assert load_checkpoint(target)


def test_target_without_an_ending_is_written_and_its_lease_removed(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path / "a", [10], options=api.SaveOptions(key=KEY))
    (tmp_path / "out").mkdir()
    convert.decrypt_file(source, tmp_path / "out/plain", options=WITH_KEY)
    convert.decrypt_file(source, tmp_path / "out/plain", options=WITH_KEY, force=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "plain",
        api.manifest_name("plain"),
    }


@pytest.mark.parametrize("force", [False, True])
def test_target_that_appears_during_the_conversion_needs_force(tmp_path: Path, force: bool) -> None:
    source = Path(shutil.copy(GOLDEN_FILES / "slices_sync_crc.ckpt", tmp_path / "weights.bin"))
    target = tmp_path / "out.ckpt"

    def clock() -> float:
        target.write_bytes(b"precious")
        return 0.0

    if force:
        convert.encrypt_file(source, target, key=KEY, force=True, clock=clock)
        assert load_checkpoint(target, dec_key=KEY.raw)
        return
    with pytest.raises(UnsafeWrite, match="exists"):
        convert.encrypt_file(source, target, key=KEY, clock=clock)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        source.name: source.read_bytes(),
        target.name: b"precious",
    }


def test_no_lease_file_is_left_where_nobody_writes_a_series(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path / "a", [10], options=api.SaveOptions(key=KEY))
    (tmp_path / "out").mkdir()
    convert.decrypt_file(source, tmp_path / "out" / source.name, options=WITH_KEY)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {source.name, api.manifest_name(source.name)}


def test_key_never_stands_in_a_manifest(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10])
    convert.encrypt_file(source, tmp_path / "s.ckpt", key=KEY)
    text = (tmp_path / api.manifest_name("s.ckpt")).read_text()
    assert KEY.raw.hex() not in text
    assert json.loads(text)["auth"]["key_id"] == KEY.key_id


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for size_mib in (64, 192):
        directory = tmp_path / str(size_mib)
        content = [tensor_from_array("w", np.zeros(size_mib << 20, np.uint8))]
        (source,) = save_run(directory, [10], options=api.SaveOptions(key=KEY), content=content)
        tracemalloc.start()
        convert.decrypt_file(source, directory / "p.ckpt", options=WITH_KEY)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        shutil.rmtree(directory)
    assert peaks[1] < peaks[0] + (8 << 20)
