# SPDX-License-Identifier: Apache-2.0
"""Small files whose texts stand for gigabytes of values, read by a process without as much memory."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    UnsupportedCheckpoint,
    load_state,
    save_state,
)
from ckptmgr.formats import strict_json
from ckptmgr.formats.compressed.packer import FramePacker
from ckptmgr.formats.compressed.table import FRAME_BYTES, HEAD, Frame, encode_tail, frame_digest
from ckptmgr.formats.strict_json import fits_memory, most_memory
from tests.cli.running import process_env

MEMORY_BYTES = 700 << 20
"""Of a reader beyond that of its start; each of these files took 1.5 to 6.7 GiB."""

LIMITED = f"""
import resource, sys
from pathlib import Path
import numpy
import ckptmgr.cli, ckptmgr.files.state_file, ckptmgr.training.manager, ckptmgr.maintenance.diff
import ckptmgr.maintenance.verify, ckptmgr.cli.commands.verify, ckptmgr.cli.commands.inspect
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {MEMORY_BYTES},) * 2)
"""

COMMAND = LIMITED + "ckptmgr.cli.cli(sys.argv[1:])"
LOAD = LIMITED + "ckptmgr.load_state(sys.argv[1])"
RESUME = (
    LIMITED
    + """
from ckptmgr import CheckpointConfig, CheckpointManager
with CheckpointManager(sys.argv[1], CheckpointConfig()) as manager:
    start = manager.resume()
    print(start.step, [one.checkpoint.step for one in start.skipped if one.is_damaged])
"""
)


def in_little_memory(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=process_env(),
        timeout=120,
        check=False,
    )


def skeleton(node: str, count: int) -> str:
    return '{"version":1,"nodes":[' + f"{node}," * count + f'{{"list":{count}}}]}}'


def compressed(metadata: Mapping[str, str]) -> bytes:
    """Return a compressed file without tensors: some KB for texts of 24 to 48 MB."""
    header = json.dumps({"__metadata__": dict(metadata)}, separators=(",", ":")).encode()
    raw = struct.pack("<Q", len(header)) + header
    stored, frames, packer = bytearray(HEAD), [], FramePacker(level=3)
    for start in range(0, len(raw), FRAME_BYTES):
        piece = raw[start : start + FRAME_BYTES]
        packed = packer.pack(memoryview(piece), item_bytes=1)
        content = bytes(packed.stored)
        frames.append(
            Frame(
                offset=len(stored),
                stored_bytes=len(content),
                raw_bytes=len(piece),
                group_bytes=packed.group_bytes,
                method=packed.method,
                digest=frame_digest(content),
            )
        )
        stored += content
    return bytes(stored) + encode_tail(frames, offset=len(stored))


TEXTS = {
    "objects": ("ckptmgr.tree", skeleton("{}", 14_000_000)),
    "numbers": ("ckptmgr.tree", skeleton("0", 24_000_000)),
    "lists": ("ckptmgr.tree", skeleton('{"list":0}', 3_000_000)),
    "bytes": ("ckptmgr.tree", skeleton('{"bytes":"%s"}' % ("00" * 12_000_000), 1)),
    "pieces": ("ckptmgr.pieces", '{"version":1,"pieces":[%s0]}' % ("{}," * 14_000_000)),
}


@pytest.fixture(params=TEXTS, scope="module")
def bomb(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, text = TEXTS[request.param]
    path = tmp_path_factory.mktemp(request.param) / "net-5.safetensors.ckpz"
    path.write_bytes(compressed({name: text}))
    assert path.stat().st_size < 64 << 10
    return path


@pytest.mark.slow
@pytest.mark.parametrize("command", ["load", "verify", "inspect", "diff", "ls"])
def test_small_file_of_many_values_takes_little_memory(bomb: Path, command: str) -> None:
    arguments: dict[str, list[str | Path]] = {
        "load": [bomb],
        "verify": ["verify", "--deep", bomb],
        "inspect": ["inspect", bomb],
        "diff": ["diff", bomb, bomb],
        "ls": ["ls", bomb.parent],
    }
    done = in_little_memory(LOAD if command == "load" else COMMAND, *arguments[command])
    assert "MemoryError" not in done.stderr
    # One value of 24 MB is no damage.
    expected = 0 if command == "ls" or bomb.parent.name.startswith("bytes") else 1
    assert done.returncode == (2 if command == "diff" and expected else expected), done.stderr


@pytest.mark.slow
def test_resume_passes_over_a_small_file_of_many_values_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CheckpointConfig(format="safetensors", compression="zstd", keep_checkpoint_max=9)
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, {"history": [0]})
        with monkeypatch.context() as patch:
            patch.setattr(strict_json, "FREE_DOCUMENT_BYTES", 1 << 40)
            manager.save(2, {"history": [0] * 6_500_000})
    done = in_little_memory(RESUME, tmp_path)
    assert done.stdout.strip() == "1 [2]", done.stderr


@pytest.mark.slow
def test_state_that_would_not_load_is_refused_by_the_save(tmp_path: Path) -> None:
    state = {"history": [0] * 6_500_000}
    with pytest.raises(
        UnsupportedCheckpoint, match=r"ckptmgr\.tree.* more memory than the 384 MiB"
    ):
        save_state(state, tmp_path / "net.safetensors", compression="zstd")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_state_of_many_values_loads(tmp_path: Path, compression: Any) -> None:
    state = {
        "losses": [0.5] * 300_000,
        "files": [Path(f"data/{n:07}.tar") for n in range(100_000)],
        "seen": {n: f"sample {n}" for n in range(50_000)},
        "weights": np.zeros(64 << 20, np.uint8),
    }
    path = tmp_path / "net.safetensors"
    save_state(state, path, compression=compression)
    [written] = (one for one in tmp_path.iterdir() if "manifest" not in one.name)
    loaded: Any = load_state(written)
    assert loaded["losses"] == state["losses"]
    assert loaded["files"] == state["files"]
    assert loaded["seen"] == state["seen"]
    assert not loaded["weights"].any()


def test_as_many_small_tensors_as_a_file_may_have_fit_a_compressed_file() -> None:
    leaf = '{"array":{"dtype":"<f4","shape":[],"tensor":"layers/000000/weight"}}'
    text = skeleton(f'"layers/000000/weight",{leaf}', 524_288 // 64)
    assert fits_memory(text * 64, most_memory())


@pytest.mark.parametrize("node", ["tensor", "kind", "value"])
def test_deep_check_finds_a_state_tree_that_does_not_load(tmp_path: Path, node: str) -> None:
    wrong = {
        "tensor": '{"array":{"dtype":"<f4","shape":[2],"tensor":"lost"}}',
        "kind": '{"pickle":0}',
        "value": '{"float":"1"}',
    }
    path = tmp_path / "net-5.safetensors.ckpz"
    path.write_bytes(compressed({"ckptmgr.tree": skeleton(wrong[node], 1)}))
    done = in_little_memory(COMMAND, "verify", "--deep", path)
    assert done.returncode == 1
    assert "node 0 of the skeleton" in done.stdout
