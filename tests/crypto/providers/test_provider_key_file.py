# SPDX-License-Identifier: Apache-2.0
"""A wrapped key in a file opens with the service that wrapped it, and the file chooses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.sources import load_key, load_secret
from ckptmgr.crypto.providers.local import LocalProvider
from ckptmgr.crypto.providers.provider import ProviderRefusedError
from ckptmgr.crypto.providers.run_key import RunKey
from ckptmgr.crypto.providers.wrapped_file import load_wrapped_key, pack_key_file, parse_key_file

CONTEXT = {"run": "7f"}
SERVICE = LocalProvider(Key(bytes(range(32))))
GOOD = {
    "version": 1,
    "provider": "local",
    "key_id": "k",
    "context": CONTEXT,
    "blob": "AAAA",
}


def wrapped_file(folder: Path) -> tuple[Key, Path]:
    wrapped = RunKey(SERVICE, CONTEXT).take()
    path = folder / "run.wrapped"
    path.write_bytes(pack_key_file(wrapped))
    path.chmod(0o644)
    return wrapped.key, path


def test_file_gives_the_key_back_to_its_service(tmp_path: Path) -> None:
    key, path = wrapped_file(tmp_path)
    assert load_wrapped_key(str(path), service=SERVICE) == key
    found = parse_key_file(path.read_text())
    assert (found.provider, found.key_id, found.context) == ("local", SERVICE.key_id, CONTEXT)


def test_source_asks_the_service_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path = wrapped_file(tmp_path)
    monkeypatch.setenv("KEK", SERVICE.key.raw.hex())
    monkeypatch.setenv("CKPTMGR_KEY_SERVICE", "local:env:KEK")
    assert load_key(f"wrapped:{path}") == key


@pytest.mark.parametrize("value", [None, ""])
def test_source_without_a_service_says_which_kind_is_wanted(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = wrapped_file(tmp_path)
    monkeypatch.delenv("CKPTMGR_KEY_SERVICE", raising=False)
    if value is not None:
        monkeypatch.setenv("CKPTMGR_KEY_SERVICE", value)
    with pytest.raises(KeySourceError, match="'local' wrapped this key") as caught:
        load_key(f"wrapped:{path}")
    assert "CKPTMGR_KEY_SERVICE" in str(caught.value.hint)


def test_file_that_names_a_program_does_not_run_it(tmp_path: Path) -> None:
    path, touched = tmp_path / "run.wrapped", tmp_path / "touched"
    path.write_text(json.dumps({**GOOD, "provider": "exec", "key_id": f"touch {touched}"}))
    with pytest.raises(KeySourceError, match="the given one is 'local'"):
        load_wrapped_key(str(path), service=SERVICE)
    assert not touched.exists()


def test_file_of_another_context_is_refused(tmp_path: Path) -> None:
    _, path = wrapped_file(tmp_path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "context": {"run": "80"}}))
    with pytest.raises(ProviderRefusedError):
        load_wrapped_key(str(path), service=SERVICE)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("00112233445566778899aabbccddeeff", "not JSON"),
        ("[" * 4000, "not JSON"),
        ("[]", "members"),
        ("{}", "members"),
        (json.dumps({**GOOD, "more": 1}), "members"),
        (json.dumps({**GOOD, "version": 2}), "its version is not 1"),
        (json.dumps({**GOOD, "version": True}), "its version is not 1"),
        (json.dumps({**GOOD, "provider": 1}), "is not a"),
        (json.dumps({**GOOD, "key_id": None}), "is not a"),
        (json.dumps({**GOOD, "context": []}), "is not a"),
        (json.dumps({**GOOD, "context": {"run": 1}}), "maps text to text"),
        (json.dumps({**GOOD, "blob": []}), "is not a"),
        (json.dumps({**GOOD, "blob": "A"}), "not base64"),
        (json.dumps({**GOOD, "blob": "é"}), "not base64"),
    ],
)
def test_text_that_is_no_wrapped_key_is_refused_and_not_shown(text: str, reason: str) -> None:
    with pytest.raises(KeySourceError, match=reason) as caught:
        parse_key_file(text)
    assert "8899" not in f"{caught.value} {caught.value.hint}"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@given(
    text=st.text(max_size=40)
    | st.fixed_dictionaries({name: st.just(good) | json_values for name, good in GOOD.items()}).map(
        json.dumps
    )
)
def test_any_text_is_a_wrapped_key_or_refused(text: str) -> None:
    try:
        found = parse_key_file(text)
    except KeySourceError:
        return
    assert json.loads(text)["context"] == found.context


def test_key_whose_file_would_be_too_long_is_refused() -> None:
    wrapped = RunKey(SERVICE, {"run": "7" * 4096}).take()
    with pytest.raises(KeySourceError, match="more than 4096"):
        pack_key_file(wrapped)


@pytest.mark.parametrize("mode", [0o622, 0o664, 0o646, 0o666])
def test_file_that_others_can_change_is_refused(mode: int, tmp_path: Path) -> None:
    _, path = wrapped_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(KeySourceError, match=f"changed by others .mode {mode:04o}") as caught:
        load_wrapped_key(str(path), service=SERVICE)
    assert "chmod go-w" in str(caught.value.hint)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o644, 0o755])
def test_file_that_others_can_only_read_gives_the_key(mode: int, tmp_path: Path) -> None:
    key, path = wrapped_file(tmp_path)
    path.chmod(mode)
    assert load_wrapped_key(str(path), service=SERVICE) == key


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    _, path = wrapped_file(tmp_path)
    os.chown(path, 12345, -1)
    with pytest.raises(KeySourceError, match="belongs to another user"):
        load_wrapped_key(str(path), service=SERVICE)


def test_file_bound_to_the_stated_context_gives_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path = wrapped_file(tmp_path)
    monkeypatch.setenv("CKPTMGR_KEY_CONTEXT", "run=7f")
    assert load_wrapped_key(str(path), service=SERVICE) == key
    monkeypatch.setenv("CKPTMGR_KEY_CONTEXT", "run=80")
    assert load_wrapped_key(str(path), service=SERVICE, context=CONTEXT) == key


@pytest.mark.parametrize("stated", ["run=80", "run=7f,purpose=x", "purpose=7f", "run="])
def test_file_of_another_run_than_stated_is_refused_before_the_service_is_asked(
    stated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = wrapped_file(tmp_path)
    monkeypatch.setenv("CKPTMGR_KEY_SERVICE", "exec:false")
    monkeypatch.setenv("CKPTMGR_KEY_CONTEXT", stated)
    with pytest.raises(KeySourceError, match="bound to another context than the stated one"):
        load_key(f"wrapped:{path}")


@pytest.mark.parametrize("context", [{}, {"run": "80"}, {**CONTEXT, "purpose": "x"}])
def test_file_of_another_context_than_the_given_one_is_refused(
    context: dict[str, str], tmp_path: Path
) -> None:
    _, path = wrapped_file(tmp_path)
    with pytest.raises(KeySourceError, match="bound to another context than the stated one"):
        load_wrapped_key(str(path), service=SERVICE, context=context)


@pytest.mark.parametrize("stated", ["", "run", "=7f", "run=7f,", "run=7f,run=80"])
def test_stated_context_that_is_none_is_refused(
    stated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = wrapped_file(tmp_path)
    monkeypatch.setenv("CKPTMGR_KEY_CONTEXT", stated)
    with pytest.raises(KeySourceError, match="CKPTMGR_KEY_CONTEXT states no context"):
        load_wrapped_key(str(path), service=SERVICE)


def test_file_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeySourceError, match="cannot be opened"):
        load_wrapped_key(str(tmp_path / "absent"), service=SERVICE)


def test_wrapped_key_is_no_source_of_a_pin() -> None:
    with pytest.raises(KeySourceError, match="not a key source"):
        load_secret("wrapped:file")
