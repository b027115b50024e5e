# SPDX-License-Identifier: Apache-2.0
"""Random states, and how to put them into MindSpore, save them there and compare the result.

`mindspore` is imported inside the functions: the module can be imported where MindSpore is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckptmgr.files.load.values import Value

State = dict[str, Any]
Facts = dict[str, str | tuple[str, tuple[int, ...], bytes]]

BLOCK_BYTES = 4 << 20
_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16"),
)
_NAMES = ("fc1.weight", "名前", "moments.fc1.weight", "a b", "../x", "\n", "ü" * 40, "")
_TEXTS = ("", "plain", "héé 名前 😀", "a\0b", "x" * 5000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One way of writing a file that MindSpore knows."""

    format: str = "ckpt"
    mode: str | None = None
    key_bytes: int = 0
    has_crc: bool = False

    @property
    def key(self) -> bytes | None:
        """A key of the right length, or None."""
        return bytes(range(1, self.key_bytes + 1)) or None

    @property
    def save_options(self) -> dict[str, Any]:
        """The arguments for both `save_checkpoint` functions."""
        options: dict[str, Any] = {"crc_check": self.has_crc, "format": self.format}
        return (
            options
            if self.mode is None
            else {**options, "enc_key": self.key, "enc_mode": self.mode}
        )

    @property
    def load_options(self) -> dict[str, Any]:
        """The arguments for both `load_checkpoint` functions."""
        options: dict[str, Any] = {"crc_check": self.has_crc, "format": self.format}
        return (
            options
            if self.mode is None
            else {**options, "dec_key": self.key, "dec_mode": self.mode}
        )

    def __str__(self) -> str:
        cipher = "" if self.mode is None else f"-{self.mode}-{self.key_bytes * 8}"
        return f"{self.format}{cipher}{'-crc' if self.has_crc else ''}"


_CIPHERS = (
    *(("AES-GCM", length) for length in (16, 24, 32)),
    *(("AES-CBC", length) for length in (16, 24, 32)),
    ("SM4-CBC", 16),
)
PLAIN = (
    Combination(),
    Combination(has_crc=True),
    Combination(format="safetensors"),
    Combination(format="safetensors", has_crc=True),
)
ENCRYPTED = tuple(Combination(mode=mode, key_bytes=length) for mode, length in _CIPHERS)
ENCRYPTED_WITH_CRC = tuple(
    Combination(mode=mode, key_bytes=length, has_crc=True) for mode, length in _CIPHERS
)


def random_state(seed: int, combination: Combination) -> State:
    """Return every element type in a random shape under odd names, scalars, and texts where the format has them.

    Contents are random bits: NaN payloads, infinities and denormals included.
    """
    rng = np.random.default_rng(seed)
    state: State = {}
    for position, dtype in enumerate(_storable(combination)):
        name = _NAMES[position] if position < len(_NAMES) else f"layer{position}.{dtype}"
        shape = tuple(int(n) for n in rng.integers(1, 6, size=rng.integers(0, 4)))
        if shape == () and combination.format == "safetensors" and combination.has_crc:
            shape = (1,)  # 0-d integers have a CRC of their own kind, which has its own test
        state[name] = random_array(rng, dtype, shape)
        state[f"scalar.{dtype}"] = random_array(rng, dtype, (1,) if shape else (2,))
    if combination.format == "ckpt":
        state |= {f"text{index}": text for index, text in enumerate(_TEXTS)}
    return state


def large_state(seed: int) -> State:
    """Return a state of several blocks: one tensor over two of them, one that ends at a block's edge, small ones between."""
    rng = np.random.default_rng(seed)
    return {
        "small": random_array(rng, "float32", (7,)),
        "over blocks": random_array(rng, "float32", (3, BLOCK_BYTES // 4 + 1)),
        "bias": random_array(rng, "float16", (5,)),
        "one block": random_array(rng, "uint8", (BLOCK_BYTES - 48,)),
        "bfloat16": random_array(rng, "bfloat16", (BLOCK_BYTES // 2, 1)),
        "last": random_array(rng, "int64", ()),
    }


def random_array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of random bits; bools are 0 or 1."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    count = int(np.prod(shape, dtype=np.int64))
    content = rng.bytes(count * kind.itemsize)
    if dtype == "bool":
        content = bytes(byte & 1 for byte in content)
    array: np.ndarray = np.frombuffer(content, kind).reshape(shape)
    return array


def _storable(combination: Combination) -> Iterator[str]:
    for dtype in _DTYPES:
        # MindSpore's own CRC of a safetensors file stops at bfloat16: "cannot include dtype 'E' in a buffer".
        if not (
            dtype == "bfloat16" and combination.format == "safetensors" and combination.has_crc
        ):
            yield dtype


def to_mindspore(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parameters of a state, and its texts, which MindSpore takes as `append_dict` only."""
    from mindspore import Parameter, Tensor
    from mindspore.common import np_dtype

    def tensor(array: np.ndarray) -> Any:
        if array.dtype.name == "bfloat16":
            return Tensor(array.view(np_dtype.bfloat16))
        return Tensor(array)

    parameters = {
        name: Parameter(tensor(value), name=name or "unnamed")
        for name, value in state.items()
        if not isinstance(value, str)
    }
    return parameters, {name: value for name, value in state.items() if isinstance(value, str)}


def save_in_mindspore(state: Mapping[str, Any], path: Path, combination: Combination) -> None:
    """Save with the real `mindspore.save_checkpoint`."""
    import mindspore

    parameters, texts = to_mindspore(state)
    mindspore.save_checkpoint(
        parameters, str(path), append_dict=texts or None, **combination.save_options
    )


def load_in_mindspore(path: Path, combination: Combination) -> dict[str, Any]:
    """Load with the real `mindspore.load_checkpoint`."""
    import mindspore

    loaded: dict[str, Any] = mindspore.load_checkpoint(str(path), **combination.load_options)
    return loaded


def facts_of(values: Mapping[str, Any] | Mapping[str, Value]) -> Facts:
    """Return what two states must agree on: text, or type, shape and bits; whichever library holds them."""
    return {
        name: value if isinstance(value, str) else _array_facts(value)
        for name, value in values.items()
    }


def _array_facts(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    dtype = value.dtype.name if isinstance(value, np.ndarray) else str(value.dtype).lower()
    array = value if isinstance(value, np.ndarray) else value.asnumpy()
    # The two 4-bit values in a byte are read as one int8.
    return "int8" if dtype == "int4" else dtype, tuple(value.shape), array.tobytes()
