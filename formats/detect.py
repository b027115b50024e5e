# SPDX-License-Identifier: Apache-2.0
"""File kind detection from the first bytes.

Detection only chooses the parser (or the error message); the parser decides whether the file is
sound.

>>> from .source import BytesSource
>>> detect(BytesSource(bytes.fromhex("0a140a0170120f1207466c6f617433321a040000c03f")))
<Kind.MINDSPORE_CKPT: 'mindspore-ckpt'>
"""

from __future__ import annotations

import enum

from .compressed.table import COMPRESSED_MAGIC
from .mindspore.fields import CHECKPOINT_METADATA, CHECKPOINT_VALUE
from .mindspore.wire import encode_length_prefix
from .safetensors_file import JSON_SPACE
from .safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES
from .source import Source, read_bytes


class Kind(enum.Enum):
    """The kinds of files."""

    MINDSPORE_CKPT = "mindspore-ckpt"
    SAFETENSORS = "safetensors"
    MINDSPORE_ENCRYPTED = "mindspore-encrypted"
    """Cipher blocks of MindSpore: AES-GCM, AES-CBC or SM4-CBC."""
    CKPTMGR_CONTAINER = "ckptmgr-container"
    COMPRESSED = "ckptmgr-compressed"
    """Frames of zstd that stand for a safetensors file."""
    ZIP_PICKLE = "zip-pickle"
    """A ZIP archive, which is what `torch.save` writes. Never opened: it holds pickles."""
    UNKNOWN = "unknown"
    EMPTY = "empty"


_PROBE_BYTES = 16
_MAGICS = (
    (b"\x8fCKPE\r\n\x1a", Kind.CKPTMGR_CONTAINER),
    (COMPRESSED_MAGIC, Kind.COMPRESSED),
    (b"\xd8\x5e\x3a\x7f", Kind.MINDSPORE_ENCRYPTED),
    (b"\xd9\x5e\x3a\x7f", Kind.MINDSPORE_ENCRYPTED),
    (b"\xda\x5e\x3a\x7f", Kind.MINDSPORE_ENCRYPTED),
    (b"PK\x03\x04", Kind.ZIP_PICKLE),
    (encode_length_prefix(CHECKPOINT_VALUE, 0)[:-1], Kind.MINDSPORE_CKPT),
    (encode_length_prefix(CHECKPOINT_METADATA, 0)[:-1], Kind.MINDSPORE_CKPT),
)


def detect(source: Source) -> Kind:
    """Return the kind of a file."""
    head = read_bytes(source, 0, min(source.size, _PROBE_BYTES))
    if not head:
        return Kind.EMPTY
    # Before the magics: a header of 10 bytes starts like the first field of a .ckpt.
    if _is_safetensors(head):
        return Kind.SAFETENSORS
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    return Kind.UNKNOWN


def _is_safetensors(head: bytes) -> bool:
    header_bytes = int.from_bytes(head[:LENGTH_BYTES], "little")
    text = head[LENGTH_BYTES:]
    # The header may begin with white space, even more than was read here.
    is_object = bool(text) and text.lstrip(JSON_SPACE)[:1] in (b"{", b"")
    return is_object and header_bytes <= MAX_HEADER_BYTES
