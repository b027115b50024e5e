# SPDX-License-Identifier: Apache-2.0
"""Passphrases, public keys and several recipients for saving: who opens which file, and a machine without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    KeyProblem,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from ckptmgr.crypto.keys.pem import generate_pair
from ckptmgr.crypto.keys.ring import KeyRing
from tests.support import api
from tests.support.rekeying import openers, ring

KEY = api.Key(bytes(range(32)))
FORMAT = "safetensors"


def put(path: Path, content: bytes, *, mode: int = 0o600) -> str:
    """Return the source of a file."""
    path.write_bytes(content)
    path.chmod(mode)
    return f"file:{path}"


@pytest.fixture
def alice(tmp_path: Path) -> tuple[str, str]:
    """A private and a public key, as sources."""
    private, public = generate_pair("x25519")
    return put(tmp_path / "alice.pem", private), put(tmp_path / "alice.pem.pub", public, mode=0o644)


@pytest.fixture
def phrase(tmp_path: Path) -> str:
    return f"passphrase:{put(tmp_path / 'phrase', b'correct horse')}"


def train(
    directory: Path, config: CheckpointConfig, *, steps: range = range(1, 4), resume: bool = False
) -> int:
    """Train some steps, and return the step that was resumed from."""
    with CheckpointManager(directory, config, prefix="net") as manager:
        start = manager.resume().step if resume else 0
        for step in steps:
            manager.step_end(step, {"w": np.full(4, float(step))})
    return start


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, "process"])
def test_run_under_a_passphrase_saves_and_resumes(
    tmp_path: Path, phrase: str, asynchronous: bool | str
) -> None:
    config = CheckpointConfig(enc_key=phrase, format=FORMAT, async_save=asynchronous)
    train(tmp_path / "runs", config)
    again = CheckpointConfig(enc_key=phrase, format=FORMAT)
    assert train(tmp_path / "runs", again, steps=range(0), resume=True) == 3
    newest = max(api.listed(tmp_path / "runs"), key=lambda one: one.step)
    assert openers(newest, [ring("wrong"), ring("correct horse")]) == [1]


def test_passphrase_is_stretched_once_for_a_run(tmp_path: Path, phrase: str) -> None:
    config = CheckpointConfig(enc_key=phrase, format=FORMAT)
    train(tmp_path / "runs", config)
    salts = {path.read_bytes()[80:132] for path in (tmp_path / "runs").glob("*.ckpe")}
    assert len(salts) == 1


@pytest.mark.hpke
def test_machine_with_public_keys_only_saves_keeps_and_never_opens(
    tmp_path: Path, alice: tuple[str, str]
) -> None:
    private, public = alice
    config = CheckpointConfig(enc_recipients=[public], format=FORMAT, keep="last(2)")
    assert train(tmp_path / "runs", config, resume=True) == 0
    steps = sorted(one.step for one in api.listed(tmp_path / "runs"))
    assert steps == [2, 3]
    with pytest.raises(KeyProblem) as caught:
        train(tmp_path / "runs", config, resume=True)
    said = f"{caught.value} {caught.value.hint}"
    assert "only public keys" in said
    assert "private key" in said
    owner = CheckpointConfig(enc_key=private, format=FORMAT)
    assert train(tmp_path / "runs", owner, steps=range(4, 5), resume=True) == 3


@pytest.mark.hpke
def test_write_only_machine_goes_on_saving_beside_earlier_checkpoints(
    tmp_path: Path, alice: tuple[str, str]
) -> None:
    private, public = alice
    config = CheckpointConfig(enc_key=public, format=FORMAT, keep="last(5)")
    train(tmp_path / "runs", config)
    train(tmp_path / "runs", config, steps=range(4, 6))
    owner = CheckpointConfig(enc_key=private, format=FORMAT)
    assert train(tmp_path / "runs", owner, steps=range(0), resume=True) == 5


@pytest.mark.hpke
def test_key_and_further_recipients_all_open_the_files(
    tmp_path: Path, alice: tuple[str, str], phrase: str
) -> None:
    private, public = alice
    config = CheckpointConfig(enc_key=KEY.raw, enc_recipients=[public, phrase], format=FORMAT)
    train(tmp_path / "runs", config)
    pem = Path(private.removeprefix("file:")).read_bytes()
    everybody = [ring(KEY), ring(pem), ring("correct horse"), ring(api.Key(bytes(32)))]
    for checkpoint in api.listed(tmp_path / "runs"):
        everybody_or_key = everybody if checkpoint.step == 3 else everybody[:1]
        assert openers(checkpoint, everybody_or_key) == [0, 1, 2][: len(everybody_or_key)]
        assert checkpoint.opened_by[0] == f"key {KEY.key_id}"
        assert checkpoint.key_id == KEY.key_id
    assert train(tmp_path / "runs", config, steps=range(4, 5), resume=True) == 3


@pytest.mark.hpke
def test_pin_keeps_the_manifest_open_for_all_recipients(
    tmp_path: Path, alice: tuple[str, str]
) -> None:
    private, public = alice
    train(
        tmp_path / "runs", CheckpointConfig(enc_key=KEY.raw, enc_recipients=[public], format=FORMAT)
    )
    with CheckpointManager(
        tmp_path / "runs", CheckpointConfig(enc_key=private, format=FORMAT), prefix="net"
    ) as manager:
        manager.pin(2, "paper")
    pem = Path(private.removeprefix("file:")).read_bytes()
    for checkpoint in api.listed(tmp_path / "runs"):
        assert openers(checkpoint, [ring(KEY), ring(pem)]) == [0, 1]


@pytest.mark.hpke
def test_functions_take_sources(tmp_path: Path, alice: tuple[str, str], phrase: str) -> None:
    private, public = alice
    values = {"w": np.arange(3.0)}
    for name, (writes, reads) in {"a": (public, private), "b": (phrase, phrase)}.items():
        saved = save_checkpoint(values, tmp_path / name, format=FORMAT, enc_key=writes)
        loaded = load_checkpoint(saved.path, dec_key=reads)
        assert loaded["w"].tolist() == [0.0, 1.0, 2.0]
        with open_checkpoint(saved.path, dec_key=reads) as reader:
            assert reader.names() == ("w",)
    with pytest.raises(KeyProblem, match="only public keys"):
        load_checkpoint(tmp_path / "a.safetensors.ckpe", dec_key=public)


def test_source_of_a_key_is_the_key(tmp_path: Path) -> None:
    source = put(tmp_path / "run.key", KEY.raw.hex().encode() + b"\n")
    config = CheckpointConfig(enc_key=source)
    assert (config.enc_key, config.keys) == (source, KEY)
    saved = save_checkpoint({"w": np.arange(3.0)}, tmp_path / "x.ckpt", enc_key=source)
    assert load_checkpoint(saved.path, dec_key=KEY.raw)["w"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.hpke
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM"])
def test_every_mode_takes_every_kind_of_key(
    tmp_path: Path, alice: tuple[str, str], mode: str
) -> None:
    private, public = alice
    saved = save_checkpoint(
        {"w": np.arange(3.0)}, tmp_path / "x", format=FORMAT, enc_key=public, enc_mode=mode
    )
    assert load_checkpoint(saved.path, dec_key=private, dec_mode=mode)["w"].tolist() == [0, 1, 2]


def test_encrypted_ckpt_takes_keys_only(tmp_path: Path, phrase: str) -> None:
    with pytest.raises(KeyProblem, match="takes one key and nothing else"):
        CheckpointConfig(enc_key=phrase)
    with pytest.raises(KeyProblem, match="takes one key and nothing else"):
        CheckpointConfig(enc_key=KEY.raw, enc_recipients=[phrase])
    saved = save_checkpoint({"w": np.arange(3.0)}, tmp_path / "x.ckpt", enc_key=KEY.raw)
    with pytest.raises(KeyProblem, match="authenticated under key"):
        load_checkpoint(saved.path, dec_key=phrase)
    saved.path.with_name("x.ckpt.manifest.json").unlink()
    with pytest.raises(KeyProblem, match="takes a key, no passphrase"):
        load_checkpoint(saved.path, dec_key=phrase)


@pytest.mark.parametrize("given", ["secret", "0" * 32, "hex:00", "passphrase"])
def test_text_that_is_no_source_is_refused_as_by_mindspore_and_not_shown(given: str) -> None:
    with pytest.raises(ValueError, match="must be isinstance of") as caught:
        CheckpointConfig(enc_key=given)
    assert given not in str(caught.value)


@pytest.mark.parametrize("source", ["env:NOT_THERE", "passphrase:env:NOT_THERE", "file:/not/there"])
def test_source_that_gives_nothing_fails_at_once(source: str) -> None:
    with pytest.raises(KeyProblem):
        CheckpointConfig(enc_key=source, format=FORMAT)


@pytest.mark.hpke
def test_recipients_are_checked_at_once(alice: tuple[str, str]) -> None:
    with pytest.raises(TypeError, match="list of sources"):
        CheckpointConfig(enc_recipients=alice[1], format=FORMAT)
    with pytest.raises(KeyProblem, match="not shown") as caught:
        CheckpointConfig(enc_recipients=["hunter2"], format=FORMAT)
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"
    with pytest.raises(KeyProblem, match="cipher mode"):
        CheckpointConfig(enc_recipients=[alice[1]], enc_mode="ROT13", format=FORMAT)


def test_configuration_shows_no_secret(tmp_path: Path, phrase: str) -> None:
    config = CheckpointConfig(enc_key=phrase, format=FORMAT)
    assert "horse" not in f"{config!r} {config.keys!r}"
    assert isinstance(config.keys, KeyRing)
    assert "<redacted>" in repr(config)


@pytest.mark.parametrize("name", ["enc_key", "enc_recipients"])
def test_passphrase_that_a_person_mistypes_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    answers = iter(["correct horse", "corect horse"])
    monkeypatch.setattr("getpass.getpass", lambda _: next(answers))
    source = "passphrase:prompt:"
    given: dict[str, Any] = {"enc_key": source} if name == "enc_key" else {"enc_key": KEY.raw}
    others = [source] if name == "enc_recipients" else []
    with pytest.raises(KeyProblem, match="two answers differ"):
        CheckpointConfig(format=FORMAT, enc_recipients=others, **given)


def test_passphrase_that_opens_is_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phrase: str
) -> None:
    save_checkpoint({"w": np.ones(3)}, str(tmp_path / "net"), enc_key=phrase, format=FORMAT)
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        return "correct horse"

    monkeypatch.setattr("getpass.getpass", answer)
    (path,) = tmp_path.glob("net*.ckpe")
    load_checkpoint(str(path), dec_key="passphrase:prompt:")
    assert questions == ["Passphrase for dec_key: "]


def test_text_that_names_no_source_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"redacted str") as caught:
        CheckpointConfig(enc_key="0123456789abcdef")
    assert "0123456789abcdef" not in str(caught.value)
    assert caught.value.__notes__ == [
        "hint: a text names a source, as in enc_key='file:run.key' or 'env:RUN_KEY'; a key in"
        " hexadecimal is bytes.fromhex(...)"
    ]


@pytest.mark.parametrize("format", ["ckpt", FORMAT])
def test_run_without_the_key_of_its_checkpoints_names_the_ways_to_give_it(
    tmp_path: Path, format: str
) -> None:
    train(tmp_path, CheckpointConfig(enc_key=bytes(32), format=format))
    with pytest.raises(KeyProblem, match="a key is needed") as caught:
        train(tmp_path, CheckpointConfig(format=format), resume=True)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("pass a key: enc_key of CheckpointConfig")
