# SPDX-License-Identifier: Apache-2.0
"""Key slots for key services: the data key under the key of the run, beside the wrapped key of the run.

```
body   provider(1 + n) || key name(2 + n) || context(2 + n) || blob(2 + n) || salt(32) || wrapped(48)
```
Lengths come first, little-endian. The last two fields are those of a raw key slot for the key of the run, bound in addition
to the head of this slot and to everything before the salt. So a container needs nothing but itself and the service, and
many containers cost one call of it.

The provider named in a slot is only compared: a file never chooses which service is called.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import KeySourceError, TamperedError
from ..keys.key import Key
from ..providers.provider import context_bytes
from ..providers.run_key import RunKey, RunKeyReader
from . import Slot, SlotType, slot_head, slot_is_damaged
from .secret import RawKey

_RAW_BODY_BYTES = 32 + 48
_LENGTHS = (struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<H"), struct.Struct("<H"))


@dataclass(frozen=True, slots=True)
class KeyServiceRecipient:
    """Whoever the service lets unwrap the key of a run.

    Attributes:
        run_key: The key of the run; each slot counts as one of its files.
    """

    run_key: RunKey

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for the service.

        Raises:
            ProviderError: The service had to be called and gave nothing.
            KeySourceError: A name is too long for a slot.
        """
        wrapped = self.run_key.take()
        prefix = _pack(
            wrapped.provider.encode(),
            wrapped.provider_key_id.encode(),
            context_bytes(wrapped.context),
            wrapped.blob,
        )
        key_id = bytes.fromhex(wrapped.key.key_id)
        bound = _bound(bound, key_id, prefix)
        inner = RawKey(wrapped.key).wrap(data_key, bound=bound)
        return Slot(type=SlotType.KEY_SERVICE, key_id=key_id, body=prefix + inner.body)


@dataclass(frozen=True, slots=True)
class KeyServiceIdentity:
    """Whoever may call the service.

    Attributes:
        reader: Calls it, once for the key of each run.
    """

    reader: RunKeyReader

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None for a slot of another kind or service.

        Raises:
            ProviderError: The service gave no key.
            TamperedError: The slot is damaged.
        """
        if slot.type != SlotType.KEY_SERVICE:
            return None
        (provider, _, context, blob), raw_body = _parse(slot)
        if provider != self.reader.name.encode():
            return None
        run_key = self.reader.unwrap(blob, _context(context, slot))
        prefix = slot.body[: -len(raw_body)]
        inner = Slot(type=SlotType.RAW, key_id=slot.key_id, body=raw_body)
        data_key = RawKey(run_key).unwrap(inner, bound=_bound(bound, slot.key_id, prefix))
        if data_key is None:
            raise slot_is_damaged(slot)
        return data_key


def _bound(bound: bytes, key_id: bytes, prefix: bytes) -> bytes:
    size = len(prefix) + _RAW_BODY_BYTES
    return bound + slot_head(SlotType.KEY_SERVICE, key_id, body_size=size) + prefix


def _pack(*fields: bytes) -> bytes:
    try:
        return b"".join(
            length.pack(len(field)) + field for length, field in zip(_LENGTHS, fields, strict=True)
        )
    except struct.error:
        raise KeySourceError("a name of the key service is too long for a key slot") from None


def _parse(slot: Slot) -> tuple[list[bytes], bytes]:
    """Return the four fields before the salt, and the rest."""
    body, at, fields = slot.body, 0, []
    for length in _LENGTHS:
        if at + length.size > len(body):
            raise _is_cut(slot)
        (size,) = length.unpack_from(body, at)
        at += length.size
        fields.append(body[at : at + size])
        at += size
    if len(body) - at != _RAW_BODY_BYTES:
        raise _is_cut(slot)
    return fields, body[at:]


def _context(data: bytes, slot: Slot) -> Mapping[str, str]:
    try:
        document: object = json.loads(data)
        if isinstance(document, dict) and context_bytes(document) == data:
            return document
    except (ValueError, RecursionError, KeySourceError):
        pass
    raise TamperedError(f"the context in the {slot.label} slot is not valid")


def _is_cut(slot: Slot) -> TamperedError:
    return TamperedError(f"the lengths in the {slot.label} slot do not add up")
