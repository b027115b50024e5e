# SPDX-License-Identifier: Apache-2.0
"""A PKCS#11 token as the key service, such as a hardware security module: `ckptmgr[pkcs11]`.

```
blob   1(1) || nonce(12) || AES-GCM(key in the token, nonce, key, AAD = "ckptmgr/v1/wrap/pkcs11/" ||
context)
```
The key-encryption key is an AES key that never leaves the token; an extractable key is refused.
Each call opens a session and closes it, so nothing is held between saves. Calls of this process run
one at a time, because the login state of a token belongs to the process.

The address is that of RFC 7512, with the module and the source of the PIN:
`pkcs11:token=training;object=run-keys?module-path=/usr/lib/softhsm/libsofthsm2.so&pin-source=file:/run/pin`
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ..ciphers import Random
from ..errors import KeySourceError
from ..keys.sources import load_secret
from .provider import (
    ProviderError,
    ProviderRefusedError,
    ProviderUnavailableError,
    check_blob,
    check_key_size,
    check_unwrapped,
    context_bytes,
)

if TYPE_CHECKING:
    import pkcs11

_VERSION = b"\x01"
_NONCE_BYTES = 12
_TAG_BITS = 128
_AAD_PREFIX = b"ckptmgr/v1/wrap/pkcs11/"
_FORM = "write pkcs11:token=TOKEN;object=KEY?module-path=FILE&pin-source=file:PATH"
_PIN_ERRORS = (
    "PinExpired",
    "PinIncorrect",
    "PinInvalid",
    "PinLenRange",
    "PinLocked",
    "UserPinNotInitialized",
)
_ABSENT_ERRORS = (
    "DeviceError",
    "DeviceMemory",
    "DeviceRemoved",
    "NoSuchToken",
    "SessionCount",
    "TokenNotPresent",
    "TokenNotRecognised",
)
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pkcs11Provider:
    """An AES key in a token.

    Attributes:
        module: The PKCS#11 library of the token's maker.
        token: Label of the token.
        key_id: Label of the key.
        pin: PIN of the user; never shown.
        random: Returns that many unpredictable bytes.

    Source: PKCS #11 v3.0 section 2.12.3 (AES-GCM); NIST SP 800-38D section 8.2.2 (random nonces).
    """

    module: str
    token: str
    key_id: str
    pin: str = field(repr=False)
    random: Random = field(default=os.urandom, repr=False)

    @property
    def name(self) -> str:
        """`pkcs11`."""
        return "pkcs11"

    def wrap(self, key: bytes, context: Mapping[str, str]) -> bytes:
        """Return the wrapped key; raises as `KeyProvider.wrap`."""
        check_key_size(key)
        nonce = self.random(_NONCE_BYTES)
        sealed = self._ask("encrypt", key, nonce=nonce, context=context)
        return check_blob(_VERSION + nonce + sealed, provider=self.name)

    def unwrap(self, blob: bytes, context: Mapping[str, str]) -> bytes:
        """Return the key inside `blob`; raises as `KeyProvider.unwrap`."""
        if not blob.startswith(_VERSION) or len(blob) <= 1 + _NONCE_BYTES:
            raise ProviderRefusedError("this blob was not wrapped by a token of this version")
        nonce, sealed = blob[1 : 1 + _NONCE_BYTES], blob[1 + _NONCE_BYTES :]
        key = self._ask("decrypt", sealed, nonce=nonce, context=context)
        return check_unwrapped(key, provider=self.name)

    def _ask(self, action: str, data: bytes, *, nonce: bytes, context: Mapping[str, str]) -> bytes:
        aad = _AAD_PREFIX + context_bytes(context)
        try:
            import pkcs11
        except ImportError:
            raise ProviderUnavailableError(
                "a PKCS#11 token needs python-pkcs11", hint='pip install "ckptmgr[pkcs11]"'
            ) from None
        parameters = pkcs11.GCMParams(nonce, aad, _TAG_BITS)
        with _one_at_a_time, self._session() as session:
            call = getattr(self._key(session), action, None)
            if call is None:
                raise ProviderRefusedError(f"the key {self.key_id!r} may not {action}")
            try:
                return bytes(
                    call(data, mechanism=pkcs11.Mechanism.AES_GCM, mechanism_param=parameters)
                )
            except pkcs11.PKCS11Error as error:
                raise _of_operation(error, action) from None

    @contextlib.contextmanager
    def _session(self) -> Iterator[pkcs11.Session]:
        import pkcs11

        try:
            library = pkcs11.lib(self.module)
        except pkcs11.PKCS11Error as error:
            raise ProviderUnavailableError(
                f"the PKCS#11 module cannot be used: {error}", hint="check module-path"
            ) from None
        try:
            token = library.get_token(token_label=self.token)
            with self._opened(token) as session:
                yield session
        except pkcs11.PKCS11Error as error:
            raise self._translated(error) from None

    def _opened(self, token: pkcs11.Token) -> pkcs11.Session:
        import pkcs11

        try:
            return token.open(user_pin=self.pin)
        except pkcs11.UserAlreadyLoggedIn:
            # Other code in this process has; a login holds for all of its sessions.
            return token.open()

    def _key(self, session: pkcs11.Session) -> pkcs11.Key:
        import pkcs11

        try:
            key = session.get_key(
                object_class=pkcs11.ObjectClass.SECRET_KEY,
                key_type=pkcs11.KeyType.AES,
                label=self.key_id,
            )
        except pkcs11.MultipleObjectsReturned:
            key = None
        # Raised here: that error keeps a search alive, which must end before its session.
        if key is None:
            raise ProviderRefusedError(
                f"the token {self.token!r} has several AES keys {self.key_id!r}",
                hint="give them different labels",
            )
        if key[pkcs11.Attribute.EXTRACTABLE] or not key[pkcs11.Attribute.SENSITIVE]:
            raise ProviderRefusedError(
                f"the key {self.key_id!r} can be read out of the token",
                hint="make one that is sensitive and not extractable",
            )
        return key

    def _translated(self, error: pkcs11.PKCS11Error) -> ProviderError:
        kind = type(error).__name__
        if kind in _PIN_ERRORS:
            return ProviderRefusedError(
                f"the token {self.token!r} does not take the PIN ({kind})",
                hint="do not try again before it is right: tokens lock themselves",
            )
        if kind in _ABSENT_ERRORS:
            return ProviderUnavailableError(f"the token {self.token!r} is not there ({kind})")
        if kind == "NoSuchKey":
            return ProviderRefusedError(
                f"the token {self.token!r} has no AES key {self.key_id!r}",
                hint="its label is what counts",
            )
        return ProviderError(f"the token {self.token!r} failed ({kind})")


def open_pkcs11(place: str) -> Pkcs11Provider:
    """Return the provider at an RFC 7512 address without its scheme; reads the PIN.

    Raises:
        KeySourceError: The address lacks a part, has an unknown one, or the source gives no PIN.

    Source: RFC 7512 section 2.3.
    """
    path, _, query = place.partition("?")
    words = _words(path, ";", known=("token", "object", "type"))
    settings = _words(query, "&", known=("module-path", "pin-source"))
    if words.pop("type", "secret-key") != "secret-key":
        raise KeySourceError("a token wraps with a secret key", hint=_FORM)
    if len(words) + len(settings) != 4:
        raise KeySourceError("the address of the token is not complete", hint=_FORM)
    return Pkcs11Provider(
        module=settings["module-path"],
        token=words["token"],
        key_id=words["object"],
        pin=load_secret(settings["pin-source"]),
    )


def _words(text: str, separator: str, *, known: tuple[str, ...]) -> dict[str, str]:
    """Return the parts `name=value` of an address; errors never show values, one may be a PIN."""
    words: dict[str, str] = {}
    for part in filter(None, text.split(separator)):
        name, equals, value = part.partition("=")
        if name == "pin-value":
            raise KeySourceError("a PIN does not belong into an address", hint="use pin-source")
        if name not in known or name in words or not equals or not value:
            raise KeySourceError("the address of the token has an unknown part", hint=_FORM)
        words[name] = unquote(value)
    return words


def _of_operation(error: pkcs11.PKCS11Error, action: str) -> ProviderError:
    kind = type(error).__name__
    if kind in _ABSENT_ERRORS:
        return ProviderUnavailableError(f"the token is not there any more ({kind})")
    if action == "encrypt":
        return ProviderError(f"the token did not wrap the key ({kind})")
    # SoftHSM reports GeneralError for everything, so we cannot say more.
    return ProviderRefusedError(
        f"the token does not unwrap this blob ({kind})",
        hint="another key or another context wrapped it, or it was changed",
    )
