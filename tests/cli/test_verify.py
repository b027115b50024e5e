# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr verify`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import save_state
from ckptmgr.formats.tensor import tensor_from_array
from ckptmgr.io.temp_names import temp_name
from tests.cli.running import key_file, run, run_json
from tests.support import api
from tests.support.saved import (
    GOLDEN_FILES,
    KEY,
    OTHER_KEY,
    flip,
    only,
    overwrite,
    save_run,
    tree_of,
)


def test_whole_run_is_ok_and_only_the_result_is_written(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20], options=api.SaveOptions(has_crc=True))
    before = tree_of(tmp_path)
    result = run("verify", tmp_path)
    assert (result.exit_code, result.stdout) == (
        0,
        "ok          net-1_10.ckpt  checked manifest, size, digests, structure, CRC32\n"
        "ok          net-2_10.ckpt  checked manifest, size, digests, structure, CRC32\n"
        "2 checkpoints (full): 2 ok\n",
    )
    folder = str(tmp_path / ".ckptmgr-checks")
    after = {name: one for name, one in tree_of(tmp_path).items() if not name.startswith(folder)}
    assert {**after, str(tmp_path): None} == {**before, str(tmp_path): None}


def test_damage_exits_1_and_names_place_and_way_out(tmp_path: Path) -> None:
    first, second = save_run(tmp_path, [10, 20])
    flip(second, 70)
    result = run("verify", "--dir", tmp_path)
    assert result.exit_code == 1
    assert "damaged     net-2_10.ckpt: the bytes 0.." in result.stdout
    assert "  hint: the file was damaged" in result.stdout
    assert run("verify", "-q", tmp_path).stdout == f"{second}\n"
    assert run("verify", first).exit_code == 0


def test_levels_are_named_and_deep_counts_nan(tmp_path: Path) -> None:
    content = [tensor_from_array("w", np.array([np.nan, 1], np.float32))]
    (path,) = save_run(tmp_path, [10], content=content)
    assert "1 checkpoint (quick): 1 ok" in run("verify", path, "--quick").stdout
    deep = run("verify", path, "--deep")
    assert (deep.exit_code, "w has 1 NaN, 0 Inf" in deep.stdout) == (0, True)


def test_encrypted_run_without_key_is_partly_checked(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [10], options=api.SaveOptions(key=KEY))
    result = run("verify", tmp_path / "runs")
    assert result.exit_code == 3
    assert "checked manifest, size, digests, records; not checked: seal and contents" in (
        result.stdout
    )
    assert run("verify", tmp_path / "runs", "--quick").exit_code == 0
    assert run("verify", tmp_path / "runs", "--key", key_file(tmp_path)).exit_code == 0


def test_key_from_the_environment_is_used(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [10], options=api.SaveOptions(key=KEY))
    by_value = {"CKPTMGR_KEY": KEY.raw.hex()}
    assert run("verify", tmp_path / "runs", env=by_value).exit_code == 0
    other = key_file(tmp_path, hex_digits=OTHER_KEY.raw.hex()).removeprefix("file:")
    both = {**by_value, "CKPTMGR_KEY_FILE": other}
    assert run("verify", tmp_path / "runs", env=both).exit_code == 12


@pytest.mark.parametrize("key", [KEY, OTHER_KEY], ids=["plain file", "other key"])
def test_refusals_have_their_codes(tmp_path: Path, key: object) -> None:
    options = api.SaveOptions() if key is KEY else api.SaveOptions(key=KEY)
    save_run(tmp_path / "runs", [10], options=options)
    source = key_file(tmp_path, hex_digits=getattr(key, "raw", b"").hex())
    result = run("verify", tmp_path / "runs", "--key", source)
    assert result.exit_code == (13 if key is KEY else 12)


def test_worst_answer_decides_the_code(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    save_run(tmp_path, [20], options=api.SaveOptions(key=KEY))
    (tmp_path / "net-3_10.ckpt").write_bytes(b"PK\x03\x04 torch")
    assert run("verify", tmp_path).exit_code == 2
    flip(path, 70)
    assert run("verify", tmp_path).exit_code == 1


def test_bare_directory_is_checked_as_far_as_it_can_be(tmp_path: Path) -> None:
    for name in ("ckpt_all_dtypes.ckpt", "slices_sync_crc.ckpt", "st_all_dtypes.safetensors"):
        shutil.copy(GOLDEN_FILES / name, tmp_path)
    document = run_json("verify", tmp_path, "--deep")
    assert document["schema"] == "ckptmgr.verify/1"
    assert document["summary"] == {
        "level": "deep",
        "count": 3,
        "statuses": {"ok": 1, "unverified": 2},
        "missing": [],
        "bundles": [],
        "quarantined": [],
    }
    assert {item["status"]: item["unchecked"] for item in document["items"]} == {
        "ok": [],
        "unverified": ["contents: no manifest, no CRC32"],
    }


def test_json_of_damage_says_what_and_where(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    (tmp_path / api.manifest_name(path.name)).unlink()
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size - 3)
    result = run("verify", path, "--json")
    assert result.exit_code == 1
    assert '"status": "damaged"' in result.stdout
    assert '"problems": ["' in result.stdout


def test_all_files_of_a_directory_name_its_checkpoints_once(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    shown = run("verify", *sorted(tmp_path.glob("net*")))
    assert shown.exit_code == 0
    assert shown.stdout.endswith("2 checkpoints (full): 2 ok\n")


def test_selected_checkpoint_is_verified_once(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    items = run_json("verify", "20", "latest", "10..20", "--dir", tmp_path)["items"]
    assert [item["step"] for item in items] == [20, 10]


def test_named_file_that_is_no_checkpoint_is_damaged(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    result = run("verify", other)
    assert result.exit_code == 1
    assert result.stdout.startswith("damaged     notes.txt: ")


def test_notes_of_a_run_among_its_files_are_passed_over(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    for name in (".net.starts", ".net.lease"):
        (tmp_path / name).write_text("{}")
    (tmp_path / ".ckptmgr-trash").mkdir()
    names = [path for path in tmp_path.iterdir() if not path.name.endswith(".json")]
    assert run("verify", *names).stdout.endswith("1 checkpoint (full): 1 ok\n")
    alone = run("verify", tmp_path / ".net.lease")
    assert (alone.exit_code, "this is no checkpoint" in alone.stderr) == (10, True)


def test_foreign_directory_is_told_what_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = run("verify", tmp_path)
    assert result.exit_code == 10
    assert "hint: files that end in .ckpt, " in result.stderr


def test_directory_of_leftovers_is_told_how_to_list_them(tmp_path: Path) -> None:
    (tmp_path / temp_name("net-1_10.ckpt", token="dead-1", series="net")).touch()
    assert f"hint: ckptmgr ls --all {tmp_path} lists" in run("verify", tmp_path).stderr


def test_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "net.ckpt").touch()
    result = run("verify", tmp_path / "net.ckpt")
    assert result.exit_code == 1
    assert "net.ckpt: the file is empty\n" in result.stdout


def test_nothing_to_verify_is_not_found(tmp_path: Path) -> None:
    assert run("verify", tmp_path).exit_code == 10


def test_step_and_checkpoint_that_are_known_to_be_saved_must_be_here(tmp_path: Path) -> None:
    _, newest = save_run(tmp_path, [10, 20])
    known = run_json("ls", tmp_path)["items"][-1]["id"]
    assert run("verify", tmp_path, "--expect-step", "20", "--expect-id", known).exit_code == 0
    newest.unlink()
    result = run("verify", tmp_path, "--expect-step", "20", "--expect-id", known)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-2:] == [
        "step 20 was reached, but the last one is of step 10: newer ones were removed, or the directory was put back",
        f"checkpoint {known[:16]} is not here, nor the one saved after it: newer ones were removed, "
        "or the directory was put back",
    ]


def test_damaged_checkpoint_is_not_the_one_that_is_expected(tmp_path: Path) -> None:
    flip(save_run(tmp_path, [10, 20])[1], 70)
    assert (
        len(
            json.loads(run("verify", tmp_path, "--expect-step", "20", "--json").stdout)["summary"][
                "missing"
            ]
        )
        == 1
    )


def test_id_that_is_none_is_a_wrong_use(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    result = run("verify", tmp_path, "--expect-id", "net-1")
    assert (result.exit_code, "ls --json shows the ids" in result.stderr) == (2, True)


def test_file_replaced_by_an_older_one_exits_1_and_says_what_it_is(tmp_path: Path) -> None:
    (old,) = save_run(tmp_path / "a", [20])
    save_run(tmp_path / "b", [10, 20, 30])
    for name in (old.name, api.manifest_name(old.name)):
        shutil.copy(old.with_name(name), tmp_path / "b" / name)
    result = run("verify", tmp_path / "b")
    assert result.exit_code == 1
    assert (
        "damaged     net-2_10.ckpt: net-3_10.ckpt was saved after another file of this name"
        in result.stdout
    )


def signed_run(
    directory: Path, signer: api.SigningKey, *, options: api.SaveOptions | None = None
) -> str:
    """Save one checkpoint, sign it, and return the file of the public key."""
    (path,) = save_run(directory / "runs", [10], options=options)
    key = None if options is None else options.key
    store = api.place(path.parent, keys=key, signing_key=signer, allow_unencrypted=True)
    store.change_pins(only(store), lambda pins: pins)
    public = directory / "sign.pem.pub"
    public.write_bytes(signer.public_key.to_pem())
    return str(public)


SIGNER = api.SigningKey(bytes(range(32)))


def test_signed_and_encrypted_run_is_whole_without_the_secret_key(tmp_path: Path) -> None:
    public = signed_run(tmp_path, SIGNER, options=api.SaveOptions(key=KEY))
    assert run("verify", tmp_path / "runs").exit_code == 3
    result = run("verify", tmp_path / "runs", "--public-key", public)
    assert (result.exit_code, result.stdout.split("; ")[0]) == (
        0,
        "ok          net-1_10.ckpt  checked manifest, signature, size, digests, records",
    )


def test_key_that_did_not_sign_and_missing_signature_have_their_codes(tmp_path: Path) -> None:
    other = signed_run(tmp_path / "a", api.SigningKey(bytes(32)))
    signed_run(tmp_path / "b", SIGNER)
    save_run(tmp_path / "c", [10])
    assert run("verify", tmp_path / "b/runs", "--public-key", other).exit_code == 12
    assert run("verify", tmp_path / "c", "--public-key", other).exit_code == 13
    assert run("verify", tmp_path / "c", "--public-key", tmp_path / "absent").exit_code == 12


def test_pin_of_a_signed_checkpoint_takes_the_key_by_source(tmp_path: Path) -> None:
    public = signed_run(tmp_path, SIGNER)
    secret = tmp_path / "sign.pem"
    secret.touch(mode=0o600)
    secret.write_bytes(SIGNER.to_pem())
    place = ("latest", "--dir", tmp_path / "runs")
    assert run("pin", *place).exit_code == 12
    literal = run("pin", *place, "--signing-key", SIGNER.raw.hex())
    assert (literal.exit_code, SIGNER.raw.hex() in literal.output) == (2, False)
    assert run("pin", *place, "--signing-key", f"file:{secret}").exit_code == 0
    assert run("verify", tmp_path / "runs", "--public-key", public).exit_code == 0


def test_bare_file_with_crc_and_a_flipped_type_is_damaged_to_verify_and_corrupt_to_prune(
    tmp_path: Path,
) -> None:
    content = [tensor_from_array("w", np.ones(2, np.float32))]
    save_run(tmp_path, [10, 20, 30], options=api.SaveOptions(has_crc=True), content=content)
    for one in tmp_path.glob("*.manifest.json"):
        one.unlink()
    path = tmp_path / "net-3_10.ckpt"
    flip(path, path.read_bytes().index(b"Float32"))
    verified = run("verify", path)
    assert verified.exit_code == 1
    assert verified.stdout.startswith("damaged     net-3_10.ckpt: the CRC32 is 0x")
    kept = run("prune", tmp_path, "--keep", "last(1)", "--dry-run").stdout
    assert kept.count(" corrupt ") == 1, kept


def test_bare_safetensors_with_crc_and_a_changed_state_tree_is_damaged(tmp_path: Path) -> None:
    path = save_state({"step": 5}, tmp_path / "s.safetensors", crc_check=True).path
    (tmp_path / api.manifest_name(path.name)).unlink()
    assert run("verify", path).exit_code == 0
    path.write_bytes(path.read_bytes().replace(b'"step\\",5', b'"step\\",7'))
    verified = run("verify", path)
    assert verified.exit_code == 1
    assert "damaged     s.safetensors: the CRC32 of the state tree does not" in verified.stdout


def test_twice_as_many_checkpoints_make_about_twice_as_many_calls(fast_path: Path) -> None:
    calls: dict[int, int] = {}

    def verified(count: int) -> int:
        made = 0

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(note)
        try:
            assert run("verify", "--quick", fast_path / str(count)).exit_code == 0
        finally:
            sys.setprofile(None)
        return made

    for count in (25, 25, 50):  # the first one imports
        if not (fast_path / str(count)).exists():
            save_run(fast_path / str(count), [*range(10, 10 * count + 1, 10)])
        calls[count] = verified(count)
    assert calls[50] < 2.1 * calls[25]


def test_damaged_checkpoint_is_moved_into_quarantine(tmp_path: Path) -> None:
    first, second = save_run(tmp_path, [10, 20])
    overwrite(first, b"cut")
    result = run("verify", tmp_path, "--quarantine")
    assert result.exit_code == 1
    assert "  moved to .ckptmgr-quarantine/" in result.stdout
    assert not first.exists()
    assert second.exists()
    (moved,) = tmp_path.glob(f".ckptmgr-quarantine/*/{first.name}")
    assert moved.read_bytes() == b"cut"
    assert run("verify", tmp_path).exit_code == 0


def test_last_checkpoint_is_not_moved_and_the_error_is_said(tmp_path: Path) -> None:
    (first,) = save_run(tmp_path, [10])
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    overwrite(first, bytes(content))
    result = run("verify", tmp_path, "--quarantine", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["summary"]["quarantined"] == []
    assert "UnsafePrune" in result.stderr
    assert first.exists()


def test_quick_check_reads_a_header_that_is_longer_than_the_head_of_the_file(
    tmp_path: Path,
) -> None:
    many = [tensor_from_array(f"layer.{n}.weight", np.zeros(1, np.float32)) for n in range(400)]
    options = api.SaveOptions(format="safetensors")
    (path,) = save_run(tmp_path, [10], options=options, content=many)
    assert path.stat().st_size > 1 << 14
    assert run("verify", tmp_path, "--quick").exit_code == 0
    flip(path, (1 << 14) + 100)  # in the header
    result = run("verify", tmp_path, "--quick")
    assert (result.exit_code, "damaged" in result.stdout) == (1, True)


def test_checkpoints_of_several_directories_are_shown_with_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        save_run(tmp_path / name, [1])
    flip(tmp_path / "b/net-1_1.ckpt", 20)
    lines = run("verify", "a", "b").stdout.splitlines()
    assert lines[0].split()[:2] == ["ok", "a/net-1_1.ckpt"]
    assert lines[1].split()[:2] == ["damaged", "b/net-1_1.ckpt:"]
    assert run("verify", "a").stdout.split()[:2] == ["ok", "net-1_1.ckpt"]
