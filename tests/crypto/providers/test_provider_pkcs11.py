# SPDX-License-Identifier: Apache-2.0
"""PKCS#11 through the real python-pkcs11 and a real token: SoftHSM2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.providers.pkcs11 import Pkcs11Provider, open_pkcs11
from ckptmgr.crypto.providers.provider import (
    KeyProvider,
    ProviderError,
    ProviderRefusedError,
    ProviderUnavailableError,
)
from ckptmgr.crypto.providers.registry import open_provider
from ckptmgr.crypto.providers.run_key import RunKey, RunKeyReader

pkcs11 = pytest.importorskip("pkcs11", reason="needs python-pkcs11: make providers")
pytestmark = pytest.mark.providers

KEY = b"\xc0\xff\xee-Top-Secret!!"
CONTEXT = {"run": "7f"}
PIN = "pin-of-the-user"
TOKEN = "training"
MODULES = (
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so",
    "/usr/lib/aarch64-linux-gnu/softhsm/libsofthsm2.so",
    "/usr/lib64/pkcs11/libsofthsm2.so",
)

Sessions = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library of SoftHSM2 with new tokens; it reads its settings once, so once for all tests."""
    found = next((path for path in MODULES if Path(path).exists()), None)
    if found is None or shutil.which("softhsm2-util") is None:
        pytest.skip("needs SoftHSM2 (Debian: softhsm2)")
    folder = tmp_path_factory.mktemp("softhsm")
    (folder / "tokens").mkdir()
    settings = folder / "softhsm2.conf"
    settings.write_text(f"directories.tokendir = {folder / 'tokens'}\nlog.level = ERROR\n")
    os.environ["SOFTHSM2_CONF"] = str(settings)
    for label in (TOKEN, "twins", "twins"):
        command = ["softhsm2-util", "--init-token", "--free", "--label", label, "--pin", PIN]
        subprocess.run([*command, "--so-pin", "pin-of-officer"], check=True, capture_output=True)
    return found


@pytest.fixture(scope="module")
def sessions(module: str) -> Sessions:
    """What opens a session of the owner, who makes keys."""
    token = pkcs11.lib(module).get_token(token_label=TOKEN)
    return lambda: token.open(rw=True, user_pin=PIN)


@pytest.fixture(scope="module")
def provider(module: str, sessions: Sessions) -> Pkcs11Provider:
    with sessions() as session:
        session.generate_key(pkcs11.KeyType.AES, 256, label="run-keys", store=True)
    return Pkcs11Provider(module=module, token=TOKEN, key_id="run-keys", pin=PIN)


def test_wrapped_key_unwraps(provider: Pkcs11Provider) -> None:
    service: KeyProvider = provider
    blob = service.wrap(KEY, CONTEXT)
    assert len(blob) == 1 + 12 + len(KEY) + 16
    assert KEY not in blob
    assert service.unwrap(blob, CONTEXT) == KEY


def test_same_key_wrapped_twice_gives_different_blobs(provider: Pkcs11Provider) -> None:
    assert provider.wrap(KEY, CONTEXT) != provider.wrap(KEY, CONTEXT)


def test_run_of_many_saves_uses_the_token_once(provider: Pkcs11Provider) -> None:
    wrapped = RunKey(provider, CONTEXT).take()
    assert (wrapped.provider, wrapped.provider_key_id) == ("pkcs11", "run-keys")
    assert RunKeyReader(provider).unwrap(wrapped.blob, CONTEXT) == wrapped.key


@pytest.mark.parametrize("context", [{}, {"run": "80"}, {"run": "7f", "more": ""}])
def test_wrapped_key_with_another_context_is_refused(
    provider: Pkcs11Provider, context: dict[str, str]
) -> None:
    blob = provider.wrap(KEY, CONTEXT)
    with pytest.raises(ProviderRefusedError, match="does not unwrap this blob"):
        provider.unwrap(blob, context)


def test_wrapped_key_with_any_changed_byte_is_refused(provider: Pkcs11Provider) -> None:
    blob = provider.wrap(KEY, CONTEXT)
    for offset in range(len(blob)):
        changed = blob[:offset] + bytes([blob[offset] ^ 1]) + blob[offset + 1 :]
        with pytest.raises(ProviderRefusedError):
            provider.unwrap(changed, CONTEXT)


@pytest.mark.parametrize("size", [0, 1, 12, 13, 14, 29])
def test_wrapped_key_that_is_cut_is_refused(provider: Pkcs11Provider, size: int) -> None:
    with pytest.raises(ProviderRefusedError):
        provider.unwrap(provider.wrap(KEY, CONTEXT)[:size], CONTEXT)


def test_key_of_another_token_key_is_refused(provider: Pkcs11Provider, sessions: Sessions) -> None:
    with sessions() as session:
        session.generate_key(pkcs11.KeyType.AES, 128, label="other", store=True)
    other = replace(provider, key_id="other")
    with pytest.raises(ProviderRefusedError):
        other.unwrap(provider.wrap(KEY, CONTEXT), CONTEXT)


def test_key_that_the_token_would_hand_out_is_refused(
    provider: Pkcs11Provider, sessions: Sessions
) -> None:
    template = {pkcs11.Attribute.EXTRACTABLE: True}
    with sessions() as session:
        session.generate_key(pkcs11.KeyType.AES, 256, label="open", store=True, template=template)
    with pytest.raises(ProviderRefusedError, match="'open' can be read out"):
        replace(provider, key_id="open").wrap(KEY, CONTEXT)


def test_key_that_may_only_encrypt_does_not_unwrap(
    provider: Pkcs11Provider, sessions: Sessions
) -> None:
    with sessions() as session:
        session.generate_key(
            pkcs11.KeyType.AES,
            256,
            label="one-way",
            store=True,
            capabilities=pkcs11.MechanismFlag.ENCRYPT,
        )
    one_way = replace(provider, key_id="one-way")
    with pytest.raises(ProviderRefusedError, match="'one-way' may not decrypt"):
        one_way.unwrap(one_way.wrap(KEY, CONTEXT), CONTEXT)


def test_key_that_was_destroyed_opens_nothing(provider: Pkcs11Provider, sessions: Sessions) -> None:
    shredded = replace(provider, key_id="shredded")
    with sessions() as session:
        key = session.generate_key(pkcs11.KeyType.AES, 256, label="shredded", store=True)
        blob = shredded.wrap(KEY, CONTEXT)
        key.destroy()
    with pytest.raises(ProviderRefusedError, match="has no AES key 'shredded'"):
        shredded.unwrap(blob, CONTEXT)


def test_two_keys_of_one_name_are_refused(provider: Pkcs11Provider, sessions: Sessions) -> None:
    with sessions() as session:
        for _ in range(2):
            session.generate_key(pkcs11.KeyType.AES, 256, label="twice", store=True)
    with pytest.raises(ProviderRefusedError, match="has several AES keys 'twice'"):
        replace(provider, key_id="twice").wrap(KEY, CONTEXT)


def test_wrong_pin_is_refused_once_and_not_shown(provider: Pkcs11Provider) -> None:
    with pytest.raises(ProviderRefusedError, match="does not take the PIN") as caught:
        replace(provider, pin="not-the-pin").wrap(KEY, CONTEXT)
    assert "not-the-pin" not in f"{caught.value} {caught.value.hint}"
    assert provider.wrap(KEY, CONTEXT)


def test_token_that_is_absent_is_unavailable(provider: Pkcs11Provider) -> None:
    with pytest.raises(ProviderUnavailableError, match="'absent' is not there"):
        replace(provider, token="absent").wrap(KEY, CONTEXT)


def test_two_tokens_of_one_name_are_refused(provider: Pkcs11Provider) -> None:
    with pytest.raises(ProviderError, match=r"'twins' failed \(MultipleTokensReturned\)"):
        replace(provider, token="twins").wrap(KEY, CONTEXT)


def test_module_that_is_none_is_unavailable(provider: Pkcs11Provider) -> None:
    for module in ("/no/such/module.so", sys.executable):
        with pytest.raises(ProviderUnavailableError, match="module cannot be used"):
            replace(provider, module=module).wrap(KEY, CONTEXT)


def test_process_that_is_logged_in_already_may_use_the_provider(
    provider: Pkcs11Provider, sessions: Sessions
) -> None:
    with sessions():
        blob = provider.wrap(KEY, CONTEXT)
        assert provider.unwrap(blob, CONTEXT) == KEY
    assert provider.unwrap(blob, CONTEXT) == KEY


def test_many_threads_may_use_the_provider(provider: Pkcs11Provider) -> None:
    start = threading.Barrier(4)

    def wrap_and_unwrap(_: int) -> bytes:
        start.wait()
        return provider.unwrap(provider.wrap(KEY, CONTEXT), CONTEXT)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(wrap_and_unwrap, range(4))) == {KEY}


class FailingKey:
    """A key whose token fails in the middle of a call, which SoftHSM cannot be made to do."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def encrypt(self, *_: object, **__: object) -> bytes:
        raise self._error

    decrypt = encrypt


@pytest.mark.parametrize(
    ("error", "action", "kind"),
    [
        ("DeviceRemoved", "wrap", ProviderUnavailableError),
        ("DeviceRemoved", "unwrap", ProviderUnavailableError),
        ("FunctionFailed", "wrap", ProviderError),
        ("FunctionFailed", "unwrap", ProviderRefusedError),
    ],
)
def test_token_that_fails_in_a_call_has_its_kind(
    provider: Pkcs11Provider,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    action: str,
    kind: type[ProviderError],
) -> None:
    blob = provider.wrap(KEY, CONTEXT)
    failing = FailingKey(getattr(pkcs11.exceptions, error)())
    monkeypatch.setattr(Pkcs11Provider, "_key", lambda *_: failing)
    with pytest.raises(ProviderError, match=error) as caught:
        getattr(provider, action)(KEY if action == "wrap" else blob, CONTEXT)
    assert type(caught.value) is kind


def test_provider_shown_hides_its_pin(provider: Pkcs11Provider) -> None:
    assert PIN not in repr(provider)
    assert "run-keys" in repr(provider)


def pin_file(folder: Path) -> Path:
    path = folder / "pin file"
    path.touch(mode=0o600)
    path.write_text(PIN + "\n")
    return path


def test_address_of_a_token_opens_it(provider: Pkcs11Provider, tmp_path: Path) -> None:
    source = str(pin_file(tmp_path)).replace(" ", "%20")
    address = (
        f"pkcs11:token={TOKEN};object=run%2Dkeys;type=secret-key"
        f"?module-path={provider.module}&pin-source=file:{source}"
    )
    opened = open_provider(address)
    assert opened == provider
    assert opened.unwrap(provider.wrap(KEY, CONTEXT), CONTEXT) == KEY


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("", "not complete"),
        ("token=a;object=b", "not complete"),
        ("token=a?module-path=c&pin-source=env:PIN", "not complete"),
        ("token=a;object=b?module-path=c", "not complete"),
        ("token=a;object=b;object=c?module-path=c&pin-source=env:PIN", "unknown part"),
        ("token=a;object=b;serial=1?module-path=c&pin-source=env:PIN", "unknown part"),
        ("token=;object=b?module-path=c&pin-source=env:PIN", "unknown part"),
        ("token;object=b?module-path=c&pin-source=env:PIN", "unknown part"),
        ("token=a;object=b;type=public?module-path=c&pin-source=env:PIN", "secret key"),
        ("token=a;object=b?module-path=c&pin-value=4711", "does not belong into an address"),
        ("token=a;object=b?module-path=c&pin-source=env:NO_SUCH_PIN", "no variable"),
    ],
)
def test_address_that_lacks_something_is_refused(place: str, reason: str) -> None:
    with pytest.raises(KeySourceError, match=reason) as caught:
        open_pkcs11(place)
    assert "4711" not in f"{caught.value} {caught.value.hint}"


def test_machine_without_the_library_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pkcs11", None)
    with pytest.raises(ProviderUnavailableError, match="needs python-pkcs11") as caught:
        Pkcs11Provider(module="m", token="t", key_id="k", pin="p").wrap(KEY, CONTEXT)
    assert caught.value.hint == 'pip install "ckptmgr[pkcs11]"'
