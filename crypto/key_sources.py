# SPDX-License-Identifier: Apache-2.0
"""Everything that opens files, by source: keys as in `keys`, passphrases, and files of public and private keys.

| source | gives |
|---|---|
| `file:run.key`, `env:RUN_KEY`, `cmd:...`, `fd:3`, `prompt:`, `wrapped:FILE` | a key |
| `passphrase:prompt:`, `passphrase:env:NAME` and so on | a passphrase: the text that the source gives |
| `file:alice.pem`, or another source that gives PEM | a private key |
| `file:alice.pem.pub`, or another source that gives PEM | a public key, which only encrypts |

>>> load_material("passphrase:prompt:", prompt=lambda question: "correct horse")
KeyMaterial(passphrase, not shown)
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Sequence

from .key_files import is_pem, is_public_pem
from .keyring import KeyMaterial, KeyRing, Keys, Kind
from .keys import decode_key, load_key, load_secret, read_source

SCHEMES = ("env:", "file:", "cmd:", "fd:", "prompt:", "wrapped:", "passphrase:")

_PHRASE = "passphrase:"


def load_material(
    source: str, *, insecure: bool = False, prompt: Callable[[str], str] = getpass.getpass
) -> KeyMaterial:
    """Return what a source gives.

    Args:
        source: As in the table above.
        insecure: Whether files of secrets may be readable by others or belong to somebody else.
        prompt: Asks a person without showing the answer.

    Raises:
        KeySourceError: The source is unknown or gives nothing of the kind. The message never shows what it gave.
    """
    if source.startswith(_PHRASE):
        text = load_secret(
            source.removeprefix(_PHRASE),
            insecure=insecure,
            prompt=lambda _: prompt("Passphrase: "),
        )
        return _checked(KeyMaterial(Kind.PHRASE, text.encode("utf-8")))
    if source.startswith("wrapped:"):
        return KeyMaterial.of_key(load_key(source))
    scheme, content = read_source(source, insecure=insecure, is_public=is_public_pem, prompt=prompt)
    if is_pem(content):
        return _checked(KeyMaterial(Kind.PEM, content))
    return KeyMaterial.of_key(decode_key(content, scheme=scheme))


def load_keys(
    sources: Sequence[str],
    *,
    also_for: Sequence[str] = (),
    prompt: Callable[[str], str] = getpass.getpass,
) -> Keys:
    """Return what opens, and for whom to encrypt; a single key as such.

    Args:
        sources: Of those who encrypt, and open as far as they can.
        also_for: Of those who open besides, usually files of public keys.
        prompt: As for `load_material`.

    Raises:
        KeySourceError: As `load_material`, or there is nobody.
    """
    own = [load_material(source, prompt=prompt) for source in sources]
    ring = KeyRing(own, [load_material(source, prompt=prompt) for source in also_for])
    return ring if ring.sole_key is None else ring.sole_key


def _checked(material: KeyMaterial) -> KeyMaterial:
    """Return the material if it can be used; better here than at the first save."""
    material.parties()
    return material
