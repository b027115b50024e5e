# SPDX-License-Identifier: Apache-2.0
"""Keys of the API: bytes, as in MindSpore, or the source of a key or passphrase.

>>> resolve_keys("enc_key", bytes(16), mode="AES-GCM", format="ckpt")
Key(16 bytes, id fcaf80b25b219f3f)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmgr.config.checks import check_cipher, check_raw_key
from ckptmgr.core.errors import KeyProblem
from ckptmgr.crypto.errors import CryptoError

if TYPE_CHECKING:  # slow to import, and needed with keys only
    from ckptmgr.crypto.keys.ring import Keys

_ANY_KEY = bytes(16)  # of a length that every mode takes


def check_given_key(name: str, given: object) -> bytes | str | None:
    """Return a key, the source of one, or None; the message never shows the value."""
    if isinstance(given, str) and _is_source(given):
        return given
    key = check_raw_key(name, given)
    if key is None:
        return None
    from ckptmgr.crypto.secret_bytes import SecretBytes

    return SecretBytes(key)


def _is_source(given: str) -> bool:
    from ckptmgr.crypto.keys.material import SCHEMES

    return given.startswith(SCHEMES)


def check_recipients(given: Iterable[str]) -> tuple[str, ...]:
    """Return the sources of further recipients; the message never shows the values."""
    if isinstance(given, str | bytes):
        raise TypeError("'enc_recipients' must be a list of sources, not one of them")
    sources: tuple[object, ...] = tuple(given)
    checked = tuple(one for one in sources if isinstance(one, str) and _is_source(one))
    if len(checked) < len(sources):
        raise KeyProblem(
            "'enc_recipients' are sources of keys (not shown)",
            hint="such as 'file:alice.pem.pub' or 'passphrase:env:NAME'",
        )
    return checked


def resolve_keys(
    name: str,
    given: object,
    *,
    mode: str,
    format: str,
    recipients: Iterable[str] = (),
    is_for_reading: bool = False,
) -> Keys | None:
    """Return the keys, or None for plain files; reads the sources once, now.

    The prompt for a new passphrase asks twice. `name` is the parameter, for messages. With
    `is_for_reading`, the file decides which of the keys opens it.

    Raises:
        ValueError: `given` is neither bytes nor a source; the message is MindSpore's.
        KeyProblem: The mode is unknown, a source fails, or the format takes one kind of key only.
    """
    checked, others = check_given_key(name, given), check_recipients(recipients)
    if not isinstance(checked, str) and not others:
        check_cipher(checked, mode, format=format)
        if checked is None:
            return None
    from ckptmgr.crypto.keys.key import Key

    if isinstance(checked, bytes) and not others:
        return Key(checked)
    keys = _loaded(name, checked, others, is_new=not is_for_reading)
    if isinstance(keys, Key):
        check_cipher(keys.raw, mode, format=format)
        return keys
    check_cipher(_ANY_KEY, mode, format=format)
    if format == "ckpt" and not is_for_reading:
        raise KeyProblem(
            "an encrypted .ckpt, which MindSpore can open, takes one key and nothing else",
            hint="format='safetensors' takes passphrases, public keys and several recipients",
        )
    return keys


def _loaded(
    name: str, given: bytes | str | None, recipients: tuple[str, ...], *, is_new: bool
) -> Keys:
    from ckptmgr.crypto.keys.key import Key
    from ckptmgr.crypto.keys.material import load_material
    from ckptmgr.crypto.keys.ring import KeyMaterial, KeyRing

    try:
        own = []
        if isinstance(given, str):
            own = [load_material(given, asked_for=name, is_new=is_new)]
        elif given is not None:
            own = [KeyMaterial.of_key(Key(given))]
        others = [
            load_material(source, asked_for="enc_recipients", is_new=True) for source in recipients
        ]
        ring = KeyRing(own, others)
    except CryptoError as error:
        raise KeyProblem(error.message, hint=error.hint) from error
    return ring if ring.sole_key is None or not own else ring.sole_key
