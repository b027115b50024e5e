# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr decrypt` and `ckptmgr encrypt`."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr.cli.exits import Exit
from tests.cli.running import key_file, process_env, run, run_json, run_process
from tests.cli.test_verify import SIGNER, signed_run
from tests.support import api
from tests.support.saved import GOLDEN_FILES, KEY, OTHER_KEY, flip, items, save_run

SEALED = api.SaveOptions(key=KEY, has_crc=True)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """The key of the run, as a key source."""
    return key_file(tmp_path)


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """An encrypted checkpoint."""
    return save_run(tmp_path / "sealed", [10], options=SEALED)[0]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The same checkpoint, plain."""
    return save_run(tmp_path / "plain", [10], options=api.SaveOptions(has_crc=True))[0]


def test_decrypt_to_a_file_gives_the_plain_bytes(
    tmp_path: Path, sealed: Path, plain: Path, source: str
) -> None:
    result = run("decrypt", sealed, "-o", tmp_path / "out.ckpt", "--key", source)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{sealed} → {tmp_path / 'out.ckpt'}  ")
    assert (tmp_path / "out.ckpt").read_bytes() == plain.read_bytes()
    assert run("verify", tmp_path / "out.ckpt").exit_code == 0


def test_ascii_terminal_gets_an_ascii_arrow(tmp_path: Path, sealed: Path, source: str) -> None:
    out = tmp_path / "out.ckpt"
    result = run("decrypt", sealed, "-o", out, "--key", source, charset="ascii")
    assert " -> " in result.stdout


def test_directory_as_target_keeps_the_name(tmp_path: Path, sealed: Path, source: str) -> None:
    (tmp_path / "out").mkdir()
    result = run("decrypt", sealed, "-o", tmp_path / "out", "--key", source, "-q")
    assert result.stdout == f"{tmp_path / 'out' / sealed.name}\n"


def test_encrypt_then_decrypt_gives_the_input(tmp_path: Path, plain: Path, source: str) -> None:
    middle, end = tmp_path / "s.ckpt", tmp_path / "p.ckpt"
    document = run_json("encrypt", plain, "-o", middle, "--mode", "AES-CBC", "--key", source)
    assert document["schema"] == "ckptmgr.encrypt/1"
    assert document["items"][0]["cipher"] == "AES-CBC"
    assert document["summary"]["source_bytes"] == plain.stat().st_size
    run("decrypt", middle, "-o", end, "--key", source)
    assert end.read_bytes() == plain.read_bytes()


def test_pipes_carry_the_same_bytes(tmp_path: Path, sealed: Path, plain: Path, source: str) -> None:
    assert run("decrypt", sealed, "-o", "-", "--key", source).stdout_bytes == plain.read_bytes()
    piped = tmp_path / "piped.ckpt"
    piped.write_bytes(run("encrypt", plain, "-o", "-", "--key", source).stdout_bytes)
    # A pipe carries no manifest, so nothing proves which checkpoint this is.
    assert run("verify", piped, "--key", source).exit_code == Exit.REFUSED
    assert run("verify", piped, "--key", source, "--allow-unsealed").exit_code == 0


@pytest.mark.parametrize("offset", [10, 100, -1])
def test_tampered_file_gives_nothing_to_the_pipe(sealed: Path, source: str, offset: int) -> None:
    flip(sealed, offset)
    result = run("decrypt", sealed, "-o", "-", "--key", source)
    assert result.exit_code in (1, 12)
    assert result.stdout_bytes == b""


def test_wrong_key_exits_12_and_leaves_nothing(tmp_path: Path, sealed: Path) -> None:
    other = key_file(tmp_path, hex_digits=OTHER_KEY.raw.hex())
    result = run("decrypt", sealed, "-o", tmp_path / "out.ckpt", "--key", other)
    assert (result.exit_code, result.stdout) == (12, "")
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("command", ["decrypt", "encrypt"])
def test_missing_key_exits_12(tmp_path: Path, plain: Path, sealed: Path, command: str) -> None:
    source = plain if command == "encrypt" else sealed
    result = run(command, source, "-o", tmp_path / "out.ckpt")
    assert (result.exit_code, "a key is needed" in result.stderr) == (12, True)


@pytest.mark.parametrize("target", ["out.ckpt", "-"])
def test_plain_and_missing_files_need_no_key_to_be_refused(
    tmp_path: Path, plain: Path, target: str
) -> None:
    target = target if target == "-" else str(tmp_path / target)
    refused = run("decrypt", plain, "-o", target)
    assert (refused.exit_code, "is not encrypted" in refused.stderr) == (2, True)
    missing = run("decrypt", tmp_path / "missing.ckpt", "-o", target)
    assert (missing.exit_code, "no such file" in missing.stderr) == (10, True)


def test_mindspore_file_without_seal_exits_13_unless_allowed(tmp_path: Path) -> None:
    golden = shutil.copy(GOLDEN_FILES / "gcm128.ckpt", tmp_path)
    key = key_file(tmp_path, hex_digits=bytes(range(16)).hex())
    out = tmp_path / "out.ckpt"
    refused = run("decrypt", golden, "-o", out, "--key", key)
    assert (refused.exit_code, "--allow-unsealed" in refused.stderr) == (13, True)
    assert run("decrypt", golden, "-o", out, "--key", key, "--allow-unsealed").exit_code == 0


def test_existing_target_exits_13_unless_forced(tmp_path: Path, sealed: Path, source: str) -> None:
    out = tmp_path / "out.ckpt"
    out.write_bytes(b"precious")
    refused = run("decrypt", sealed, "-o", out, "--key", source)
    assert (refused.exit_code, out.read_bytes()) == (13, b"precious")
    assert run("decrypt", sealed, "-o", out, "--key", source, "--force").exit_code == 0


def test_input_as_target_exits_13_even_when_forced(sealed: Path, source: str) -> None:
    before = sealed.read_bytes()
    for target in (sealed, sealed.parent):
        result = run("decrypt", sealed, "-o", target, "--key", source, "--force")
        assert (result.exit_code, sealed.read_bytes()) == (13, before)


def test_missing_input_exits_10(tmp_path: Path, source: str) -> None:
    for target in (tmp_path / "out.ckpt", "-"):
        for command in ("decrypt", "encrypt"):
            result = run(command, tmp_path / "no.ckpt", "-o", target, "--key", source)
            assert result.exit_code == 10


def test_encrypted_input_is_refused_by_encrypt(tmp_path: Path, sealed: Path, source: str) -> None:
    result = run("encrypt", sealed, "-o", tmp_path / "out.ckpt", "--key", source)
    assert (result.exit_code, "encrypted already" in result.stderr) == (2, True)


def test_unknown_mode_is_a_usage_error(tmp_path: Path, plain: Path, source: str) -> None:
    result = run("encrypt", plain, "-o", tmp_path / "o", "--mode", "ROT13", "--key", source)
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "literal", [KEY.raw.hex(), "c2VjcmV0LXNlY3JldC1zZWNyZXQ=", "hex:" + KEY.raw.hex(), "secret"]
)
def test_literal_key_is_refused_and_never_echoed(sealed: Path, literal: str) -> None:
    for extra in ([], ["--json"], ["--debug"]):
        arguments = ["decrypt", str(sealed), "-o", "-", "--key", literal]
        result = run(*(extra + arguments if extra == ["--debug"] else arguments + extra))
        assert result.exit_code == 2
        assert literal not in result.output
        assert literal.removeprefix("hex:") not in result.output


def test_key_appears_nowhere(tmp_path: Path, sealed: Path, source: str) -> None:
    commands: list[list[str | Path]] = [
        ["ls", sealed.parent, "--json"],
        ["inspect", sealed, "--json"],
        ["verify", sealed, "--deep"],
        ["decrypt", sealed, "-o", tmp_path / "out.ckpt", "--json"],
        ["decrypt", sealed, "-o", tmp_path / "out.ckpt"],
    ]
    everything = "".join(run(*arguments, "--key", source).output for arguments in commands)
    assert KEY.raw.hex() not in everything


@pytest.mark.parametrize(
    "scheme", ["env:RUN_KEY", "cmd:printenv KEPT_BY_NO_SOURCE"], ids=["variable", "command"]
)
def test_key_by_variable_and_command(
    sealed: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A variable that an env: source named, in any test of this process, is kept from commands.
    monkeypatch.setenv(scheme.split(":")[-1].split()[-1], KEY.raw.hex())
    assert run("verify", sealed, "--key", scheme).exit_code == 0


def test_key_source_without_key_exits_12(sealed: Path) -> None:
    result = run("verify", sealed, "--key", "env:CKPTMGR_NO_SUCH_VARIABLE")
    assert result.exit_code == 12


def test_key_file_open_to_others_exits_12(tmp_path: Path, sealed: Path, source: str) -> None:
    Path(source.removeprefix("file:")).chmod(0o644)
    result = run("verify", sealed, "--key", source, "--json")
    assert (result.exit_code, json.loads(result.stderr)["error"]) == (12, "KeyProblem")


def test_key_by_descriptor_of_a_real_process(sealed: Path, plain: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, KEY.raw.hex().encode() + b"\n")
    os.close(writer)
    command = [sys.executable, "-m", "ckptmgr", "decrypt", str(sealed), "-o", "-"]
    done = subprocess.run(
        [*command, "--key", f"fd:{reader}"],
        capture_output=True,
        pass_fds=[reader],
        env=process_env(),
        timeout=60,
        check=True,
    )
    os.close(reader)
    assert done.stdout == plain.read_bytes()


def test_terminal_gets_no_binary_data(sealed: Path, plain: Path, source: str) -> None:
    leader, terminal = pty.openpty()
    for command, path in (("decrypt", sealed), ("encrypt", plain)):
        arguments = ["-m", "ckptmgr", command, str(path), "-o", "-", "--key", source]
        done = subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.PIPE,
            env=process_env(),
            timeout=60,
            check=False,
        )
        assert (done.returncode, b"stdout is a terminal" in done.stderr) == (13, True)
    os.close(terminal)
    os.close(leader)


def test_process_writes_the_pipe(sealed: Path, plain: Path, source: str) -> None:
    done = run_process("decrypt", sealed, "-o", "-", "--key", source)
    assert (done.returncode, done.stdout) == (0, plain.read_bytes())


def test_encrypt_and_decrypt_of_safetensors_into_directories_change_the_name(
    tmp_path: Path, source: str
) -> None:
    options = api.SaveOptions(format="safetensors")
    (plain,) = save_run(tmp_path / "plain", [10], options=options, content=items()[:1])
    for name in ("sealed", "out"):
        (tmp_path / name).mkdir()
    assert run("encrypt", plain, "-o", tmp_path / "sealed", "--key", source).exit_code == 0
    sealed = tmp_path / "sealed" / f"{plain.name}.ckpe"
    assert run("verify", sealed, "--key", source).exit_code == 0
    assert run("decrypt", sealed, "-o", tmp_path / "out", "--key", source).exit_code == 0
    assert (tmp_path / "out" / plain.name).read_bytes() == plain.read_bytes()


def test_container_is_shown_with_its_cipher(tmp_path: Path, source: str) -> None:
    options = api.SaveOptions(format="safetensors")
    (plain,) = save_run(tmp_path / "plain", [10], options=options, content=items()[:1])
    sealed = tmp_path / "x.safetensors.ckpe"
    mode = ("--mode", "SM4-GCM")
    assert run("encrypt", plain, "-o", sealed, "--key", source, *mode).exit_code == 0
    (tmp_path / api.manifest_name(sealed.name)).unlink()
    (listed,) = run_json("ls", tmp_path)["items"]
    assert listed["cipher"] == "SM4-GCM"
    shown = run("inspect", sealed, "--key", source, "--allow-unsealed")
    assert "SM4-GCM" in shown.stdout
    assert "fc.weight" in shown.stdout


def test_any_other_file_keeps_its_name_and_comes_back(tmp_path: Path, source: str) -> None:
    plain = tmp_path / "tokenizer.json"
    plain.write_bytes(b'{"added_tokens": []}')
    for name in ("sealed", "out"):
        (tmp_path / name).mkdir()
    document = run_json("encrypt", plain, "-o", tmp_path / "sealed", "--key", source)
    (item,) = document["items"]
    sealed = tmp_path / "sealed" / "tokenizer.json.ckpe"
    assert (item["path"], item["format"], item["cipher"]) == (str(sealed), "opaque", "AES-GCM")
    assert run("decrypt", sealed, "-o", tmp_path / "out", "--key", source).exit_code == 0
    assert (tmp_path / "out" / plain.name).read_bytes() == plain.read_bytes()
    piped = run("decrypt", sealed, "-o", "-", "--key", source).stdout_bytes
    assert piped == plain.read_bytes()
    assert run("encrypt", plain, "-o", tmp_path / "x.json", "--key", source).exit_code == 13


def test_other_file_is_verified_and_inspected(tmp_path: Path, source: str) -> None:
    plain = tmp_path / "tokenizer.json"
    plain.write_bytes(b'{"added_tokens": []}')
    sealed = tmp_path / "tokenizer.json.ckpe"
    run("encrypt", plain, "-o", sealed, "--key", source)
    answer = run("verify", sealed, "--key", source)
    assert answer.exit_code == 0
    assert "checked header, cipher blocks" in answer.stdout
    assert run("verify", sealed).exit_code == Exit.PARTLY
    for key in ((), ("--key", source)):
        shown = run("inspect", sealed, *key)
        assert shown.exit_code == 0
        assert "opaque: no checkpoint" in shown.stdout
        assert f"opens with key {KEY.key_id}" in " ".join(shown.stdout.split())
        assert "tensor" not in shown.stdout
    summary = run_json("inspect", sealed, "--key", source)["summary"]
    assert (summary["format"], summary["plaintext_bytes"]) == ("opaque", 20)
    assert run_json("ls", tmp_path)["items"] == []


@pytest.mark.hpke
def test_ckpt_goes_into_a_container_for_several_who_open_it(
    tmp_path: Path, plain: Path, source: str
) -> None:
    private = tmp_path / "alice.pem"
    run("keygen", "--type", "x25519", "--out", private)
    (tmp_path / "sealed").mkdir()
    arguments = ("encrypt", plain, "-o", tmp_path / "sealed", "--key", f"file:{private}.pub")
    assert run(*arguments).exit_code == 0
    sealed = tmp_path / "sealed" / f"{plain.name}.ckpe"
    shown = run("inspect", sealed, "--key", f"file:{private}")
    assert "fc.weight" in shown.stdout
    assert "format     ckpt, CRC32" in shown.stdout
    (tmp_path / "out").mkdir()
    assert run("decrypt", sealed, "-o", tmp_path / "out", "--key", f"file:{private}").exit_code == 0
    assert (tmp_path / "out" / plain.name).read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("damage", ["a late block", "a cut"])
def test_pipe_of_a_bad_file_carries_nothing_but_checked_bytes_and_fails(
    tmp_path: Path, source: str, damage: str
) -> None:
    plain = tmp_path / "large.bin"
    plain.write_bytes(bytes(range(256)) * (9 << 12))  # 9 MiB: three segments
    sealed = tmp_path / "large.bin.ckpe"
    run("encrypt", plain, "-o", sealed, "--key", source)
    if damage == "a cut":
        sealed.write_bytes(sealed.read_bytes()[:-100])
    else:
        flip(sealed, -100)
    result = run("decrypt", sealed, "-o", "-", "--key", source)
    assert result.exit_code == Exit.NO
    assert plain.read_bytes().startswith(result.stdout_bytes)
    assert len(result.stdout_bytes) < plain.stat().st_size


def test_decrypt_with_a_public_key_refuses_what_it_did_not_sign(
    tmp_path: Path, source: str
) -> None:
    public = signed_run(tmp_path, SIGNER, options=api.SaveOptions(key=KEY))
    (path,) = (tmp_path / "runs").glob("*.ckpt")
    stranger = tmp_path / "stranger.pem.pub"
    stranger.write_bytes(api.SigningKey(bytes(32)).public_key.to_pem())
    arguments: list[str | Path] = ["decrypt", path, "-o", tmp_path / "out.ckpt", "--key", source]
    assert run(*arguments, "--public-key", stranger).exit_code == Exit.KEY
    assert not (tmp_path / "out.ckpt").exists()
    piped = run("decrypt", path, "-o", "-", "--key", source, "--public-key", stranger)
    assert (piped.exit_code, piped.stdout_bytes) == (Exit.KEY, b"")
    done = run(*arguments, "--public-key", public)
    assert done.exit_code == Exit.DONE, done.stderr


def test_decrypt_with_a_public_key_refuses_unsigned_files_of_every_kind(
    tmp_path: Path, sealed: Path, source: str
) -> None:
    public = tmp_path / "sign.pem.pub"
    public.write_bytes(SIGNER.public_key.to_pem())
    text = tmp_path / "tokenizer.json"
    text.write_text("{}")
    assert run("encrypt", text, "-o", f"{text}.ckpe", "--key", source).exit_code == Exit.DONE
    for file in (sealed, Path(f"{text}.ckpe")):
        arguments: list[str | Path] = ["decrypt", file, "-o", tmp_path / "out", "--key", source]
        refused = run(*arguments, "--public-key", public)
        assert refused.exit_code == Exit.REFUSED, refused.stderr
        assert not (tmp_path / "out").exists()


def test_decrypt_refuses_a_part_with_the_command_that_takes_one(tmp_path: Path) -> None:
    result = run("decrypt", tmp_path / "a.ckpt", "-o", tmp_path / "b.ckpt", "--only", "net")
    assert result.exit_code == 2
    assert "ckptmgr export IN -o OUT --to ckpt --only PART" in result.stderr
