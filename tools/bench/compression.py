# SPDX-License-Identifier: Apache-2.0
"""What zstd makes of each element type: the size of the file as a share of the tensors', and the time of a save and a load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ckptmgr
from tools.bench.contestant import KEY, touch
from tools.bench.disk import drop_cache, remove
from tools.bench.quiet import rest
from tools.bench.session import NewSession, Session
from tools.bench.workload import State, Workload

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "int64": np.dtype(np.int64),
}
ELEMENTS = tuple(_DTYPES)
KINDS = ("plain", "container")
_SUFFIXES = {"plain": ".safetensors.ckpz", "container": ".safetensors.ckpe"}
_TENSORS = 8
_ROW_ELEMENTS = 64
_VOCABULARY = 50_000
# Longer than any frame of 4 MiB: no compressor sees the same values twice.
_POOL_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OneType(Workload):
    """Eight tensors of one element type: weights ~ N(0, 0.02), or of integers ids below 50,000."""

    elements: str

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return _TENSORS

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors."""
        return _TENSORS * self._rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return _ROW_ELEMENTS * _DTYPES[self.elements].itemsize

    @property
    def _rows(self) -> int:
        return max(1, self.size_bytes // _TENSORS // self._row_bytes)

    def new_state(self) -> State:
        """Return the tensors."""
        shape = (_TENSORS, self._rows, _ROW_ELEMENTS)
        tensors = np.resize(self._pool(prod(shape)), shape)
        return {f"layer{index}.weight": tensor for index, tensor in enumerate(tensors)}

    def _pool(self, count: int) -> np.ndarray:
        dtype = _DTYPES[self.elements]
        rng = np.random.default_rng(_POOL_BYTES)
        count = min(_POOL_BYTES // dtype.itemsize, count)
        if dtype.kind == "i":
            return rng.integers(0, _VOCABULARY, count, dtype=dtype)
        return (rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)).astype(dtype)


def measure_compression(new_session: NewSession, size_bytes: int) -> None:
    """Save and load `size_bytes` of every element type, compressed, without and with a key in turns."""
    for elements in ELEMENTS:
        workload = OneType(size_bytes=size_bytes, elements=elements)
        session = new_session("compression", workload)
        state = workload.new_state()
        for turn in session.turns():
            for kind in KINDS:
                path = session.directory / f"zstd-{elements}-{turn + 1}{_SUFFIXES[kind]}"
                try:
                    measured = _measure(session, state, path, kind)
                finally:
                    remove(path)
                if turn >= 0:
                    for what, value in measured.items():
                        session.note(f"{elements} {kind}", what, value)


def _measure(session: Session, state: State, path: Path, kind: str) -> dict[str, float]:
    key = KEY if kind == "container" else None
    rest(session.pace.rest_s)
    started = time.perf_counter()
    ckptmgr.save_checkpoint(state, path, enc_key=key, format="safetensors", compression="zstd")
    saved_s = time.perf_counter() - started
    drop_cache(path)
    rest(session.pace.rest_s)
    started = time.perf_counter()
    touch(ckptmgr.load_checkpoint(path, dec_key=key, format="safetensors"))
    loaded_s = time.perf_counter() - started
    ratio = path.stat().st_size / session.workload.total_bytes
    return {"ratio": ratio, "save": saved_s, "load": loaded_s}
