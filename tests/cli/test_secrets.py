# SPDX-License-Identifier: Apache-2.0
"""No key in anything that a whole run prints, logs, raises or writes, whatever goes wrong in it."""

from __future__ import annotations

import base64
import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ckptmgr import CheckpointConfig, CheckpointManager, CkptmgrError, load_checkpoint
from ckptmgr.crypto.keys.signing import load_signing_key
from ckptmgr.crypto.keys.sources import load_key
from ckptmgr.crypto.providers.registry import open_provider
from ckptmgr.crypto.providers.wrapped_file import load_wrapped_key
from tests.cli.running import run, run_process
from tests.support import api
from tests.support.saved import flip


def spellings(secret: bytes) -> dict[str, bytes]:
    """Return what a key may look like, by name; base64 without its end, which depends on the following bytes."""
    return {
        "raw": secret,
        "hex": secret.hex().encode(),
        "hex with colons": secret.hex(":").encode(),
        "base64": base64.b64encode(secret)[: len(secret) * 8 // 6],
        "base64 for URLs": base64.urlsafe_b64encode(secret)[: len(secret) * 8 // 6],
        "repr": repr(bytes(secret))[2:-1].encode(),
        "list of numbers": str(list(secret))[1:-1].encode(),
    }


def leaks(shown: bytes, keys: Sequence[api.Key]) -> list[str]:
    """Return the spellings of the keys that occur in `shown`, in capitals or not."""
    return [
        name
        for key in keys
        for name, form in spellings(key.raw).items()
        if form in shown or form.lower() in shown.lower()
    ]


class Transcript:
    """Everything that came out of a run."""

    def __init__(self, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
        self.shown: list[bytes] = []
        self._caplog = caplog
        self._capfd = capfd

    def add(self, *values: object) -> None:
        self.shown += [f"{value}\n{value!r}".encode("utf-8", "replace") for value in values]

    def add_error(self, error: BaseException) -> None:
        self.add(error, error.args, vars(error), "".join(traceback.format_exception(error)))

    def add_result(self, result: Result) -> Result:
        self.shown += [result.stdout_bytes, result.stderr_bytes]
        if result.exception is not None:
            self.add_error(result.exception)
        return result

    def add_files(self, folder: Path, *, but: Sequence[Path]) -> None:
        for path in folder.rglob("*"):
            self.shown.append(str(path).encode())
            if path.is_file() and path not in but:
                self.shown.append(path.read_bytes())

    def leaks(self, keys: Sequence[api.Key]) -> list[str]:
        """Return the spellings of keys in all of it, logs and what went past the command line included."""
        self.add(self._caplog.text, *(vars(record) for record in self._caplog.records))
        self.add(*self._capfd.readouterr())
        return leaks(b"\n".join(self.shown), keys)


@pytest.fixture
def transcript(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> Transcript:
    """All that is written while a test runs; logs are at their most talkative, temporary files under the test's."""
    caplog.set_level(logging.DEBUG)
    for name in ("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    return Transcript(caplog, capfd)


def make_key(path: Path, transcript: Transcript, *, size: int) -> api.Key:
    transcript.add_result(run("keygen", "--bytes", str(size), "--out", path))
    return load_key(f"file:{path}")


def save(
    folder: Path, key: api.Key, mode: str, asynchronous: str | None, *, form: str = "ckpt"
) -> CheckpointConfig:
    """Save three checkpoints by the API."""
    config = CheckpointConfig(
        enc_key=bytes(key.raw),
        enc_mode=mode,
        async_save=asynchronous or False,
        keep="last(3)",
        format=form,
    )
    state = {"weights": np.arange(1000, dtype=np.float32), "name": "net"}
    with CheckpointManager(folder, config, prefix="net") as manager:
        for step in (1, 2, 3):
            manager.save(step, state, metrics={"loss": 1.0 / step})
    return config


@pytest.mark.parametrize(
    ("form", "mode", "size", "asynchronous"),
    [
        ("ckpt", "AES-GCM", 32, None),
        ("ckpt", "AES-CBC", 24, "thread"),
        ("ckpt", "SM4-CBC", 16, "process"),
        ("safetensors", "AES-GCM", 32, "thread"),
    ],
)
def test_whole_run_shows_no_key(
    form: str,
    mode: str,
    size: int,
    asynchronous: str | None,
    tmp_path: Path,
    transcript: Transcript,
) -> None:
    right, wrong = tmp_path / "right.key", tmp_path / "wrong.key"
    keys = [make_key(path, transcript, size=size) for path in (right, wrong)]
    runs, opened = tmp_path / "runs", tmp_path / f"opened.{form}"
    transcript.add(save(runs, keys[0], mode, asynchronous, form=form))
    (file,) = runs.glob("net*3.*[!n]")
    sealed = tmp_path / file.name
    commands: list[tuple[int, tuple[str | Path, ...]]] = [
        (0, ("ls", runs)),
        (0, ("inspect", file)),
        (0, ("verify", file, "--deep")),
        (0, ("decrypt", file, "-o", opened)),
        (0, ("encrypt", opened, "-o", sealed, "--mode", mode)),
        (0, ("pin", file)),
        (0, ("prune", runs, "--keep", "last(1)", "--yes")),
        (0, ("verify", runs)),
    ]
    for code, command in commands:
        for option in ((), ("--json",)):
            if option and command[0] in ("decrypt", "encrypt"):
                continue
            result = transcript.add_result(run(*command, *option, "--key", f"file:{right}"))
            assert result.exit_code == code, result.stderr
    transcript.add_files(tmp_path, but=(right, wrong))
    assert transcript.leaks(keys) == []


@pytest.mark.parametrize("asynchronous", [None, "process"])
def test_run_that_signs_shows_no_key(
    tmp_path: Path, transcript: Transcript, asynchronous: str | None
) -> None:
    sign, bundle = tmp_path / "sign.pem", tmp_path / "bundle.pem"
    for kind, path in (("ed25519", sign), ("p256", bundle)):
        transcript.add_result(run("keygen", "--type", kind, "--out", path))
    keys = [api.Key(load_signing_key(f"file:{sign}").raw)]
    runs, source = tmp_path / "runs", f"file:{sign}"
    config = CheckpointConfig(signing_key=source, async_save=asynchronous or False)
    with CheckpointManager(runs, config, prefix="net") as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weights": np.arange(1000, dtype=np.float32)})
    transcript.add(config, config.signing_key)
    literal = keys[0].raw.hex()
    commands: list[tuple[int, tuple[str | Path, ...]]] = [
        (0, ("verify", runs, "--public-key", f"{sign}.pub")),
        (12, ("verify", runs, "--public-key", f"{bundle}.pub")),
        (12, ("verify", runs, "--public-key", sign)),
        (0, ("pin", "latest", "--dir", runs, "--signing-key", source)),
        (12, ("pin", "latest", "--dir", runs)),
        (12, ("pin", "latest", "--dir", runs, "--signing-key", f"file:{bundle}")),
        (2, ("pin", "latest", "--dir", runs, "--signing-key", literal)),
        (2, ("sign", runs, "--private-key", literal)),
    ]
    for code, command in commands:
        result = transcript.add_result(run(*command))
        assert result.exit_code == code, result.stderr
    transcript.add_files(tmp_path, but=(sign, bundle))
    assert transcript.leaks(keys) == []
    assert b"PRIVATE" not in b"".join(transcript.shown)


@pytest.mark.slow
@pytest.mark.hpke
@pytest.mark.parametrize("asynchronous", [None, "process"])
def test_run_with_a_passphrase_and_a_private_key_shows_neither(
    tmp_path: Path, transcript: Transcript, asynchronous: str | None
) -> None:
    phrase, private = tmp_path / "phrase", tmp_path / "alice.pem"
    secret = api.Key(b"correct horse #7")
    phrase.touch(mode=0o600)
    phrase.write_bytes(secret.raw + b"\n")
    transcript.add_result(run("keygen", "--type", "x25519", "--out", private))
    own = load_pem_private_key(private.read_bytes(), None)
    assert isinstance(own, X25519PrivateKey)
    keys = [secret, api.Key(own.private_bytes_raw())]
    runs, source = tmp_path / "runs", f"passphrase:file:{phrase}"
    config = CheckpointConfig(
        enc_key=source,
        enc_recipients=[f"file:{private}.pub"],
        format="safetensors",
        async_save=asynchronous or False,
    )
    with CheckpointManager(runs, config, prefix="net") as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weights": np.arange(1000, dtype=np.float32)})
    transcript.add(config, config.keys, vars(config).keys())
    new = tmp_path / "new.key"
    keys.append(make_key(new, transcript, size=32))
    commands: list[tuple[int, tuple[str | Path, ...]]] = [
        (0, ("verify", runs, "--key", source)),
        (0, ("ls", runs, "--key", f"file:{private}")),
        (12, ("verify", runs, "--key", f"file:{private}.pub")),
        (12, ("verify", runs, "--key", f"passphrase:env:{secret.raw.hex()}")),
        (12, ("rekey", runs, "--key", f"passphrase:file:{new}", "--add", f"file:{new}", "--yes")),
        (13, ("rekey", runs, "--key", source, "--add", source, "--remove", source)),
        (2, ("rekey", runs, "--key", source, "--add", secret.raw.decode(), "--yes")),
        (2, ("rekey", runs, "--key", source, "--remove", keys[2].raw.hex(), "--yes")),
        (0, ("rekey", runs, "--key", source, "--add", f"file:{new}", "--yes")),
        (0, ("rekey", runs, "--key", f"file:{private}", "--remove", source, "--yes")),
        (0, ("reencrypt", runs, "--key", f"file:{new}", "--to", source, "--yes")),
        (0, ("verify", runs, "--key", source)),
    ]
    for code, command in commands:
        result = transcript.add_result(run("--debug", *command))
        assert result.exit_code == code, (command, result.stderr)
    transcript.add_files(tmp_path, but=(phrase, private, new))
    assert transcript.leaks(keys) == []


def test_run_with_a_wrapped_key_shows_no_key(tmp_path: Path, transcript: Transcript) -> None:
    own, wrapped = tmp_path / "own.key", tmp_path / "run.wrapped"
    service = f"local:file:{own}"
    keys = [make_key(own, transcript, size=32)]
    made = run("keygen", "--service", service, "--context", "run=7f", "-o", wrapped)
    transcript.add_result(made)
    keys.append(load_wrapped_key(str(wrapped), service=open_provider(service)))
    save(tmp_path / "runs", keys[1], "AES-GCM", None)
    for address, code in ((service, 0), ("exec:false", 12), (f"local:env:{own}", 12)):
        command = ("--debug", "verify", tmp_path / "runs", "--key", f"wrapped:{wrapped}")
        result = run(*command, env={"CKPTMGR_KEY_SERVICE": address})
        assert transcript.add_result(result).exit_code == code
    transcript.add_files(tmp_path, but=(own,))
    assert transcript.leaks(keys) == []


def failing_commands(
    file: Path, folder: Path, keys: Sequence[api.Key], wrong: Path
) -> Iterator[Sequence[str | Path]]:
    """Yield commands that fail, each with a key where it does not belong or does not fit."""
    odd, text = folder / "odd.key", keys[1].raw.hex()
    odd.touch(mode=0o600)
    odd.write_bytes(keys[0].raw + keys[1].raw[:1])
    public = folder / "public.key"
    public.write_text(keys[0].raw.hex())
    public.chmod(0o644)
    for source in (
        f"file:{wrong}",
        f"file:{odd}",
        f"file:{public}",
        f"cmd:cat {odd}",
        f"cmd:echo {text}00",
        "env:CKPTMGR_TEST_KEY",
        text,
        f"hex:{text}",
        f"base64:{base64.b64encode(keys[1].raw).decode()}",
        f"env:{text}",
        f"file:{text}",
    ):
        yield "verify", file, "--key", source
        yield "decrypt", file, "-o", folder / "out", "--key", source
        yield "encrypt", file, "-o", folder / "out", "--key", source
        yield "ls", file.parent, "--key", source
        yield "prune", file.parent, "--keep", "last(1)", "--yes", "--key", source


def sources_that_hold(key: api.Key) -> list[str]:
    """Return sources with the key itself in place of a name, in every spelling that a person may type."""
    digits, text = key.raw.hex(), base64.b64encode(key.raw).decode()
    spelled = (
        f"hex:{digits}",
        f" {digits} ",
        digits.upper(),
        key.raw.hex(":"),
        key.raw.hex(" ", 2),
        f"base64:{text}",
        text.rstrip("="),
        f"{text} ",
        base64.urlsafe_b64encode(key.raw).decode().rstrip("="),
        f"keys/{digits}",
    )
    return [f"{scheme}:{form}" for scheme in ("env", "file", "wrapped", "cmd") for form in spelled]


HELD = api.Key(bytes.fromhex("c0ffee2d546f702d5365637265742121fbeffe3e") + b"-Top-Secret!")


@pytest.mark.parametrize("source", sources_that_hold(HELD))
def test_source_that_is_the_key_itself_is_not_repeated(
    source: str, tmp_path: Path, transcript: Transcript
) -> None:
    save(tmp_path / "runs", api.Key(bytes(range(32))), "AES-GCM", None)
    (file,) = (tmp_path / "runs").glob("net*3.ckpt")
    for option in ((), ("--json",)):
        result = run("--debug", "verify", file, "--key", source, *option)
        assert transcript.add_result(result).exit_code == 12
    assert transcript.leaks([HELD]) == []
    assert HELD.raw.hex(" ", 2).encode() not in b"".join(transcript.shown)


@pytest.mark.parametrize("source", sources_that_hold(HELD)[10:20])
def test_key_file_variable_that_is_the_key_itself_is_not_repeated(
    source: str, tmp_path: Path, transcript: Transcript
) -> None:
    env = {"CKPTMGR_KEY_FILE": source.removeprefix("file:")}
    result = transcript.add_result(run("--debug", "verify", tmp_path, env=env))
    assert result.exit_code == 12
    assert transcript.leaks([HELD]) == []


def test_failures_of_every_kind_show_no_key(tmp_path: Path, transcript: Transcript) -> None:
    right, wrong = tmp_path / "right.key", tmp_path / "wrong.key"
    keys = [make_key(path, transcript, size=32) for path in (right, wrong)]
    save(tmp_path / "runs", keys[0], "AES-GCM", None)
    (file,) = (tmp_path / "runs").glob("net*3.ckpt")
    folder = tmp_path / "failures"
    folder.mkdir()
    failures = 0
    for command in failing_commands(file, folder, keys, wrong):
        for option in ((), ("--json",)):
            env = {"CKPTMGR_TEST_KEY": keys[1].raw.hex() + "0"}
            result = transcript.add_result(run("--debug", *command, *option, env=env))
            failures += result.exit_code != 0
    assert failures >= 80
    known = (right, wrong, folder / "odd.key", folder / "public.key")
    transcript.add_files(tmp_path, but=known)
    assert transcript.leaks(keys) == []


def test_failures_of_the_api_show_no_key(tmp_path: Path, transcript: Transcript) -> None:
    keys = [api.Key(b"\xc0\xff\xee-Top-Secret!!"), api.Key(b"\xfa\xde-Other-Secret!")]
    config = save(tmp_path, keys[0], "AES-GCM", None)
    (file,) = tmp_path.glob("net*3.ckpt")
    transcript.add(config, vars(config).keys())
    with pytest.raises(CkptmgrError) as caught:
        load_checkpoint(str(file), dec_key=bytes(keys[1].raw), dec_mode="AES-GCM")
    transcript.add_error(caught.value)
    with pytest.raises(ValueError, match="but got 17") as refused:
        CheckpointConfig(enc_key=keys[0].raw + b"x")
    transcript.add_error(refused.value)
    flip(file, 100)
    with pytest.raises(CkptmgrError) as damaged:
        load_checkpoint(str(file), dec_key=bytes(keys[0].raw), dec_mode="AES-GCM")
    transcript.add_error(damaged.value)
    assert transcript.leaks(keys) == []


@pytest.mark.slow
def test_process_of_its_own_shows_no_key(tmp_path: Path, transcript: Transcript) -> None:
    paths = [tmp_path / name for name in ("right.key", "wrong.key")]
    keys = [make_key(path, transcript, size=32) for path in paths]
    save(tmp_path / "runs", keys[0], "AES-GCM", None)
    for source in (*(f"file:{path}" for path in paths), keys[1].raw.hex()):
        done = run_process(
            "--debug", "verify", tmp_path / "runs", "--key", source, PYTHONDEVMODE="1"
        )
        transcript.shown += [done.stdout, done.stderr]
    assert transcript.leaks(keys) == []


def test_transcript_finds_what_is_printed_logged_raised_or_written(
    tmp_path: Path, transcript: Transcript
) -> None:
    keys = [api.Key(bytes([number]) * 16) for number in range(200, 205)]
    logging.getLogger("anybody").debug("key %s", keys[0].raw.hex())
    os.write(1, keys[1].raw.hex().encode())
    transcript.add_error(ValueError(bytes(keys[2].raw)))
    (tmp_path / "file").write_bytes(keys[3].raw)
    transcript.add_files(tmp_path, but=())
    for key in keys[:4]:
        assert transcript.leaks([key]) != []
    assert transcript.leaks(keys[4:]) == []


@pytest.mark.parametrize("name", spellings(b""))
def test_search_finds_every_spelling(name: str) -> None:
    key = api.Key(b"\xc0\xff\xee-Top-Secret!!")
    assert name in leaks(b"before " + spellings(key.raw)[name] + b" after", [key])
    assert leaks(b"before " + spellings(key.raw)[name][1:] + b" after", [key]) == []
