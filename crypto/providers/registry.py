# SPDX-License-Identifier: Apache-2.0
"""Opens key services by their addresses.

| address | service |
|---|---|
| `local:SOURCE` | a key of the user, from `env:`, `file:`, `cmd:`, `fd:` or `prompt:` |
| `exec:COMMAND` | a program; see `exec` |
| `aws-kms:KEY` | AWS KMS, by key id, ARN or alias; `ckptmgr[aws]` |
| `pkcs11:...` | a hardware token, by its RFC 7512 address; `ckptmgr[pkcs11]` |

Other packages add theirs as entry points of the group `ckptmgr.keyproviders`: the name is the
scheme, the object a function that takes the rest of the address and returns a `KeyProvider`. They
cannot replace one of these four.

>>> open_provider("local:cmd:printf hex:000102030405060708090a0b0c0d0e0f").key_id
'b2685a452d114388'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from ..errors import KeySourceError
from .provider import KeyProvider, ProviderUnavailableError

ENTRY_POINT_GROUP = "ckptmgr.keyproviders"
BUILT_IN = {
    "local": ("local", "open_local"),
    "exec": ("exec", "open_exec"),
    "aws-kms": ("aws_kms", "open_aws_kms"),
    "pkcs11": ("pkcs11", "open_pkcs11"),
}

_Opener = Callable[[str], KeyProvider]


def open_provider(address: str, *, installed: Iterable[EntryPoint] | None = None) -> KeyProvider:
    """Return the service at `address`. The service itself is not called yet.

    The address is `SCHEME:PLACE`, never with a secret in it. `installed` are the entry points of
    other packages; None looks them up.

    Raises:
        KeySourceError: No service has this scheme, or the place is not valid for it.
        ProviderUnavailableError: A package that the service needs is not installed.
    """
    scheme, separator, place = address.partition(":")
    if not separator:
        raise _unknown()
    if scheme in BUILT_IN:
        module, function = BUILT_IN[scheme]
        home = import_module(f".{module}", __package__)
        return cast(_Opener, getattr(home, function))(place)
    if installed is None:
        installed = entry_points(group=ENTRY_POINT_GROUP)
    found = [point for point in installed if point.name == scheme]
    if not found:
        raise _unknown()
    if len(found) > 1:
        raise KeySourceError(f"{len(found)} packages offer the key service {scheme!r}")
    return _load(found[0])(place)


def _load(point: EntryPoint) -> _Opener:
    try:
        return cast(_Opener, point.load())
    except (ImportError, AttributeError) as error:
        raise ProviderUnavailableError(
            f"the key service {point.name!r} cannot be loaded: {error}",
            hint="install the package again",
        ) from error


def _unknown() -> KeySourceError:
    # The address is not repeated: it may be a key in the wrong place.
    schemes = ", ".join(f"{scheme}:" for scheme in BUILT_IN)
    return KeySourceError(
        "no key service has this address",
        hint=f"it starts with {schemes} or the name of an installed service",
    )
