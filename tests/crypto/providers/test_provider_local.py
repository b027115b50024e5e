# SPDX-License-Identifier: Apache-2.0
"""A key of one's own wraps other keys, bound to a context; and what every service checks of contexts, keys and blobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap, aes_key_wrap
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.sources import load_key
from ckptmgr.crypto.providers.local import LocalProvider, open_local
from ckptmgr.crypto.providers.provider import (
    MAX_BLOB_BYTES,
    KeyProvider,
    ProviderAnswerError,
    ProviderRefusedError,
    check_blob,
    check_unwrapped,
    context_bytes,
)
from ckptmgr.crypto.providers.run_key import RunKey
from ckptmgr.crypto.providers.wrapped_file import pack_key_file

OWN = LocalProvider(Key(bytes(range(32))))
CONTEXT = {"purpose": "run-key", "run": "7f"}

contexts = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)


@given(
    key=st.sampled_from((16, 24, 32)).flatmap(lambda size: st.binary(min_size=size, max_size=size)),
    context=contexts,
)
def test_wrapped_key_unwraps_with_the_same_context(key: bytes, context: dict[str, str]) -> None:
    assert OWN.unwrap(OWN.wrap(key, context), dict(reversed(context.items()))) == key


@given(context=contexts.filter(lambda context: context != CONTEXT))
def test_wrapped_key_with_another_context_is_refused(context: dict[str, str]) -> None:
    with pytest.raises(ProviderRefusedError, match="does not unwrap this blob"):
        OWN.unwrap(OWN.wrap(bytes(16), CONTEXT), context)


@given(bit=st.integers(0, 40 * 8 - 1))
def test_wrapped_key_with_a_flipped_bit_is_refused(bit: int) -> None:
    blob = bytearray(OWN.wrap(bytes(32), CONTEXT))
    blob[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProviderRefusedError):
        OWN.unwrap(bytes(blob), CONTEXT)


@pytest.mark.parametrize("size", [0, 1, 8, 16, 23, 25, 39, 41, 1000])
def test_blob_of_any_other_length_is_refused(size: int) -> None:
    with pytest.raises(ProviderRefusedError):
        OWN.unwrap(bytes(size), CONTEXT)


def test_wrapped_key_of_another_own_key_is_refused() -> None:
    other = LocalProvider(Key(bytes(16)))
    with pytest.raises(ProviderRefusedError, match=f"key {OWN.key_id} does not") as caught:
        OWN.unwrap(other.wrap(bytes(32), CONTEXT), CONTEXT)
    assert caught.value.hint is not None


def test_wrapped_key_is_rfc_3394_under_a_derived_key() -> None:
    info = b'ckptmgr/v1/wrap/local/{"purpose":"run-key","run":"7f"}'
    wrapping_key = HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(OWN.key.raw)
    assert aes_key_unwrap(wrapping_key, OWN.wrap(bytes(32), CONTEXT)) == bytes(32)
    with pytest.raises(ProviderAnswerError, match="unwrapped 40 bytes"):
        OWN.unwrap(aes_key_wrap(wrapping_key, bytes(40)), CONTEXT)


@pytest.mark.parametrize("size", [0, 15, 17, 40])
def test_key_of_another_length_is_not_wrapped(size: int) -> None:
    with pytest.raises(KeySourceError, match=f"not of {size}"):
        OWN.wrap(bytes(size), CONTEXT)


def test_provider_from_a_key_source_uses_that_key(tmp_path: Path) -> None:
    path = tmp_path / "kek.key"
    path.touch(mode=0o600)
    path.write_text(OWN.key.raw.hex() + "\n")
    provider: KeyProvider = open_local(f"file:{path}")
    assert (provider.name, provider.key_id) == ("local", OWN.key.key_id)
    assert provider.unwrap(OWN.wrap(bytes(16), CONTEXT), CONTEXT) == bytes(16)


def test_provider_shown_hides_its_key() -> None:
    assert OWN.key.raw.hex() not in repr(OWN)


@given(context=contexts)
def test_context_has_one_spelling_and_no_two_share_it(context: dict[str, str]) -> None:
    spelled = context_bytes(context)
    assert context_bytes(dict(reversed(context.items()))) == spelled
    assert spelled.isascii()
    assert context_bytes({**context, "one more name": ""}) != spelled


@pytest.mark.parametrize("context", [{"run": 7}, {7: "run"}, {"run": None}, {"run": b"7"}])
def test_context_that_is_not_text_is_refused(context: object) -> None:
    with pytest.raises(KeySourceError, match="maps text to text"):
        context_bytes(cast("Mapping[str, str]", context))


def test_context_that_is_too_long_is_refused() -> None:
    with pytest.raises(KeySourceError, match="more than 8192"):
        context_bytes({"run": "7" * 8192})


@pytest.mark.parametrize("size", [0, MAX_BLOB_BYTES + 1])
def test_blob_that_nobody_would_store_is_refused(size: int) -> None:
    with pytest.raises(ProviderAnswerError, match=f"a blob of {size} bytes"):
        check_blob(bytes(size), provider="exec")


@pytest.mark.parametrize("size", [0, 15, 33])
def test_unwrapped_bytes_that_are_no_key_are_refused(size: int) -> None:
    with pytest.raises(ProviderAnswerError, match=f"unwrapped {size} bytes"):
        check_unwrapped(bytes(size), provider="exec")


def test_wrapped_key_as_own_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.wrapped"
    path.write_bytes(pack_key_file(RunKey(OWN, CONTEXT).take()))
    path.chmod(0o600)
    monkeypatch.setenv("CKPTMGR_KEY_SERVICE", f"local:wrapped:{path}")
    with pytest.raises(KeySourceError, match="cannot be a wrapped one") as caught:
        load_key(f"wrapped:{path}")
    assert "local:file:" in str(caught.value.hint)
