# SPDX-License-Identifier: Apache-2.0
"""What `verify` says about whole, damaged, encrypted and foreign files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import (
    ChecksumMismatch,
    CorruptCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.formats.file_crc import TRAILER_BYTES, encode_trailer
from ckptmgr.formats.tensor import MapTensors, tensor_from_array
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.saved import GOLDEN_FILES, KEY, OTHER_KEY, flip, items, only, overwrite, save_run

SEALED = api.SaveOptions(key=KEY, has_crc=True)
PLAIN_CRC = api.SaveOptions(has_crc=True)
WITH_KEY = api.reading(keys=KEY)


def verify(
    path: Path,
    *,
    level: api.Level = api.Level.FULL,
    options: api.ReadOptions | None = None,
    strict: bool = True,
) -> api.Verification:
    """Verify one file of a directory."""
    key = None if options is None else options.trust.keys
    store = api.place(path.parent, keys=key, allow_unencrypted=not strict)
    (checkpoint,) = [c for c in store.scan() if c.path == path]
    return api.verify(store, checkpoint, level=level, options=options)


def bare(tmp_path: Path, name: str) -> Path:
    """Return a copy of a file of the real MindSpore, alone in a directory."""
    return Path(shutil.copy(GOLDEN_FILES / name, tmp_path))


def test_saved_file_is_ok_and_names_all_checks(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=PLAIN_CRC)
    answer = verify(path, level=api.Level.DEEP)
    assert answer.status is api.Status.OK
    assert answer.checked == (
        "manifest",
        "size",
        "digests",
        "structure",
        "CRC32",
        "every tensor",
    )
    assert not answer.unchecked


def test_quick_level_does_not_see_a_flipped_content_bit_and_does_not_claim_to(
    tmp_path: Path,
) -> None:
    (path,) = save_run(tmp_path, [10])
    flip(path, 60)
    answer = verify(path, level=api.Level.QUICK)
    assert answer.status is api.Status.OK
    assert answer.checked == ("manifest", "size", "structure")
    assert verify(path).status is api.Status.DAMAGED


def test_safetensors_with_crc_is_ok(tmp_path: Path) -> None:
    (path,) = save_run(
        tmp_path,
        [10],
        options=api.SaveOptions(format="safetensors", has_crc=True),
        content=items()[:1],
    )
    answer = verify(path)
    assert (answer.status, answer.checked[-1]) == (api.Status.OK, "CRC32")


@pytest.mark.parametrize(
    "options", [api.SaveOptions(), PLAIN_CRC, SEALED], ids=["plain", "crc", "key"]
)
@given(data=st.data())
def test_any_flipped_bit_is_damage(
    tmp_path_factory: pytest.TempPathFactory, options: api.SaveOptions, data: st.DataObject
) -> None:
    (path,) = save_run(tmp_path_factory.mktemp("run"), [10], options=options)
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    answer = verify(path, options=api.reading(keys=options.key))
    assert answer.status is api.Status.DAMAGED
    assert "do not match the digest" in answer.problems[0]


def test_sealed_file_with_its_key_is_ok(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=SEALED)
    answer = verify(path, options=WITH_KEY)
    assert answer.status is api.Status.OK
    assert {"records", "seal", "cipher blocks", "CRC32"} <= set(answer.checked)


def test_sealed_file_without_key_is_partial_and_says_what_is_missing(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=SEALED)
    answer = verify(path)
    assert answer.status is api.Status.PARTIAL
    assert answer.checked == ("manifest", "size", "digests", "records")
    assert answer.unchecked == ("seal and contents: encrypted (AES-GCM), and no key was given",)


def test_sealed_file_without_key_passes_the_quick_level(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=SEALED)
    answer = verify(path, level=api.Level.QUICK)
    assert (answer.status, len(answer.unchecked)) == (api.Status.OK, 1)


def test_quick_level_with_key_opens_the_seal(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=SEALED)
    answer = verify(path, level=api.Level.QUICK, options=WITH_KEY)
    assert (answer.status, answer.checked[-1]) == (api.Status.OK, "seal")


def test_wrong_key_is_told_from_damage(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=SEALED)
    manifest = api.manifest_of(path)
    manifest.unlink()
    assert verify(path, options=api.reading(keys=OTHER_KEY)).status is api.Status.WRONG_KEY


def test_manifest_under_another_key_is_a_wrong_key(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=SEALED)
    answer = verify(path, options=api.reading(keys=OTHER_KEY))
    assert answer.status is api.Status.WRONG_KEY
    assert KEY.key_id in answer.problems[0]


def test_plain_file_with_a_key_is_unproven_unless_allowed(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    answer = verify(path, options=WITH_KEY)
    assert answer.status is api.Status.UNPROVEN
    assert answer.hint is not None
    assert "--allow-unencrypted" in answer.hint
    allowed = api.reading(keys=KEY, allow_unencrypted=True)
    assert verify(path, options=allowed, strict=False).status is api.Status.OK


def test_changed_metric_in_an_authenticated_manifest_is_damage(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=SEALED, metrics={10: {"loss": 0.5}})
    manifest = api.manifest_of(path)
    overwrite(manifest, manifest.read_bytes().replace(b"0.5", b"0.1"))
    answer = verify(path, options=WITH_KEY)
    assert answer.status is api.Status.DAMAGED
    assert "authentication does not match" in answer.problems[0]


def test_truncated_file_is_damage_at_every_level(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    overwrite(path, path.read_bytes()[:-1])
    for level in api.Level:
        answer = verify(path, level=level)
        assert answer.status is api.Status.DAMAGED
        assert "but the manifest says" in answer.problems[0]


def test_unparsable_manifest_is_damage(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    overwrite(api.manifest_of(path), b"{")
    assert verify(path).status is api.Status.DAMAGED


def test_several_damaged_ranges_are_counted(tmp_path: Path) -> None:
    big = tensor_from_array("w", np.zeros(34 << 20, np.uint8))
    (path,) = save_run(tmp_path, [10], content=[big])
    for offset in (100, 17 << 20):
        flip(path, offset)
    assert verify(path).problems[0].endswith("manifest (and 1 more ranges)")


def test_deep_level_counts_nan_and_inf(tmp_path: Path) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1], ml_dtypes.bfloat16)
    (path,) = save_run(tmp_path, [10], content=[tensor_from_array("w", values), *items()])
    answer = verify(path, level=api.Level.DEEP)
    assert (answer.status, dict(answer.nonfinite)) == (api.Status.OK, {"w": (1, 2)})
    assert not verify(path).nonfinite


def test_deep_level_reads_the_parts_of_a_map(tmp_path: Path) -> None:
    parts = [tensor_from_array(name, np.full(2, np.nan, np.float32)) for name in ("k", "v", "s")]
    table = MapTensors(name="table", key=parts[0], value=parts[1], status=parts[2])
    (path,) = save_run(tmp_path, [10], content=[table])
    found = verify(path, level=api.Level.DEEP).nonfinite
    assert set(found) == {"table.key", "table.value", "table.status"}


def test_bare_file_without_checksum_is_unverified(tmp_path: Path) -> None:
    answer = verify(bare(tmp_path, "ckpt_all_dtypes.ckpt"))
    assert answer.status is api.Status.UNVERIFIED
    assert answer.unchecked == ("contents: no manifest, no CRC32",)


def test_bare_file_with_crc_is_ok_but_not_by_the_quick_level(tmp_path: Path) -> None:
    path = bare(tmp_path, "slices_sync_crc.ckpt")
    assert verify(path).status is api.Status.OK
    assert verify(path, level=api.Level.QUICK).status is api.Status.UNVERIFIED


def test_bare_file_with_wrong_crc_is_damage(tmp_path: Path) -> None:
    answer = verify(bare(tmp_path, "broken/crc_flip_payload.ckpt"))
    assert answer.status is api.Status.DAMAGED
    assert "CRC32" in answer.problems[0]


def test_unsealed_mindspore_file_needs_permission(tmp_path: Path) -> None:
    path = bare(tmp_path, "gcm_pad16.ckpt")
    key = golden_key("gcm_pad16.ckpt")
    refused = verify(path, options=api.reading(keys=key))
    assert refused.status is api.Status.UNSEALED
    allowed = verify(path, options=api.reading(keys=key, allow_unsealed=True), strict=False)
    assert allowed.status is api.Status.UNVERIFIED
    assert "no seal" in allowed.unchecked[0]


def golden_key(name: str) -> api.Key:
    """Return the key a golden file was saved with."""
    document = json.loads((GOLDEN_FILES / "manifest.json").read_text())
    (case,) = [case for case in document["files"] if case["file"] == name]
    return api.Key(bytes.fromhex(case["save"]["enc_key"]))


CRASHERS = (
    "content_odd.ckpt",
    "content_short.ckpt",
    "dims_huge.ckpt",
    "dims_zero2_with_content.ckpt",
    "dup_adjacent_types_differ.ckpt",
    "dup_not_adjacent.ckpt",
    "flip_type.ckpt",
    "truncated_mid_first.ckpt",
    "zeros.ckpt",
)


@pytest.mark.parametrize("name", CRASHERS)
def test_file_that_mindspore_misreads_or_crashes_on_is_not_passed(
    tmp_path: Path, name: str
) -> None:
    answer = verify(bare(tmp_path, f"broken/{name}"), level=api.Level.QUICK)
    assert answer.status in (api.Status.DAMAGED, api.Status.UNREADABLE)


def test_torch_file_is_unreadable_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "net-1_1.ckpt"
    path.write_bytes(b"PK\x03\x04" + bytes(40))
    answer = verify(path)
    assert (answer.status, "torch.save" in answer.problems[0]) == (api.Status.UNREADABLE, True)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errno.EIO, api.Status.DAMAGED),
        (errno.EMFILE, api.Status.UNREADABLE),
        (errno.ESTALE, api.Status.UNREADABLE),
        (errno.EACCES, api.Status.UNREADABLE),
    ],
)
def test_disk_that_goes_on_failing_is_damage_only_where_the_bytes_are_lost(
    error: int, status: api.Status
) -> None:
    model, directory = ModelDisk(), Path("/runs")
    save_run(directory, [10], fs=model)
    checkpoint = only(api.place(directory, fs=model))
    failing = FailingDisk(model, error=error, operation="read_into", call=2, is_lasting=True)
    answer = api.verify(api.place(directory, fs=failing), checkpoint)
    assert (answer.status, os.strerror(error) in answer.problems[0]) == (status, True)


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.ENOMEM])
def test_error_that_passes_is_none(error: int) -> None:
    model, directory = ModelDisk(), Path("/runs")
    save_run(directory, [10], fs=model)
    checkpoint = only(api.place(directory, fs=model))
    failing = FailingDisk(model, error=error, operation="read_into", call=2)
    answer = api.verify(api.place(directory, fs=failing), checkpoint)
    assert (answer.status, failing.has_failed) == (api.Status.OK, True)


def test_vanished_file_is_missing(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    store = api.place(tmp_path)
    checkpoint = only(store)
    path.unlink()
    assert api.verify(store, checkpoint).status is api.Status.MISSING


class ChangedBeforeOpening(api.OsFileSystem):
    """A disk on which somebody does something whenever a file is about to be opened, as often as given."""

    def __init__(self, path: Path, *changes: Callable[[], object]) -> None:
        super().__init__()
        self._path = path
        self._changes = list(changes)

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        if path == self._path and self._changes:
            self._changes.pop(0)()
        return super().open(path, is_uncached=is_uncached)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("options", [api.SaveOptions(), SEALED], ids=["plain", "key"])
def test_file_that_is_replaced_after_its_manifest_was_read_is_checked_with_the_new_one(
    tmp_path: Path, options: api.SaveOptions, times: int
) -> None:
    (path,) = save_run(tmp_path, [10], options=options)

    def save_again(seed: float) -> None:
        save_run(tmp_path, [10], options=options, content=items(seed))

    changes = [partial(save_again, seed) for seed in (0.5, 0.25)[:times]]
    store = api.place(
        tmp_path,
        fs=ChangedBeforeOpening(path, *changes),
        keys=options.key,
        allow_unencrypted=True,
    )
    answer = api.verify(store, only(store), keys=options.key)
    assert (answer.status, answer.problems) == (api.Status.OK, ())


def test_damage_to_a_file_that_replaced_another_one_is_told(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])

    def save_damaged() -> None:
        save_run(tmp_path, [10], content=items(0.5))
        flip(path, 60)

    store = api.place(tmp_path, fs=ChangedBeforeOpening(path, save_damaged))
    answer = api.verify(store, only(store))
    assert (answer.status, len(answer.problems)) == (api.Status.DAMAGED, 1)


def test_manifest_that_gets_damaged_meanwhile_leaves_the_first_answer(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])

    def damage_both() -> None:
        flip(path, 60)
        overwrite(api.manifest_of(path), b"{")

    store = api.place(tmp_path, fs=ChangedBeforeOpening(path, damage_both))
    answer = api.verify(store, only(store))
    assert answer.status is api.Status.DAMAGED
    assert "do not match the digest" in answer.problems[0]


def test_checkpoint_that_is_removed_meanwhile_is_unreadable_not_damaged(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])

    def remove() -> None:
        path.unlink()
        api.manifest_of(path).unlink()

    flip(path, 60)
    store = api.place(tmp_path, fs=ChangedBeforeOpening(path, remove))
    answer = api.verify(store, only(store))
    assert answer.status is api.Status.UNREADABLE
    assert "No such file" in answer.problems[0]


@given(data=st.binary(max_size=200))
def test_no_bytes_make_it_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    directory = tmp_path_factory.mktemp("any")
    path = directory / "net-1_1.ckpt"
    path.write_bytes(data)
    for options in (None, api.reading(keys=KEY, allow_unencrypted=True)):
        for level in api.Level:
            assert (
                verify(path, level=level, options=options, strict=False).status is not api.Status.OK
            )


@pytest.mark.parametrize("offset", [5 << 20, 17 << 20, 20 << 20])
@pytest.mark.parametrize("options", [PLAIN_CRC, SEALED], ids=["crc", "key"])
def test_large_file_without_manifest_is_checked_to_its_end(
    tmp_path: Path, options: api.SaveOptions, offset: int
) -> None:
    content = [tensor_from_array("w", np.arange(21 << 18, dtype=np.int32))]
    (path,) = save_run(tmp_path, [10], options=options, content=content)
    only_file = tmp_path / "alone" / path.name
    only_file.parent.mkdir()
    shutil.copy(path, only_file)
    reading = api.reading(keys=options.key)
    whole = api.Status.OK if options.key is None else api.Status.UNPROVEN
    assert verify(only_file, options=reading).status is whole
    flip(only_file, offset)
    assert verify(only_file, options=reading).status is api.Status.DAMAGED


def test_unsealed_file_of_others_is_decrypted_to_its_end(tmp_path: Path) -> None:
    path = bare(tmp_path, "gcm_all_dtypes.ckpt")
    reading = api.reading(keys=api.Key(bytes(range(0x20, 0x40))), allow_unencrypted=True)
    assert verify(path, options=reading, strict=False).status is api.Status.UNVERIFIED
    flip(path, path.stat().st_size - 1)
    assert verify(path, options=reading, strict=False).status is api.Status.WRONG_KEY


def bare_with_crc(tmp_path: Path, values: dict[str, np.ndarray]) -> Path:
    """Return a `.ckpt` with a CRC32 that has no manifest."""
    path = save_checkpoint(values, tmp_path / "net-1_10.ckpt", crc_check=True).path
    (tmp_path / api.manifest_name(path.name)).unlink()
    return path


def every_flip(path: Path) -> Iterator[int]:
    """Yield after each change of one bit of a file, which is undone afterwards."""
    data = path.read_bytes()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        overwrite(path, bytes(damaged))
        yield bit
    overwrite(path, data)


@pytest.mark.slow
def test_one_flipped_bit_anywhere_in_a_bare_file_with_crc_is_damage_to_verify_and_load(
    tmp_path: Path,
) -> None:
    values = {"w": np.ones((), np.float32), "on": np.array(True)}
    path = bare_with_crc(tmp_path, values)
    into = {name: np.zeros_like(value) for name, value in values.items()}
    for bit in every_flip(path):
        assert verify(path).status is api.Status.DAMAGED, bit
        with pytest.raises(CorruptCheckpoint):
            load_checkpoint(path, crc_check=True)
        with pytest.raises(CorruptCheckpoint):
            load_checkpoint(path, crc_check=True, into=into)


def test_unknown_element_type_is_damage_only_where_the_crc_says_so(tmp_path: Path) -> None:
    path = bare_with_crc(tmp_path, {"w": np.ones(2, np.float32)})
    unknown = path.read_bytes().replace(b"\x07Float32", b"\x07Float99", 1)
    overwrite(path, unknown)
    assert verify(path).status is api.Status.DAMAGED
    with pytest.raises(ChecksumMismatch, match="the CRC32 is 0x"):
        load_checkpoint(path)
    overwrite(path, unknown[:-TRAILER_BYTES] + encode_trailer(zlib.crc32(unknown[:-TRAILER_BYTES])))
    assert verify(path).status is api.Status.UNREADABLE
    with pytest.raises(UnsupportedCheckpoint, match="unknown element type 'Float99'"):
        load_checkpoint(path)
    overwrite(path, unknown[:-TRAILER_BYTES])
    assert verify(path).status is api.Status.UNREADABLE
