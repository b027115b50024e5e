# SPDX-License-Identifier: Apache-2.0
"""Directories of other tools whose files claim gigabytes, or stand for them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.files.test_hostile_documents import COMMAND, in_little_memory

END = struct.Struct("<4s4H2LH")


def sparse_archive(directory: Path) -> None:
    """Write an archive of 12 GiB, 8 KB of them on the disk, whose directory takes 8 GiB."""
    size, directory_bytes = 12 << 30, 8 << 30
    with (directory / "epoch=1-step=1.ckpt").open("wb") as file:
        file.write(b"PK\x03\x04" + bytes(26))
        file.seek(size)
        rest = (44, 45, 45, 0, 0, 1, 1, directory_bytes, size - directory_bytes)
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", *rest))
        file.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, size, 1))
        file.write(END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0))


def overlapping_archive(directory: Path) -> None:
    """Write an archive of which 20,000 records are the same 64 MiB."""
    length, count = 64 << 20, 20_000
    with (directory / "epoch=1-step=1.ckpt").open("wb") as file:
        file.write(struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 1, length, length, 1, 0))
        file.write(b"a")
        file.seek(31 + length - 1)
        file.write(b"\0")
        start = file.tell()
        for _ in range(count):
            sizes = (1, length, length, 1, *[0] * 6)
            file.write(
                struct.pack("<4s4B4H3L5H2L", b"PK\x01\x02", 20, 0, 20, 0, 0, 0, 0, 0, *sizes)
            )
            file.write(b"a")
        taken = file.tell() - start
        file.write(END.pack(b"PK\x05\x06", 0, 0, count, count, taken, start, 0))


def checkpoint_of_transformers(directory: Path, log: str = "", more: str = "0") -> None:
    folder = directory / "checkpoint-5"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "trainer_state.json").write_text(f'{{"global_step":5,"log_history":[{log}]}}')
    (folder / "more.json").write_text(more)


def log_of_objects(directory: Path) -> None:
    checkpoint_of_transformers(directory, log=("{}," * (5 << 20))[:-1])


def json_of_objects(directory: Path) -> None:
    checkpoint_of_transformers(directory, more=f"[{'{},' * (20 << 20)}0]")


def json_of_lists(directory: Path) -> None:
    checkpoint_of_transformers(directory, more=f"[{'[],' * (20 << 20)}0]")


def names_in_a_pickle(directory: Path) -> None:
    folder = directory / "step-1"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"x")
    names = b"".join(b"X\x07\0\0\0%07d" % number for number in range(4_000_000))
    (folder / ".metadata").write_bytes(b"\x80\x02" + names + b".")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "verify"])
@pytest.mark.parametrize(
    ("write", "code"),
    [
        (sparse_archive, 0),
        (overlapping_archive, 1),
        (log_of_objects, 1),
        (json_of_objects, 0),
        (json_of_lists, 0),
        (names_in_a_pickle, 0),
    ],
)
def test_files_of_other_tools_take_little_memory(
    tmp_path: Path, write: Callable[[Path], None], code: int, command: str
) -> None:
    write(tmp_path)
    done = in_little_memory(COMMAND, command, tmp_path)
    assert "MemoryError" not in done.stderr
    assert done.returncode == (code if command == "verify" else 0), done.stdout + done.stderr


def test_archive_with_a_directory_that_is_not_read_is_no_damage(tmp_path: Path) -> None:
    sparse_archive(tmp_path)
    done = in_little_memory(COMMAND, "verify", tmp_path, "--json")
    assert '"status": "unverified"' in done.stdout
    assert "archives with a directory of more than 16 MiB" in done.stdout


@pytest.mark.slow
def test_long_log_and_large_vocabulary_are_read(tmp_path: Path) -> None:
    step = '{"epoch": 0.5, "grad_norm": 1.25, "learning_rate": 5e-05, "loss": 2.5, "step": 5},'
    merges = ",".join(f'["t{number}", "u{number}"]' for number in range(600_000))
    checkpoint_of_transformers(tmp_path, log=(step * 180_000)[:-1], more=f"[{merges}]")
    done = in_little_memory(COMMAND, "verify", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert '"status": "unverified"' in done.stdout
    assert "too many values" not in done.stdout
