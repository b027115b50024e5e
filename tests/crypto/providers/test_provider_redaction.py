# SPDX-License-Identifier: Apache-2.0
"""The output of a key program is shown without keys in it."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.providers.redaction import MAX_SHOWN_CHARACTERS, redact, spellings

SECRET = b"\xc0\xff\xee-Top-Secret!!"


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        SECRET.hex().encode(),
        SECRET.hex().upper().encode(),
        SECRET.hex(":").encode(),
        base64.b64encode(SECRET),
        base64.urlsafe_b64encode(SECRET),
    ],
    ids=["raw", "hex", "capital hex", "hex with colons", "base64", "base64 for URLs"],
)
def test_known_secret_in_every_spelling_is_hidden(form: bytes) -> None:
    shown = redact(b"cannot wrap '" + form + b"' today", secrets=(SECRET,))
    assert shown == "cannot wrap '(not shown)' today"


@given(secret=st.sampled_from((16, 24, 32)).flatmap(lambda n: st.binary(min_size=n, max_size=n)))
def test_unknown_secret_in_hex_or_base64_is_hidden(secret: bytes) -> None:
    for form in (secret.hex().encode(), base64.b64encode(secret), base64.urlsafe_b64encode(secret)):
        assert redact(b"got " + form, secrets=()) == "got (not shown)"


@given(secret=st.sampled_from((16, 24, 32)).flatmap(lambda n: st.binary(min_size=n, max_size=n)))
def test_unknown_secret_in_groups_or_escaped_is_hidden(secret: bytes) -> None:
    standard = base64.b64encode(secret)
    forms = [secret.hex(sep, size) for sep in (":", " ", "-", "\n") for size in (1, 2, 4)]
    forms += [form.upper() for form in forms]
    escaped = [standard.replace(b"/", rb"\/"), standard.replace(b"/", rb"\u002f")]
    for form in (*(text.encode() for text in forms), *escaped):
        assert redact(b"got " + form, secrets=()) == "got (not shown)"


@pytest.mark.parametrize("secret", [bytes(range(16)), bytes(range(240, 256)), b"\xff" * 32])
def test_unknown_secret_in_a_hexdump_is_hidden(secret: bytes) -> None:
    lines = [secret[at : at + 16].hex(" ", 2) for at in range(0, len(secret), 16)]
    dump = "\n".join(
        f"{16 * number:08x}: {line}  ................" for number, line in enumerate(lines)
    )
    shown = redact(dump.encode(), secrets=())
    assert not any(line[5:14] in shown for line in lines)
    padded = secret.hex(" ").replace(" ", "  ").encode()
    assert redact(b"key " + padded, secrets=()) == "key (not shown)"


@pytest.mark.parametrize(
    "words",
    [
        "AccessDeniedException: no permission for arn:aws:kms:eu-west-1:123456789012:key",
        "KMSInvalidStateException",
        "ModuleNotFoundError: No module named 'hvac'",
        "/usr/bin/vault: connection refused (127.0.0.1:8200)",
        "2026-11-21 14:03:21 error 403: access denied",
        "a bad face faced a decade",
        "add dad bed fed cab fad bee cafe dead beef: no such token",
    ],
)
def test_words_of_an_error_are_shown(words: str) -> None:
    assert redact(words.encode(), secrets=()) == words


def test_output_that_steers_a_terminal_is_made_harmless() -> None:
    assert redact(b"a\x1b]0;title\x07\r\n\tb \xff", secrets=()) == "a ]0;title b �"


def test_output_that_is_long_is_shown_from_its_end() -> None:
    shown = redact(b"word " * 1000 + b"last", secrets=())
    assert shown.startswith("... ")
    assert shown.endswith("word last")
    assert len(shown) == MAX_SHOWN_CHARACTERS + 4


def test_secret_that_the_end_cuts_in_two_is_hidden() -> None:
    output = SECRET.hex().encode() + b" " + b"w " * (MAX_SHOWN_CHARACTERS // 2 - 8)
    assert "6574" not in redact(output, secrets=())


def test_spellings_of_a_secret_are_what_it_may_look_like() -> None:
    assert spellings(b"\xff" * 16) == (
        b"\xff" * 16,
        b"ff" * 16,
        b":".join([b"ff"] * 16),
        b"/" * 21 + b"w",
        b"_" * 21 + b"w",
    )
