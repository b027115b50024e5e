# SPDX-License-Identifier: Apache-2.0
"""zstd on each kind of values: the size of the file as a share of the tensors', and the cost of a save and a load.

Beside it the frames alone, from memory to memory in one thread, and ZipNN in the same way if it is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

import ckptmgr
from ckptmgr.formats.compressed.frames import unpack_frame
from ckptmgr.formats.compressed.packer import FramePacker
from ckptmgr.formats.compressed.table import FRAME_BYTES, STORED, Frame, frame_digest
from ckptmgr.io.buffers import copy_into
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
    "fp32 rows": np.dtype(np.float32),
    "fp32 squares": np.dtype(np.float32),
    "fp32 of bf16": np.dtype(np.float32),
    "random bytes": np.dtype(np.uint8),
}
ELEMENTS = tuple(_DTYPES)
KINDS = ("plain", "container")
_ZIPNN = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_Result = TypeVar("_Result")
_SUFFIXES = {"plain": ".safetensors.ckpz", "container": ".safetensors.ckpe"}
_TENSORS = 8
_ROW_ELEMENTS = 64
_VOCABULARY = 50_000
# Longer than any frame of 4 MiB: no compressor sees the same values twice.
_POOL_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OneType(Workload):
    """Eight tensors of one kind of values: weights ~ N(0, 0.02), or of integers ids below 50,000.

    `rows`: each row of 64 weights has a scale of its own, as in a trained model. `squares`: of such
    rows, as Adam's second moments. `of bf16`: weights that a bf16 holds.
    """

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
        if dtype.kind == "u":
            return np.frombuffer(rng.bytes(count), dtype)
        if dtype.kind == "i":
            return rng.integers(0, _VOCABULARY, count, dtype=dtype)
        weights = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
        if self.elements in ("fp32 rows", "fp32 squares"):
            scales = np.exp(rng.standard_normal(-(-count // _ROW_ELEMENTS), dtype=np.float32))
            weights *= np.repeat(scales, _ROW_ELEMENTS)[:count]
        if self.elements == "fp32 squares":
            weights *= weights
        if self.elements == "fp32 of bf16":
            weights = weights.astype(ml_dtypes.bfloat16)
        return weights.astype(dtype)


def measure_compression(new_session: NewSession, size_bytes: int) -> None:
    """Save and load `size_bytes` of every kind, compressed, without and with a key, and by ZipNN in turns."""
    for elements in ELEMENTS:
        workload = OneType(size_bytes=size_bytes, elements=elements)
        session = new_session("compression", workload)
        state = workload.new_state()
        for turn in session.turns():
            for kind in KINDS:
                path = session.directory / f"zstd-{turn + 1}{_SUFFIXES[kind]}"
                try:
                    measured = _measure(session, state, path, kind)
                finally:
                    remove(path)
                _note(session, turn, f"{elements} {kind}", measured)
            _note(session, turn, f"{elements} in memory", _measure_codec(state))
            _note(session, turn, f"{elements} ZipNN", _measure_zipnn(state, elements))


def _note(session: Session, turn: int, mode: str, measured: Mapping[str, float]) -> None:
    if turn >= 0:
        for what, value in measured.items():
            session.note(mode, what, value)


def _measure(session: Session, state: State, path: Path, kind: str) -> dict[str, float]:
    key = KEY if kind == "container" else None
    rest(session.pace.rest_s)
    saved, saved_cpu, _ = _timed(
        lambda: ckptmgr.save_checkpoint(
            state, path, enc_key=key, format="safetensors", compression="zstd"
        )
    )
    drop_cache(path)
    rest(session.pace.rest_s)
    loaded, loaded_cpu, _ = _timed(
        lambda: touch(ckptmgr.load_checkpoint(path, dec_key=key, format="safetensors"))
    )
    ratio = path.stat().st_size / session.workload.total_bytes
    return {
        "ratio": ratio,
        "save": saved,
        "load": loaded,
        "save cpu": saved_cpu,
        "load cpu": loaded_cpu,
    }


def _measure_zipnn(state: State, elements: str) -> dict[str, float]:
    dtype = _ZIPNN.get(elements.split()[0])
    try:
        from zipnn import ZipNN
    except ImportError:
        return {}
    if dtype is None:
        return {}
    codec = ZipNN(bytearray_dtype=dtype, input_format="byte", threads=1)
    return _in_memory(
        state, lambda array: codec.compress(bytearray(array.view(np.uint8).data)), codec.decompress
    )


def _measure_codec(state: State) -> dict[str, float]:
    """Measure the frames of ours alone, with their digests."""
    packer = FramePacker(level=1)

    def compress(array: np.ndarray) -> list[tuple[Frame, bytes]]:
        raw = array.reshape(-1).view(np.uint8).data
        starts = range(0, raw.nbytes, FRAME_BYTES)
        return [frame_of(raw[start : start + FRAME_BYTES], array.itemsize) for start in starts]

    def frame_of(raw: memoryview, item_bytes: int) -> tuple[Frame, bytes]:
        packed = packer.pack(raw, item_bytes=item_bytes)
        stored = bytes(packed.stored)
        frame = Frame(
            offset=0,
            stored_bytes=len(stored),
            raw_bytes=raw.nbytes,
            group_bytes=packed.group_bytes,
            method=packed.method,
            digest=frame_digest(stored),
        )
        return frame, stored

    def expand(frames: list[tuple[Frame, bytes]]) -> None:
        expanded = memoryview(bytearray(sum(frame.raw_bytes for frame, _ in frames)))
        for frame, stored in frames:
            if frame.method == STORED:
                copy_into(expanded[: frame.raw_bytes], memoryview(stored))
            else:
                unpack_frame(frame, memoryview(stored), expanded[: frame.raw_bytes])
            expanded = expanded[frame.raw_bytes :]

    return _in_memory(
        state, compress, expand, size_of=lambda frames: sum(len(stored) for _, stored in frames)
    )


def _in_memory(
    state: State,
    compress: Callable[[np.ndarray], Any],
    expand: Callable[[Any], object],
    *,
    size_of: Callable[[Any], int] = len,
) -> dict[str, float]:
    size = packed_size = 0
    packed_s = expanded_s = 0.0
    for array in state.values():
        _, seconds, packed = _timed(partial(compress, array))
        packed_s += seconds
        expanded_s += _timed(partial(expand, packed))[1]
        size, packed_size = size + array.nbytes, packed_size + size_of(packed)
    return {"ratio": packed_size / size, "save cpu": packed_s, "load cpu": expanded_s}


def _timed(work: Callable[[], _Result]) -> tuple[float, float, _Result]:
    """Return the seconds of a call, its CPU seconds in this process, and its result."""
    started, used = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - started, time.process_time() - used, result
