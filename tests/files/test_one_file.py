# SPDX-License-Identifier: Apache-2.0
"""`manifest=False`: exactly one file, in which damage is found all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointManager,
    CkptmgrError,
    Resume,
    StoreLocked,
    UnsupportedCheckpoint,
    load_checkpoint,
    load_state,
    open_checkpoint,
    save_checkpoint,
    save_file,
    save_state,
)
from tests.cli.running import run
from tests.support import api
from tests.support.options import SIGNER
from tests.support.saved import overwrite

KEY = bytes(range(16))
STATE = {"w": np.arange(3.0), "n": [7, ("x", None)]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ckpt": ("s.ckpt", {}),
    "safetensors": ("s.safetensors", {}),
    "encrypted ckpt": ("s.ckpt", {"enc_key": KEY}),
    "container": ("s.safetensors", {"enc_key": KEY}),
    "compressed": ("s.safetensors", {"compression": "zstd"}),
    "other name": ("epoch=3-step=40.pt", {"format": "safetensors"}),
}
every_kind = pytest.mark.parametrize(("name", "options"), KINDS.values(), ids=KINDS)


def names(directory: Path) -> set[str]:
    """Return all names in a directory."""
    return {path.name for path in directory.iterdir()}


@every_kind
def test_state_without_a_manifest_is_one_file_that_loads(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = tmp_path / name
    saved = save_state(STATE, path, manifest=False, **options)
    assert (saved.path, saved.state) == (path, api.State.UNVERIFIED)
    assert names(tmp_path) == {name}
    found: Any = load_state(path, dec_key=options.get("enc_key"))
    assert (found["w"].tolist(), found["n"]) == ([0, 1, 2], [7, ("x", None)])
    path.unlink()
    assert names(tmp_path) == set()


@every_kind
def test_flipped_bit_of_a_file_without_manifest_is_an_error_or_changes_nothing(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path, wrong = tmp_path / name, []
    save_state({"w": np.arange(3.0), "n": 7}, path, manifest=False, **options)
    content = path.read_bytes()
    for at in range(0, len(content), max(1, len(content) // 60)):
        overwrite(path, content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        try:
            found: Any = load_state(path, dec_key=options.get("enc_key"))
        except CkptmgrError:
            continue
        if (found["w"].tolist(), found["n"]) != ([0, 1, 2], 7):
            wrong.append(at)
    assert not wrong


def test_plain_file_without_manifest_has_no_crc_only_on_request(tmp_path: Path) -> None:
    save_state(STATE, tmp_path / "a.safetensors", manifest=False)
    save_state(STATE, tmp_path / "b.safetensors", manifest=False, crc_check=False)
    assert b"crc_num" in (tmp_path / "a.safetensors").read_bytes()
    assert b"crc" not in (tmp_path / "b.safetensors").read_bytes()


def test_negative_scalar_is_saved_without_manifest_and_its_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_state({"n": np.array(-3)}, path, manifest=False)
    assert load_state(path) == {"n": np.array(-3)}
    content = path.read_bytes()
    overwrite(path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CkptmgrError):
        load_state(path)


def test_file_without_manifest_replaces_one_with_and_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "s.ckpt"
    for value, has_manifest in enumerate([True, False, False, True]):
        save_state({"n": value}, path, manifest=has_manifest)
        assert names(tmp_path) == {
            "s.ckpt",
            *([api.manifest_name("s.ckpt")] if has_manifest else []),
        }
        assert load_state(path) == {"n": value}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"step": 3}, "step"),
        ({"epoch": 3}, "epoch"),
        ({"metrics": {"loss": 0.5}}, "metrics"),
        ({"signing_key": SIGNER}, "signing_key"),
    ],
)
def test_what_goes_into_the_manifest_is_refused_without_one(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} goes into the manifest"):
        save_state(STATE, tmp_path / "s.ckpt", manifest=False, **options)
    assert names(tmp_path) == set()


def test_manifest_that_is_no_bool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="manifest"):
        save_state(STATE, tmp_path / "s.ckpt", manifest=None)  # type: ignore[arg-type]


def test_checkpoint_without_a_manifest_is_one_file_with_a_crc(tmp_path: Path) -> None:
    path = save_checkpoint({"w": np.ones(3)}, tmp_path / "n.ckpt", manifest=False).path
    assert names(tmp_path) == {"n.ckpt"}
    content = path.read_bytes()
    assert load_checkpoint(path, crc_check=True)["w"].tolist() == [1, 1, 1]
    assert content[-17:-10] == b"crc_num"
    with pytest.raises(ValueError, match=r"^global_step_num goes into the manifest"):
        save_checkpoint({"w": np.ones(3)}, path, manifest=False, global_step_num=3)
    save_checkpoint({"w": np.ones(3)}, path, manifest=False, crc_check=False)
    assert path.read_bytes() == content[:-17]


def test_library_file_without_a_manifest_has_the_bytes_of_the_library(tmp_path: Path) -> None:
    tensors = {"w": np.ones(3)}
    save_file(tensors, tmp_path / "a.safetensors", manifest=False)
    assert names(tmp_path) == {"a.safetensors"}
    save_file(tensors, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_commands_say_what_a_file_without_manifest_is(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "s.safetensors", manifest=False).path
    assert "unverified" in run("ls", tmp_path).output
    whole = run("verify", path)
    assert (whole.exit_code, "checked structure, CRC32" in whole.output) == (0, True)
    content = path.read_bytes()
    overwrite(path, content[:-1] + bytes([content[-1] ^ 1]))
    damaged = run("verify", path)
    assert (damaged.exit_code, "CRC32" in damaged.output) == (1, True)


def test_encrypted_file_without_manifest_is_verified_and_decrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K", "hex:" + KEY.hex())
    path = save_state(STATE, tmp_path / "s.ckpt", manifest=False, enc_key=KEY).path
    assert "no key was given" in run("verify", path).output
    checked = run("verify", path, "--key", "env:K", "--allow-unsealed")
    assert (checked.exit_code, "checked records, seal" in checked.output) == (0, True), checked
    plain = tmp_path / "plain.ckpt"
    assert run("decrypt", path, "-o", plain, "--key", "env:K").exit_code == 0
    found: Any = load_state(plain)
    assert found["n"] == STATE["n"]


def test_single_tensors_of_a_file_without_manifest_are_read(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "s.safetensors", manifest=False, enc_key=KEY).path
    with open_checkpoint(path, dec_key=KEY) as reader:
        assert [np.asarray(reader.read(name)).tolist() for name in reader.names()] == [[0, 1, 2]]


def test_run_does_not_resume_from_a_file_without_manifest_unless_asked(tmp_path: Path) -> None:
    save_state(STATE, tmp_path / "net-3_40.ckpt", manifest=False)
    with CheckpointManager(tmp_path, prefix="net") as manager:
        assert manager.resume(None, Resume(allow_bare=True)).checkpoint is not None


def test_file_without_manifest_is_not_written_while_another_process_writes_it(
    tmp_path: Path,
) -> None:
    with (
        api.place(tmp_path).lease("s.ckpt"),
        pytest.raises(StoreLocked),
    ):
        save_state(STATE, tmp_path / "s.ckpt", manifest=False)


def test_failed_save_without_manifest_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "s.safetensors", manifest=False).path
    with pytest.raises(UnsupportedCheckpoint):
        save_checkpoint({"crc_num": np.ones(3)}, path, format="safetensors", manifest=False)
    assert names(tmp_path) == {path.name}
    assert load_state(path, {"w": np.zeros(3), "n": [0, ("", None)]}) is not None
