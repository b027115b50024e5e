# SPDX-License-Identifier: Apache-2.0
"""Keys that an old version of cryptography cannot use are refused with the version that they need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, KeyProblem
from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.pem import parse_pem
from tests.cli.running import run

X25519_PUBLIC = """-----BEGIN PUBLIC KEY-----
MCowBQYDK2VuAyEApOCSkrZRwnI8dpxkMtAZsIpZEjNn2JhPlzvQh5SKq30=
-----END PUBLIC KEY-----
"""


def pem(kind: str, content: str) -> bytes:
    return f"-----BEGIN {kind} KEY-----\n{content}\n-----END {kind} KEY-----\n".encode()


@pytest.fixture
def _no_hpke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.hpke", None)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.mlkem", None)


@pytest.mark.usefixtures("_no_hpke")
def test_public_key_without_hpke_is_refused_with_the_version(tmp_path: Path) -> None:
    public = tmp_path / "alice.pem"
    public.write_text(X25519_PUBLIC)
    with pytest.raises(KeyProblem, match="X25519 keys need cryptography 47 or newer"):
        CheckpointConfig(format="safetensors", enc_recipients=[f"file:{public}"])


@pytest.mark.usefixtures("_no_hpke")
@pytest.mark.parametrize(("kind", "version"), [("x25519", 47), ("mlkem768-x25519", 48)])
def test_keygen_without_hpke_names_the_version_and_writes_nothing(
    tmp_path: Path, kind: str, version: int
) -> None:
    done = run("keygen", "--type", kind, "--out", tmp_path / "key.pem")
    assert done.exit_code == 12
    assert f"need cryptography {version} or newer" in done.stderr
    assert f"pip install 'cryptography>={version}'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_no_hpke")
def test_secret_key_without_hpke_saves_and_resumes(tmp_path: Path) -> None:
    config = CheckpointConfig(format="safetensors", enc_key=bytes(32))
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, {"step": 1})
    with CheckpointManager(tmp_path, config) as manager:
        assert manager.resume().state == {"step": 1}


@pytest.mark.hpke
@pytest.mark.parametrize(
    ("kind", "content"),
    [("PRIVATE", "MBACAQAwBgYEKgMEBQQDYWJj"), ("PUBLIC", "MA4wBgYEKgMEBQMEAGFiYw==")],
)
def test_key_of_an_algorithm_that_is_not_known_is_refused_with_those_that_are(
    kind: str, content: str
) -> None:
    with pytest.raises(KeySourceError, match="of a kind that does not encrypt here") as refused:
        parse_pem(pem(kind, content))
    assert "X25519, ML-KEM-768 followed by X25519" in str(refused.value.hint)


@pytest.mark.usefixtures("_no_hpke")
def test_content_that_is_no_key_here_names_the_version_that_knows_more_keys() -> None:
    with pytest.raises(KeySourceError) as refused:
        parse_pem(pem("PRIVATE", "AAAA"))
    assert "ML-KEM keys need cryptography 48 or newer" in str(refused.value.hint)
