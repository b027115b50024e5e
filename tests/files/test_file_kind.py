# SPDX-License-Identifier: Apache-2.0
"""Files of another kind than their manifest says: the bytes that the digests of a container leave out hide no header."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptmgr import TamperedCheckpoint, load_checkpoint, open_checkpoint, save_checkpoint
from ckptmgr.files.load.plaintext import check_kind, check_mode
from ckptmgr.formats.detect import Kind
from ckptmgr.store.manifest.codec import PLACEHOLDER
from tests.support import api
from tests.support.manifests import manifest
from tests.support.saved import only, overwrite

KEY = api.Key(bytes(range(16)))
VALUES = {"w": np.arange(5000, dtype=np.float32)}
BLANK_BYTES = 8192


def save(directory: Path, *, key: api.Key | None, format: str, mode: str = "AES-GCM") -> Path:
    raw = None if key is None else key.raw
    saved = save_checkpoint(
        VALUES, directory / "net-1_10", format=format, enc_key=raw, enc_mode=mode
    )
    return saved.path


def verify(path: Path, level: api.Level, *, key: api.Key | None = None) -> api.Verification:
    store = api.place(path.parent, keys=key, allow_unencrypted=True)
    return api.verify(store, only(store), level=level, keys=key)


def plain_head(size_bytes: int) -> bytes:
    """Return the first 8192 bytes of a safetensors file of this size, with a tensor of four numbers."""
    content = np.full(4, 666, np.float32).tobytes()
    data_bytes = size_bytes - 1024
    header = json.dumps(
        {
            "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "rest": {"dtype": "U8", "shape": [data_bytes - 16], "data_offsets": [16, data_bytes]},
        }
    ).encode()
    head = (1016).to_bytes(8, "little") + header.ljust(1016) + content
    return head.ljust(BLANK_BYTES, b"\0")


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """An encrypted file whose header copies were replaced by the header of a plain file."""
    path = save(tmp_path, key=KEY, format="safetensors")
    data = path.read_bytes()
    overwrite(path, plain_head(len(data)) + data[BLANK_BYTES:])
    assert load_file(path)["w"].tolist() == [666] * 4
    return path


@pytest.mark.parametrize("level", api.Level)
@pytest.mark.parametrize("key", [None, KEY])
def test_plain_header_in_place_of_header_copies_is_damage(
    forged: Path, level: api.Level, key: api.Key | None
) -> None:
    answer = verify(forged, level, key=key)
    assert answer.status is api.Status.DAMAGED
    (problem,) = answer.problems
    assert "'safetensors', but was saved as safetensors, AES-GCM" in problem


def test_plain_header_in_place_of_header_copies_is_never_loaded(forged: Path) -> None:
    with pytest.raises(TamperedCheckpoint, match="was saved as safetensors, AES-GCM"):
        load_checkpoint(forged)
    with pytest.raises(TamperedCheckpoint, match="was saved as safetensors, AES-GCM"):
        open_checkpoint(forged)


def test_plain_header_in_place_of_header_copies_is_damage_though_signed(tmp_path: Path) -> None:
    signer = api.SigningKey.generate()
    path = save_checkpoint(
        VALUES, tmp_path / "net", format="safetensors", enc_key=KEY.raw, signing_key=signer
    ).path
    data = path.read_bytes()
    overwrite(path, plain_head(len(data)) + data[BLANK_BYTES:])
    store = api.place(tmp_path, trusted_keys=(signer.public_key,))
    options = api.reading(trusted_keys=(signer.public_key,))
    assert api.verify(store, only(store), options=options).status is api.Status.DAMAGED


@pytest.mark.parametrize(
    ("saved_as", "key", "mode", "claimed"),
    [
        ("ckpt", None, "AES-GCM", {"format": "safetensors"}),
        ("safetensors", None, "AES-GCM", {"format": "ckpt"}),
        ("ckpt", KEY, "AES-GCM", {"cipher": "AES-CBC"}),
        ("safetensors", KEY, "AES-GCM", {"cipher": "SM4-CBC"}),
        ("safetensors", None, "AES-GCM", {"cipher": "AES-GCM"}),
        ("ckpt", KEY, "AES-CBC", {"cipher": None}),
    ],
)
def test_file_of_another_kind_or_cipher_than_its_manifest_says_is_damaged(
    tmp_path: Path, saved_as: str, key: api.Key | None, mode: str, claimed: dict[str, str | None]
) -> None:
    path = save(tmp_path, key=key, format=saved_as, mode=mode)
    described = path.parent / api.manifest_name(path.name)
    document = json.loads(described.read_text())
    document["files"][0] |= claimed
    document.pop("auth", None)
    overwrite(described, json.dumps(document).encode())
    answer = verify(path, api.Level.QUICK)
    assert (answer.status, "was saved" in answer.problems[0]) == (api.Status.DAMAGED, True)


def test_manifest_that_was_made_for_a_bare_file_does_not_know_its_kind() -> None:
    made_up = replace(manifest(), why=PLACEHOLDER, sequence=0)
    check_kind(Kind.MINDSPORE_CKPT, made_up, path="x")
    check_mode("SM4-CBC", made_up, path="x")


def test_format_that_is_not_known_here_is_no_damage() -> None:
    known = manifest()
    newer = replace(known, file=replace(known.file, format="newer"))
    check_kind(Kind.MINDSPORE_CKPT, newer, path="x")
