# SPDX-License-Identifier: Apache-2.0
"""Key sources: `env:NAME`, `file:PATH`, `cmd:COMMAND`, `fd:N`, `prompt:` or `wrapped:FILE`.

A key service unwraps a wrapped key, see `providers`. The other sources yield the key itself, in
these forms (one newline at the end of text is allowed):

* `hex:...`, `base64:...` and `raw:...` state the encoding and are always understood.
* Otherwise, 32, 48 or 64 hex digits are hex, and padded base64 (either alphabet) of 16, 24 or 32
  bytes is base64. Text that is both, which only 32 hex digits are, is hex.
* Otherwise, exactly 16, 24 or 32 bytes from a file, a descriptor or a command are the key itself.
* Bytes that could be both are refused: a file of exactly 32 hex digits without a newline may be a
  16-byte key in hex or a 32-byte key. The error asks for a prefix.

>>> load_key("prompt:", prompt=lambda question: "000102030405060708090a0b0c0d0e0f")
Key(16 bytes, id b2685a452d114388)
"""

from __future__ import annotations

import base64
import binascii
import getpass
import os
import re
import shlex
import subprocess
from collections.abc import Callable

from ..errors import KeySourceError
from ..secret_bytes import SecretBytes
from .child_environment import child_environment, hide_variable
from .key import KEY_SIZES, Key
from .source_names import is_variable
from .trusted_files import MAX_SOURCE_BYTES, read_all, read_trusted_file, shown_name

_SOURCES = "env:NAME, file:PATH, cmd:COMMAND, fd:N, prompt: or wrapped:FILE"
_HEX = re.compile(rb"(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{48}|[0-9A-Fa-f]{64})\Z")
_COMMAND_TIMEOUT_S = 300.0


def load_key(
    source: str,
    *,
    prompt: Callable[[str], str] = getpass.getpass,
    timeout_s: float = _COMMAND_TIMEOUT_S,
) -> Key:
    """Return the key that `source` names.

    Args:
        source: `env:NAME`, `file:PATH`, `cmd:COMMAND` (split like a shell does, but run without
            one), `fd:N`, `prompt:`, or `wrapped:FILE` for a key that the service at
            `CKPTMGR_KEY_SERVICE` unwraps.
        prompt: Asks the user without showing the answer.
        timeout_s: Time limit of a command.

    Raises:
        KeySourceError: The source is unknown or gives no key. The message never shows its content.
    """
    if source.startswith("wrapped:"):
        from ..providers.wrapped_file import load_wrapped_key  # which needs this module

        return load_wrapped_key(source.removeprefix("wrapped:"))
    scheme, content = read_source(source, prompt=prompt, timeout_s=timeout_s)
    return decode_key(content, scheme=scheme)


def load_secret(
    source: str,
    *,
    is_public: bool = False,
    prompt: Callable[[str], str] = getpass.getpass,
) -> str:
    """Return the text of a source, such as the PIN of a token, without one newline at its end.

    With `is_public`, others may read a file, though not change it.

    Raises:
        KeySourceError: The source is unknown or gives no text. The message never shows its content.
    """
    _, content = read_source(
        source,
        is_public=lambda _: is_public,
        prompt=lambda _: prompt("PIN: "),
    )
    try:
        return _line(content).decode("utf-8")
    except UnicodeDecodeError:
        raise KeySourceError("the source gave bytes that are no text") from None


def decode_key(content: bytes, *, scheme: str) -> Key:
    """Return the key in the content of a source of this scheme; raises as `load_key`."""
    stated = _stated(content)
    if stated is not None:
        return Key(stated)
    text = _text(content)
    is_raw = scheme in ("file", "cmd", "fd") and len(content) in KEY_SIZES
    if text is not None and is_raw:
        raise KeySourceError(
            f"{len(content)} bytes could be the key itself or its text form",
            hint="put hex:, base64: or raw: in front of it",
        )
    if text is not None:
        return Key(text)
    if is_raw:
        return Key(content)
    raise KeySourceError(
        f"the {len(content)} bytes of the key source are no key",
        hint="a key is 16, 24 or 32 bytes, in hex, in base64 or (not in env: and prompt:) as they are",
    )


def read_source(
    source: str,
    *,
    prompt: Callable[[str], str],
    timeout_s: float = _COMMAND_TIMEOUT_S,
    is_public: Callable[[bytes], bool] = lambda _: False,
) -> tuple[str, SecretBytes]:
    """Return the scheme of a source (not `wrapped:`) and its content, 1 to 4096 bytes.

    `is_public` decides by the content of a file whether others may read it.

    Raises:
        KeySourceError: The source is unknown or gives nothing. The message never shows its content.
    """
    scheme, separator, place = source.partition(":")
    if not separator or scheme not in ("env", "file", "cmd", "fd", "prompt"):
        raise KeySourceError(
            "this is not a key source",
            hint=f"use {_SOURCES}; never put a key on a command line, where every user can read it",
        )
    if scheme == "env":
        content = _from_environment(place)
    elif scheme == "file":
        content = read_trusted_file(place, is_public=is_public)
    elif scheme == "cmd":
        content = _from_command(place, timeout_s=timeout_s)
    elif scheme == "fd":
        content = _from_descriptor(place)
    else:
        content = _from_person(prompt)
    if not content:
        raise KeySourceError("the key source is empty")
    if len(content) > MAX_SOURCE_BYTES:
        raise KeySourceError(f"the key source gave more than {MAX_SOURCE_BYTES} bytes")
    return scheme, content


def _from_environment(name: str) -> SecretBytes:
    hide_variable(name)
    try:
        return SecretBytes(os.environb[os.fsencode(name)])
    except (KeyError, UnicodeError):
        shown = repr(name) if is_variable(name) else "of this name (not shown: it may be a key)"
        raise KeySourceError(f"the environment has no variable {shown}") from None


def _from_command(command: str, *, timeout_s: float) -> SecretBytes:
    try:
        arguments = shlex.split(command)
    except ValueError:
        raise KeySourceError("the key command has an unfinished quotation or escape") from None
    if not arguments:
        raise KeySourceError("the key command is empty", hint="write cmd:COMMAND")
    try:
        # The user names the program, as in ssh's or restic's password commands. It shares our
        # stderr.
        process = subprocess.run(  # noqa: S603
            arguments,
            stdout=subprocess.PIPE,
            env=child_environment(),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise KeySourceError(f"the key command gave no key within {timeout_s} s") from None
    except (OSError, ValueError):
        raise KeySourceError(f"the key command {shown_name(arguments[0])} cannot be run") from None
    process.stdout = content = SecretBytes(process.stdout)
    if process.returncode:
        raise KeySourceError(f"the key command failed with status {process.returncode}")
    return content


def _from_descriptor(number: str) -> SecretBytes:
    if not re.fullmatch(r"[0-9]{1,9}", number):
        raise KeySourceError("a key descriptor is a number", hint="write fd:3")
    try:
        return read_all(int(number))
    except OSError as error:
        raise KeySourceError(
            f"the key descriptor {number} cannot be read: {error.strerror}"
        ) from None


def _from_person(prompt: Callable[[str], str]) -> SecretBytes:
    try:
        return SecretBytes(os.fsencode(prompt("Key (hex or base64): ")))
    except (EOFError, OSError, UnicodeError):
        raise KeySourceError("nobody answered the prompt for the key") from None


def _stated(content: bytes) -> bytes | None:
    """Return the key of a content that states its encoding, or None."""
    encoding, separator, rest = content.partition(b":")
    if not separator:
        return None
    if encoding == b"raw" and len(rest) in KEY_SIZES:
        return rest
    line = _line(rest)
    if encoding == b"hex":
        return _from_hex(line)
    if encoding == b"base64":
        return _from_base64(line)
    return None


def _text(content: bytes) -> bytes | None:
    """Return the key that `content` spells in hex or base64, or None."""
    line = _line(content)
    key = _from_hex(line)
    return key if key is not None else _from_base64(line)


def _line(content: bytes) -> bytes:
    return content.removesuffix(b"\n").removesuffix(b"\r")


def _from_hex(line: bytes) -> bytes | None:
    return SecretBytes(bytes.fromhex(line.decode("ascii"))) if _HEX.match(line) else None


def _from_base64(line: bytes) -> bytes | None:
    try:
        key = base64.b64decode(line.translate(bytes.maketrans(b"-_", b"+/")), validate=True)
    except binascii.Error:
        return None
    return SecretBytes(key) if len(key) in KEY_SIZES else None
