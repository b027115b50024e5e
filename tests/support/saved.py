# SPDX-License-Identifier: Apache-2.0
"""Small runs on a real disk, the same bytes every time, for tests of what works on finished directories."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ckptmgr import Checkpoint, Trust
from ckptmgr.crypto.keys.key import Key
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.job import SaveFacts, SaveOptions
from ckptmgr.formats.tensor import Item, Text, tensor_from_array
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.maintenance.verify import Level, Verification, verify_checkpoint
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.manifest.lineage import Lineage
from ckptmgr.store.store import Store

KEY = Key(bytes(range(32)))
OTHER_KEY = Key(bytes(32))
START_S = 1_772_359_200
"""2026-03-01 10:00 UTC; the saves of a run are one hour apart."""

GOLDEN_FILES = Path(__file__).parents[1] / "golden/files"


def items(seed: float = 1.0) -> list[Item]:
    """Return a weight of 12 numbers, a count and a text."""
    return [
        tensor_from_array("fc.weight", np.arange(12, dtype=np.float32).reshape(3, 4) * seed),
        tensor_from_array("epoch_num", np.array(3, np.int32)),
        Text(name="net", text="lenet"),
    ]


def save_run(
    directory: Path,
    steps: Sequence[int],
    *,
    series: str = "net",
    options: SaveOptions | None = None,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    content: Sequence[Item] | None = None,
    fs: FileSystem | None = None,
) -> list[Path]:
    """Save one checkpoint for each step, ten steps to an epoch, and return the files."""
    options = options or SaveOptions()
    clock = itertools.count(START_S, 3600)
    store = Store(directory, fs=fs, trust=Trust(keys=options.key, allow_unencrypted=True))
    writer = SeriesWriter(
        store, series, options=options, clock=lambda: float(next(clock)), run_id=f"run-of-{series}"
    )
    paths = []
    for step in steps:
        epoch, position = (step - 1) // 10 + 1, (step - 1) % 10 + 1
        facts = SaveFacts(
            step=step, epoch=epoch, why="policy", metrics=(metrics or {}).get(step, {})
        )
        name = f"{series}-{epoch}_{position}.{options.format}"
        chosen = items(step) if content is None else content
        paths.append(writer.save(name, chosen, facts).path)
    writer.close()
    return paths


def only(store: Store) -> Checkpoint:
    """Return the only checkpoint of a store."""
    (checkpoint,) = store.scan()
    return checkpoint


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file, read-only or not."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    overwrite(path, bytes(data))


def overwrite(path: Path, data: bytes) -> None:
    """Put other bytes into a file, read-only or not."""
    path.chmod(0o600)
    path.write_bytes(data)


def tree_of(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return the content, mode and modification time of everything below a directory, itself included."""
    return {
        str(path): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in (directory, *sorted(directory.rglob("*")))
    }


def verify_all(
    store: Store, *, level: Level = Level.FULL, options: ReadOptions | None = None
) -> list[Verification]:
    """Verify every checkpoint of a directory."""
    found = store.scan()
    return [
        verify_checkpoint(store, one, level=level, options=options, lineage=Lineage(found))
        for one in found
    ]
