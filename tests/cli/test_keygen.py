# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr keygen`."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.signing import load_public_key, load_signing_key
from ckptmgr.crypto.keys.sources import load_key
from ckptmgr.crypto.providers.registry import open_provider
from ckptmgr.crypto.providers.wrapped_file import load_wrapped_key
from tests.cli.running import run, run_json
from tests.support import api
from tests.support.saved import save_run


def test_keygen_writes_a_private_file_that_is_a_key_source(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    result = run("keygen", "--out", path)
    key = load_key(f"file:{path}")
    assert result.exit_code == 0
    assert result.stdout == f"{path}  key {key.key_id}, 32 bytes\n"
    assert "keep a copy in another place" in result.stderr
    assert path.stat().st_mode & 0o777 == 0o600


def test_keygen_in_a_world_of_open_umask_writes_a_private_file(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        run("keygen", "--out", tmp_path / "run.key")
    finally:
        os.umask(previous)
    assert (tmp_path / "run.key").stat().st_mode & 0o777 == 0o600


def test_keygen_without_a_name_writes_run_key_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("keygen").stdout.startswith("run.key  key ")
    assert len(load_key("file:run.key").raw) == 32


@pytest.mark.parametrize("size", [16, 24, 32])
def test_keygen_of_each_length_gives_that_length(size: int, tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    document = run_json("keygen", "--bytes", str(size), "-o", path)
    key = load_key(f"file:{path}")
    assert len(key.raw) == size
    assert document["schema"] == "ckptmgr.keygen/1"
    assert document["items"] == [
        {"path": str(path), "public_path": None, "key_id": key.key_id, "size_bytes": size}
    ]


def test_keygen_twice_gives_two_keys(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run("keygen", "-o", tmp_path / name, "-q").stdout == f"{tmp_path / name}\n"
    assert load_key(f"file:{tmp_path / 'a'}") != load_key(f"file:{tmp_path / 'b'}")


def test_keygen_shows_the_key_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    for option in ([], ["--json"], ["-q"]):
        path.unlink(missing_ok=True)
        result = run("keygen", "-o", path, *option)
        secret = path.read_text().strip()
        assert secret not in result.stdout + result.stderr


@pytest.mark.parametrize("kind", ["file", "directory", "link", "broken link"])
def test_keygen_refuses_a_name_that_is_taken(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "run.key", tmp_path / "other"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(other)
        if kind == "link":
            other.write_text("precious")
    before = {entry: entry.is_file() and entry.read_bytes() for entry in tmp_path.iterdir()}
    result = run("keygen", "-o", path)
    assert result.exit_code == 13
    assert "exists" in result.stderr
    after = {entry: entry.is_file() and entry.read_bytes() for entry in tmp_path.iterdir()}
    assert after == before


def test_keygen_into_no_directory_is_refused(tmp_path: Path) -> None:
    assert run("keygen", "-o", tmp_path / "absent" / "run.key").exit_code == 10


def test_keygen_to_stdout_prints_the_key_and_notes_its_id(tmp_path: Path) -> None:
    result = run("keygen", "-o", "-")
    key = load_key("prompt:", prompt=lambda _: result.stdout)
    assert result.stdout == key.raw.hex() + "\n"
    assert result.stderr == f"ckptmgr: note: key {key.key_id}\n"
    assert run("keygen", "-o", "-", "-q").stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_keygen_to_stdout_in_json_is_refused() -> None:
    result = run("keygen", "-o", "-", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""


def test_keygen_on_a_disk_that_fails_leaves_no_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        result = run("keygen", "-o", tmp_path / "run.key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 2
    assert "File too large" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_key_of_keygen_encrypts_and_decrypts(tmp_path: Path) -> None:
    key_file = tmp_path / "run.key"
    run("keygen", "-o", key_file)
    (plain,) = save_run(tmp_path / "plain", [10], options=api.SaveOptions(has_crc=True))
    sealed, opened = tmp_path / "sealed.ckpt", tmp_path / "opened.ckpt"
    assert run("encrypt", plain, "-o", sealed, "--key", f"file:{key_file}").exit_code == 0
    assert run("decrypt", sealed, "-o", opened, "--key", f"file:{key_file}").exit_code == 0
    assert opened.read_bytes() == plain.read_bytes()


@pytest.fixture
def service(tmp_path: Path) -> str:
    """The address of a key service."""
    assert run("keygen", "-o", tmp_path / "kek.key").exit_code == 0
    return f"local:file:{tmp_path / 'kek.key'}"


@pytest.mark.parametrize("size", [16, 32])
def test_keygen_with_a_service_writes_a_key_that_only_it_opens(
    size: int, tmp_path: Path, service: str
) -> None:
    path = tmp_path / "run.wrapped"
    words = ("--context", "run=7f", "--context", "team=a=b")
    document = run_json("keygen", "--service", service, *words, "--bytes", str(size), "-o", path)
    written = json.loads(path.read_text())
    assert written["context"] == {"run": "7f", "team": "a=b"}
    key = load_wrapped_key(str(path), service=open_provider(service))
    assert len(key.raw) == size
    assert document["items"][0]["key_id"] == key.key_id
    assert key.raw.hex() not in path.read_text()
    other = tmp_path / "other.key"
    assert run("keygen", "-o", other).exit_code == 0
    with pytest.raises(KeySourceError, match="does not unwrap"):
        load_wrapped_key(str(path), service=open_provider(f"local:file:{other}"))


def test_wrapped_key_encrypts_and_decrypts_where_its_service_is_named(
    tmp_path: Path, service: str
) -> None:
    wrapped = tmp_path / "run.wrapped"
    run("keygen", "--service", service, "-o", wrapped)
    (plain,) = save_run(tmp_path / "plain", [10], options=api.SaveOptions(has_crc=True))
    sealed, opened = tmp_path / "sealed.ckpt", tmp_path / "opened.ckpt"
    env = {"CKPTMGR_KEY_SERVICE": service}
    source = f"wrapped:{wrapped}"
    assert run("encrypt", plain, "-o", sealed, "--key", source, env=env).exit_code == 0
    assert run("decrypt", sealed, "-o", opened, "--key", source, env=env).exit_code == 0
    assert opened.read_bytes() == plain.read_bytes()
    result = run("verify", sealed, "--key", source)
    assert result.exit_code == 12
    assert "CKPTMGR_KEY_SERVICE" in result.stderr


@pytest.mark.parametrize("word", ["run", "=7f", ""])
def test_keygen_with_a_context_that_is_none_is_refused(
    word: str, tmp_path: Path, service: str
) -> None:
    out = tmp_path / "out"
    assert run("keygen", "--service", service, "--context", word, "-o", out).exit_code == 2
    assert not out.exists()


def test_keygen_with_a_context_and_no_service_is_refused(tmp_path: Path) -> None:
    assert run("keygen", "--context", "run=7f", "-o", tmp_path / "out").exit_code == 2


def test_keygen_with_a_service_that_fails_writes_nothing(tmp_path: Path) -> None:
    result = run("keygen", "--service", "exec:false", "-o", tmp_path / "out")
    assert result.exit_code == 12
    assert "refused" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_keygen_of_a_signing_key_writes_both_halves(tmp_path: Path) -> None:
    path = tmp_path / "sign.pem"
    document = run_json("keygen", "--type", "ed25519", "--out", path)
    key, public = load_signing_key(f"file:{path}"), load_public_key(f"{path}.pub")
    assert public == key.public_key
    assert document["items"] == [
        {
            "path": str(path),
            "public_path": f"{path}.pub",
            "key_id": public.key_id,
            "size_bytes": None,
        }
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other.pem"
    shown = run("keygen", "--type", "ed25519", "--out", other).stdout
    assert f"{other}.pub  its public key, for everybody" in shown
    assert (
        run("keygen", "--type", "ed25519", "-q", "--out", tmp_path / "c").stdout
        == f"{tmp_path}/c\n{tmp_path}/c.pub\n"
    )


def test_keygen_of_a_key_for_bundles_names_it_as_bundles_do(tmp_path: Path) -> None:
    path = tmp_path / "bundle.pem"
    shown = run("keygen", "--type", "p256", "--out", path).stdout
    public = (tmp_path / "bundle.pem.pub").read_bytes()
    assert hashlib.sha256(public).hexdigest()[:16] in shown
    assert f"ckptmgr sign --private-key file:{path}" in shown
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    assert key.public_key() == serialization.load_pem_public_key(public)


def test_keygen_of_a_signing_key_replaces_neither_half(tmp_path: Path) -> None:
    (tmp_path / "sign.pem.pub").write_text("mine")
    result = run("keygen", "--type", "ed25519", "--out", tmp_path / "sign.pem")
    assert result.exit_code == 13
    assert [path.name for path in tmp_path.iterdir()] == ["sign.pem.pub"]
    assert (tmp_path / "sign.pem.pub").read_text() == "mine"


@pytest.mark.parametrize("extra", [("--out", "-"), ("--service", "exec:x"), ("--context", "a=b")])
def test_keygen_of_a_signing_key_goes_to_files_only(extra: tuple[str, str]) -> None:
    result = run("keygen", "--type", "ed25519", *extra)
    assert (result.exit_code, "writes FILE and FILE.pub" in result.stderr) == (2, True)
