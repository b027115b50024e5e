# SPDX-License-Identifier: Apache-2.0
"""Compressed files made in memory, also ones that no writer of ours would make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blake3 import blake3

from ckptmgr.formats.compressed.packer import FramePacker, Packed
from ckptmgr.formats.compressed.plan import PlannedFrame
from ckptmgr.formats.compressed.source import open_frames
from ckptmgr.formats.compressed.table import HEAD, ZSTD, Frame, encode_tail, frame_digest
from ckptmgr.formats.source import BytesSource, read_bytes


def packed(raw: bytes, plan: Sequence[PlannedFrame], *, level: int = 1) -> list[Packed]:
    """Return the frames of `raw`."""
    packer = FramePacker(level=level)
    view = memoryview(raw)
    frames = []
    for one in plan:
        frame = packer.pack(view[one.start : one.start + one.size], item_bytes=one.item_bytes)
        frames.append(replace(frame, stored=bytes(frame.stored)))
    return frames


def file_of(
    frames: Sequence[Packed], sizes: Sequence[int], *, order: Sequence[int] | None = None
) -> bytes:
    """Return a file of these frames, with their raw sizes, written in any order."""
    body = HEAD
    entries: list[Frame | None] = [None] * len(frames)
    for index in range(len(frames)) if order is None else order:
        one = frames[index]
        entries[index] = Frame(
            offset=len(body),
            stored_bytes=len(one.stored),
            raw_bytes=sizes[index],
            group_bytes=one.group_bytes,
            method=one.method,
            digest=frame_digest(one.stored),
        )
        body += bytes(one.stored)
    table = [entry for entry in entries if entry is not None]
    return body + encode_tail(table, offset=len(body))


def compressed(raw: bytes, plan: Sequence[PlannedFrame]) -> bytes:
    """Return the compressed file of `raw`."""
    return file_of(packed(raw, plan), [one.size for one in plan])


def file_of_frame(stored: bytes, raw_bytes: int, *, method: int = ZSTD, group: int = 1) -> bytes:
    """Return a file with one frame, whatever is in it."""
    return file_of([Packed(stored=stored, group_bytes=group, method=method)], [raw_bytes])


def expanded(file: bytes) -> bytes:
    """Return the expanded bytes of a file."""
    source = open_frames(BytesSource(file))
    return read_bytes(source, 0, source.size)


def as_version(version: int, file: bytes) -> bytes:
    """Return a file that says to be of another version, with a digest that fits."""
    count = int.from_bytes(file[-64:-56], "little")
    head = file[:8] + bytes([version]) + file[9:16]
    digest = blake3(head + file[-64 - 56 * count : -40]).digest()
    return head + file[16:-40] + digest + file[-8:]
