# SPDX-License-Identifier: Apache-2.0
"""The file of a wrapped key, from which a key service makes the key of a run. Not secret.

```
{"version": 1, "provider": "aws-kms", "key_id": "alias/training", "context": {"run": "7f"}, "blob":
BASE64}
```
The service is never taken from the file: `CKPTMGR_KEY_SERVICE` holds its address, and `provider` is
only compared.

A user with write access to the file chooses the key, among those that the service unwraps. So a
file that others can change is refused, and a stated context (`CKPTMGR_KEY_CONTEXT`, such as
`run=7f` or `run=7f,purpose=eval`) must be the one in the file.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import KeySourceError
from ..keys.key import Key
from ..keys.sources import load_secret
from ..keys.trusted_files import MAX_SOURCE_BYTES
from .provider import KeyProvider, context_bytes
from .registry import open_provider
from .run_key import RunKeyReader, WrappedKey

SERVICE_VARIABLE = "CKPTMGR_KEY_SERVICE"
CONTEXT_VARIABLE = "CKPTMGR_KEY_CONTEXT"

_VERSION = 1
_MEMBERS = {"version", "provider", "key_id", "context", "blob"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """The content of the file of a wrapped key; see `WrappedKey`."""

    provider: str
    key_id: str
    context: Mapping[str, str]
    blob: bytes = field(repr=False)


def pack_key_file(wrapped: WrappedKey) -> bytes:
    """Return the file of a wrapped key: a line of JSON.

    Raises:
        KeySourceError: It would be longer than a key file may be.
    """
    document = {
        "version": _VERSION,
        "provider": wrapped.provider,
        "key_id": wrapped.provider_key_id,
        "context": dict(wrapped.context),
        "blob": base64.b64encode(wrapped.blob).decode("ascii"),
    }
    data = json.dumps(document).encode("ascii") + b"\n"
    if len(data) > MAX_SOURCE_BYTES:
        raise KeySourceError(
            f"the wrapped key takes {len(data)} bytes, more than {MAX_SOURCE_BYTES}",
            hint="shorten its context",
        )
    return data


def parse_key_file(text: str) -> KeyFile:
    """Parse the text of a file.

    Raises:
        KeySourceError: It is not the file of a wrapped key.
    """
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError):
        raise _not_wrapped("it is not JSON") from None
    if not isinstance(document, dict) or document.keys() != _MEMBERS:
        raise _not_wrapped("its members are others")
    version, context = document["version"], document["context"]
    if type(version) is not int or version != _VERSION:
        raise _not_wrapped(f"its version is not {_VERSION}")
    if not isinstance(context, dict):
        raise _not_wrapped("its context is not an object")
    context_bytes(context)
    try:
        blob = base64.b64decode(_text(document, "blob"), validate=True)
    except ValueError:  # binascii.Error is one
        raise _not_wrapped("its blob is not base64") from None
    return KeyFile(
        provider=_text(document, "provider"),
        key_id=_text(document, "key_id"),
        context=context,
        blob=blob,
    )


def _text(document: Mapping[str, object], name: str) -> str:
    value = document[name]
    if not isinstance(value, str):
        raise _not_wrapped(f"its {name} is not a text")
    return value


def load_wrapped_key(
    path: str,
    *,
    service: KeyProvider | None = None,
    context: Mapping[str, str] | None = None,
) -> Key:
    """Return the key inside a file; one call of the service.

    Args:
        path: The file.
        service: Unwraps the key; None takes the service at the address in `CKPTMGR_KEY_SERVICE`.
        context: The required context; None takes that of `CKPTMGR_KEY_CONTEXT`, and without it
            accepts any.

    Raises:
        KeySourceError: The file or the address is invalid, they name different kinds of service,
            others can change the file, or it is bound to another context.
        ProviderError: The service gave no key.
    """
    found = parse_key_file(load_secret(f"file:{path}", is_public=True))
    expected = _stated_context() if context is None else context
    if expected is not None and found.context != expected:
        raise KeySourceError(
            "the wrapped key is bound to another context than the stated one",
            hint=f"take the file of this run, or correct {CONTEXT_VARIABLE}",
        )
    if service is None:
        address = os.environ.get(SERVICE_VARIABLE)
        if not address:
            raise KeySourceError(
                f"the key service {found.provider!r} wrapped this key, and {SERVICE_VARIABLE} names none",
                hint=f"set {SERVICE_VARIABLE} to its address, such as aws-kms:alias/training",
            )
        service = open_provider(address)
    if service.name != found.provider:
        raise KeySourceError(
            f"the key service {found.provider!r} wrapped this key, and the given one is {service.name!r}"
        )
    return RunKeyReader(service).unwrap(found.blob, found.context)


def _stated_context() -> Mapping[str, str] | None:
    """Return the context that the environment states, or None."""
    stated = os.environ.get(CONTEXT_VARIABLE)
    if stated is None:
        return None
    words = [word.partition("=") for word in stated.split(",")]
    context = {name: value for name, _, value in words}
    if len(context) < len(words) or not all(name and equals for name, equals, _ in words):
        # An empty one is an error, too: a script with an unset variable must not skip the
        # comparison.
        raise KeySourceError(
            f"{CONTEXT_VARIABLE} states no context",
            hint="it is NAME=VALUE, or several with commas between them, such as run=7f,purpose=eval",
        )
    return context


def _not_wrapped(reason: str) -> KeySourceError:
    # The content is not shown: it may be a key that was not wrapped.
    return KeySourceError(
        f"this is not the file of a wrapped key: {reason}",
        hint="ckptmgr keygen --service ADDRESS makes one; a plain key is given as file:PATH",
    )
