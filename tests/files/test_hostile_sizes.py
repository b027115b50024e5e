# SPDX-License-Identifier: Apache-2.0
"""Files that claim a gigabyte or more, and damaged ones, read by a process that may not have as much memory."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.slots.secret import RawKey
from ckptmgr.formats.mindspore.wire import encode_length_prefix
from tests.cli.running import process_env
from tests.crypto.container.containers import seal
from tests.formats.test_mindspore_reader import record, tensor_message
from tests.formats.test_zstd import BAD_FRAMES
from tests.support.saved import GOLDEN_FILES, KEY

READER = """
import resource, sys
from datetime import UTC, datetime
from pathlib import Path
from ckptmgr import CkptmgrError, load_checkpoint
from ckptmgr.crypto.keys.key import Key
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.core.model import Checkpoint
from ckptmgr.store.store import Store
from ckptmgr.core.trust import Trust
from ckptmgr.maintenance.verify import Level, verify_checkpoint

key, paths = Key(bytes(range(32))), sorted(Path(sys.argv[1]).iterdir())

def read(path, key):
    now, options = datetime(2026, 3, 1, tzinfo=UTC), ReadOptions(trust=Trust(keys=key))
    file = Checkpoint(path=path, series="x", step=0, saved_at=now, size_bytes=path.stat().st_size)
    answer = verify_checkpoint(Store(path.parent), file, level=Level.DEEP, options=options)
    try:
        form = "safetensors" if ".safetensors" in path.name else "ckpt"
        load_checkpoint(path, dec_key=None if key is None else key.raw, format=form)
    except (CkptmgrError, ValueError):
        return answer.status.value, "refused"
    return answer.status.value, "loaded"

read(paths[0], None)  # so that threads and their stacks are there
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
for path in paths:
    for given in (None, key):
        print(path.name, *read(path, given), sep="|")
"""


def container(content: Content, plaintext: bytes) -> bytes:
    return seal(plaintext, recipients=[RawKey(KEY)], content=content, segment_bytes=4096)


def claiming(at: int, field: bytes) -> bytes:
    """Return a container whose header copies say something else about its size."""
    file = bytearray(container(Content.SAFETENSORS, bytes(100)))
    for start in (at, 4096 + at):
        file[start : start + len(field)] = field
    return bytes(file)


def safetensors(shape: list[int], size: int, *, header_bytes: int | None = None) -> bytes:
    offsets = [0, size]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    return struct.pack("<Q", header_bytes or len(header)) + header + bytes(16)


MAKERS: dict[str, Callable[[], bytes]] = {
    "a-small.ckpt": lambda: record("w", tensor_message(1)),
    "dims.ckpt": lambda: record("w", tensor_message(2**31 - 1, content=b"x")),
    "many-dims.ckpt": lambda: record("w", tensor_message(*[2**31 - 1] * 20, content=b"x")),
    "length.ckpt": lambda: encode_length_prefix(1, 2**31) + bytes(100),
    "long-length.ckpt": lambda: encode_length_prefix(1, 2**63 - 1) + bytes(100),
    "shape.safetensors": lambda: safetensors([1 << 30], 4 << 30),
    "lying-shape.safetensors": lambda: safetensors([1 << 62, 4], 16),
    "header.safetensors": lambda: safetensors([4], 16, header_bytes=99_999_999),
    "huge-header.safetensors": lambda: safetensors([4], 16, header_bytes=100_000_001),
    "plaintext.safetensors.ckpe": lambda: claiming(32, struct.pack("<Q", 2**63 - 1)),
    "segment.safetensors.ckpe": lambda: claiming(44, struct.pack("<I", 64 << 20)),
    "longer-segment.safetensors.ckpe": lambda: claiming(44, struct.pack("<I", 2**32 - 16)),
    "copies.safetensors.ckpe": lambda: claiming(9, b"\x10"),
    "slots.safetensors.ckpe": lambda: claiming(76, b"\xff" * 4),
    "frames.safetensors.ckpe": lambda: container(Content.FRAMES, b"CKPZTBL1" * 100),
    **{f"bomb-{n}.safetensors.ckpz": make for n, (make, _) in enumerate(BAD_FRAMES.values())},
}


def test_nothing_that_claims_much_takes_much(tmp_path: Path) -> None:
    for name, make in MAKERS.items():
        (tmp_path / name).write_bytes(make())
    for broken in (GOLDEN_FILES / "broken").glob("*.*s*t*"):
        shutil.copy(broken, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)],
        capture_output=True,
        text=True,
        env=process_env(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [line.split("|") for line in done.stdout.splitlines()]
    assert len(answers) == 2 * len(list(tmp_path.iterdir()))
    for name, status, loaded in answers:
        if name in MAKERS and name != "a-small.ckpt":
            assert (status, loaded) in {
                ("damaged", "refused"),
                ("unreadable", "refused"),
                ("wrong key", "refused"),
                ("partial", "refused"),
                ("unsealed", "refused"),
            }, name


def test_reader_under_the_limit_would_fail_if_it_took_a_gigabyte() -> None:
    source = READER.split("key, paths")[0] + (
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)\n"
        "bytearray(1 << 30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        env=process_env(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, "MemoryError" in done.stderr) == (1, True)
