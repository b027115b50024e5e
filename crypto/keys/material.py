# SPDX-License-Identifier: Apache-2.0
"""Key material of every kind, by source: keys, passphrases, and files of public and private keys.

| source | gives |
|---|---|
| `file:run.key`, `env:RUN_KEY`, `cmd:...`, `fd:3`, `prompt:`, `wrapped:FILE` | a key |
| `passphrase:prompt:`, `passphrase:env:NAME` and so on | a passphrase: the text that the source
gives |
| `file:alice.pem`, or another source that gives PEM | a private key |
| `file:alice.pem.pub`, or another source that gives PEM | a public key, which only encrypts |

A secret that is typed to encrypt with is asked for twice: a typing error would make the file
unreadable.

>>> load_material("passphrase:prompt:", prompt=lambda question: "correct horse")
KeyMaterial(passphrase, not shown)
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Sequence

from ..errors import KeySourceError
from .child_environment import hide_source_variables
from .pem import is_pem, is_public_pem
from .ring import KeyKind, KeyMaterial, KeyRing, Keys
from .sources import decode_key, load_key, load_secret, read_source

SCHEMES = ("env:", "file:", "cmd:", "fd:", "prompt:", "wrapped:", "passphrase:")

_PHRASE = "passphrase:"


def ask_person(question: str) -> str:
    """Ask the user at the terminal, without showing the answer."""
    return getpass.getpass(question)


def load_material(
    source: str,
    *,
    asked_for: str | None = None,
    is_new: bool = False,
    prompt: Callable[[str], str] = ask_person,
) -> KeyMaterial:
    """Return the key material of a source.

    `asked_for` names the option or parameter in the question to the user. With `is_new`, the
    material is for encryption, and the user is asked twice.

    Raises:
        KeySourceError: The source is unknown or gives nothing of the kind, or the two answers
            differ. The message never shows its content.
    """

    def ask(what: str) -> Callable[[str], str]:
        question = what if asked_for is None else f"{what} for {asked_for}"
        return lambda _: _answered(question, prompt, is_new=is_new)

    if source.startswith(_PHRASE):
        text = load_secret(source.removeprefix(_PHRASE), prompt=ask("Passphrase"))
        return _checked(KeyMaterial(KeyKind.PHRASE, text.encode("utf-8")))
    if source.startswith("wrapped:"):
        return KeyMaterial.of_key(load_key(source))
    scheme, content = read_source(
        source, is_public=is_public_pem, prompt=ask("Key (hex or base64)")
    )
    if is_pem(content):
        return _checked(KeyMaterial(KeyKind.PEM, content))
    return KeyMaterial.of_key(decode_key(content, scheme=scheme))


def load_keys(
    sources: Sequence[str],
    *,
    also_for: Sequence[str] = (),
    asked_for: str | None = None,
    is_new: bool = False,
    prompt: Callable[[str], str] = ask_person,
) -> Keys:
    """Return the keys of some sources; a single symmetric key as such.

    `sources` encrypt and, where they can, open; duplicates count once. `also_for` are further
    recipients, usually files of public keys. See `load_material` for the rest.

    Raises:
        KeySourceError: As `load_material`, or there is no source.
    """
    hide_source_variables((*sources, *also_for))
    own = [
        load_material(source, asked_for=asked_for, is_new=is_new, prompt=prompt)
        for source in sources
    ]
    others = [
        load_material(source, asked_for=asked_for, is_new=True, prompt=prompt)
        for source in also_for
    ]
    ring = KeyRing(list(dict.fromkeys(own)), others)
    return ring if ring.sole_key is None else ring.sole_key


def _answered(question: str, prompt: Callable[[str], str], *, is_new: bool) -> str:
    answer = prompt(f"{question}: ")
    if is_new and prompt(f"{question}, once more: ") != answer:
        raise KeySourceError("the two answers differ", hint="nothing was changed; try again")
    return answer


def _checked(material: KeyMaterial) -> KeyMaterial:
    """Return the material after a check that it can be used, before the first save needs it."""
    material.parties()
    return material
