# SPDX-License-Identifier: Apache-2.0
"""A small state as one text: its skeleton, its tensors in Base64, and a CRC32 over both.

>>> unpack(pack({"count": 7, "order": [2, 0, 1]}))
{'count': 7, 'order': [2, 0, 1]}
"""

from __future__ import annotations

import base64
import binascii
import json

import numpy as np

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.formats.dtypes import dtype_of
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.file_crc import crc32
from ckptmgr.formats.strict_json import check_memory, most_memory, parse_bounded
from ckptmgr.state.paths import TreeError
from ckptmgr.state.tree import flatten, unflatten


def pack(state: object) -> str:
    """Return the ASCII text of a state.

    Raises:
        UnsupportedState: As `tree.flatten`; or `unpack` would refuse it for its memory.
    """
    flat = flatten(state)
    try:
        check_memory(flat.skeleton, what="its text", most_bytes=most_memory())
    except ValueError as error:
        raise UnsupportedState(
            f"it has too many values: {error}", hint="hold many numbers in an array"
        ) from None
    tensors = {
        tensor.spec.name: [
            tensor.spec.dtype.name,
            list(tensor.spec.shape),
            base64.b64encode(tensor.content()).decode(),
        ]
        for tensor in flat.tensors
    }
    body = json.dumps({"skeleton": flat.skeleton, "tensors": tensors}, separators=(",", ":"))
    return f"{crc32(body.encode()):08x}{body}"


def unpack(text: str) -> object:
    """Return the state of a text, which may be untrusted; raise TreeError if it is damaged."""
    body = text[8:]
    if text[:8] != f"{crc32(body.encode('utf-8', 'surrogatepass')):08x}":
        raise TreeError("the CRC32 of a packed state does not match")
    try:
        parsed = parse_bounded(body, what="packed state")
        check_memory(parsed["skeleton"], what="packed skeleton", most_bytes=most_memory())
        arrays = {name: _array(*fields) for name, fields in parsed["tensors"].items()}
        return unflatten(parsed["skeleton"], arrays.__getitem__)
    except TreeError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise TreeError(f"a packed state is damaged: {error!r}") from None


def _array(dtype: str, shape: list[int], content: str) -> np.ndarray:
    try:
        data = base64.b64decode(content, validate=True)
        made: np.ndarray = np.frombuffer(bytearray(data), dtype_of(dtype).to_numpy()).reshape(shape)
    except (binascii.Error, FormatError) as error:
        raise TreeError(f"a tensor of a packed state is damaged: {error}") from None
    return made
