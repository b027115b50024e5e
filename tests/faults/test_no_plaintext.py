# SPDX-License-Identifier: Apache-2.0
"""No plaintext on any disk: every write of real processes that save, re-encrypt and compress encrypted files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.faults.straced import ROOT

SIZE_BYTES, WINDOW_BYTES = 100_000, 12
WRITES = "write,writev,pwrite64,pwritev,pwritev2,sendfile,splice,copy_file_range,io_submit"
WORK = """
import subprocess
import sys
import numpy
from ckptmgr import CheckpointConfig, CheckpointManager, Snapshots

directory, key = sys.argv[1], None if len(sys.argv) < 3 else f"file:{sys.argv[2]}"
state = {"w": numpy.random.default_rng(7).integers(0, 256, 100_000, numpy.uint8)}

def save(name, **options):
    config = CheckpointConfig(enc_key=key, verify_after_write=True, **options)
    with CheckpointManager(f"{directory}/{name}", config, prefix="net", snapshots=Snapshots(1)) as manager:
        manager.step_end(1, state)

if key is None:
    save("plain")
else:
    save("ckpt", format="ckpt", enc_mode="AES-CBC")
    save("thread", format="safetensors", async_save="thread", compression="zstd")
    save("process", format="safetensors", async_save="process")
    new = f"file:{sys.argv[3]}"
    for command in (
        ["reencrypt", "ckpt", "--key", key, "--to", new, "--yes"],
        ["reencrypt", "thread", "--key", key, "--to", new, "--yes"],
        ["convert", "process", "--key", key, "--compression", "zstd"],
    ):
        command[1] = f"{directory}/{command[1]}"
        subprocess.run([sys.executable, "-m", "ckptmgr", *command], check=True)
print("done")
"""


def plaintext_written(log: Path, *arguments: object) -> bool:
    """Return whether a process at work wrote a part of the plaintext anywhere; it cannot be compressed."""
    strace = ["strace", "-f", "-xx", "-s", "2000000", "-e", f"trace={WRITES}", "-o", log]
    command = [*strace, sys.executable, "-c", WORK, *arguments]
    done = subprocess.run(
        [str(one) for one in command], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
    content = np.random.default_rng(7).integers(0, 256, SIZE_BYTES, np.uint8).tobytes()
    seen = log.read_text()
    assert len(seen) > SIZE_BYTES
    starts = range(0, SIZE_BYTES - WINDOW_BYTES, 1000)
    return any(_as_shown(content[at : at + WINDOW_BYTES]) in seen for at in starts)


def _as_shown(part: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in part)


@pytest.mark.strace
def test_nothing_that_is_encrypted_is_ever_written_as_plaintext(tmp_path: Path) -> None:
    keys = [tmp_path / "old.key", tmp_path / "new.key"]
    for number, key in enumerate(keys):
        key.touch(mode=0o600)
        key.write_bytes(bytes([number]) * 32)
    assert not plaintext_written(tmp_path / "log", tmp_path / "runs", *keys)


@pytest.mark.strace
def test_plaintext_that_is_written_is_seen(tmp_path: Path) -> None:
    assert plaintext_written(tmp_path / "log", tmp_path / "runs")
