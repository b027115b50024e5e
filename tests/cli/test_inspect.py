# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr inspect`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks
from ckptmgr.formats.tensor import MapTensors, Text, tensor_from_array
from tests.cli.running import key_file, run, run_json
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api
from tests.support.saved import GOLDEN_FILES, KEY, flip, save_run

SEALED = api.SaveOptions(key=KEY, has_crc=True)


def test_envelope_and_tensors_of_a_plain_file(tmp_path: Path) -> None:
    (path,) = save_run(
        tmp_path, [25], options=api.SaveOptions(has_crc=True), metrics={25: {"acc": 1}}
    )
    store = api.place(tmp_path)
    with store.lease("net"):
        store.change_pins(store.scan()[0], lambda _: (api.Pin(name="paper", reason="table 2"),))
    result = run("inspect", path, "--stats")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:4] == [
        f"file       {path}",
        "state      ok",
        "step       25 of series net, epoch 3",
        "saved      2026-03-01T10:00:00Z (policy)",
    ]
    assert lines[4].startswith("format     ckpt, CRC32 0x")
    assert lines[6] == "cipher     none"
    assert lines[8] == "run        run-of-net"
    assert lines[9].startswith("cost       written in ")
    assert lines[10:12] == ["metrics    acc=1", "pinned     @paper table 2"]
    assert lines[12:] == [
        "",
        "NAME       DTYPE    SHAPE   SIZE  MIN  MAX   MEAN  NAN  INF",
        "fc.weight  float32  3x4     48 B    0  275  137.5    0    0",
        "epoch_num  int32    scalar   4 B    3    3      3    0    0",
        "net = 'lenet'",
        "2 tensors, 52 B",
    ]


def test_envelope_of_an_encrypted_file_needs_no_key(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], options=SEALED)
    document = run_json("inspect", path)
    summary = document["summary"]
    assert document["schema"] == "ckptmgr.inspect/1"
    assert (document["items"], summary["is_content_shown"]) == ([], False)
    assert (summary["cipher"], summary["key_id"]) == ("AES-GCM", KEY.key_id)
    assert (summary["is_sealed"], summary["crc"], summary["plaintext_bytes"]) == (None, None, None)
    text = run("inspect", path).stdout
    assert f"cipher     AES-GCM, seal unknown without the key, key {KEY.key_id}\n" in text
    assert text.endswith("tensors    not shown: the file is encrypted and no key was given\n")
    assert run("inspect", path, "-q").stdout == ""


def test_key_shows_seal_crc_and_tensors(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path / "runs", [10], options=SEALED)
    source = key_file(tmp_path)
    document = run_json("inspect", path, "--key", source)
    summary = document["summary"]
    assert summary["is_sealed"] is True
    assert isinstance(summary["crc"], int)
    assert summary["plaintext_bytes"] < summary["stored_bytes"]
    assert [item["name"] for item in document["items"]] == ["fc.weight", "epoch_num", "net"]
    assert "AES-GCM, sealed, key" in run("inspect", path, "--key", source).stdout


def test_unsealed_file_says_so(tmp_path: Path) -> None:
    path = shutil.copy(GOLDEN_FILES / "gcm128.ckpt", tmp_path)
    source = key_file(tmp_path, hex_digits=bytes(range(16)).hex())
    assert run("inspect", path, "--key", source).exit_code == 13
    shown = run("inspect", path, "--key", source, "--allow-unsealed").stdout
    assert "AES-GCM, not sealed\n" in shown


def test_pattern_chooses_tensors_and_quiet_prints_their_names(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    assert run("inspect", path, "--tensors", "fc*", "-q").stdout == "fc.weight\n"
    assert run("inspect", path, "--tensors", "nothing").stdout.endswith("\n0 tensors, 0 B\n")


def test_figures_without_numbers_are_dashes_and_null(tmp_path: Path) -> None:
    content = [tensor_from_array("w", np.full(2, np.nan, np.float32))]
    (path,) = save_run(tmp_path, [10], content=content)
    (item,) = run_json("inspect", path, "--stats")["items"]
    assert item == {
        "name": "w",
        "kind": "tensor",
        "dtype": "float32",
        "shape": [2],
        "size_bytes": 8,
        "ranks": None,
        "stats": {"min": None, "max": None, "mean": None, "nan_count": 2, "inf_count": 0},
        "text": None,
    }
    assert "   -    -     -    2    0\n" in run("inspect", path, "--stats").stdout


def test_map_parameters_and_long_texts_are_listed(tmp_path: Path) -> None:
    parts = [tensor_from_array(name, np.ones(2, np.float32)) for name in ("k", "v", "s")]
    table = MapTensors(name="table", key=parts[0], value=parts[1], status=parts[2])
    (path,) = save_run(tmp_path, [10], content=[table, Text(name="note", text="x" * 100)])
    shown = run("inspect", path).stdout
    assert all(f"table.{part}" in shown for part in ("key", "value", "status"))
    assert f"note = '{'x' * 60}...'\n" in shown


def test_metadata_is_shown(tmp_path: Path) -> None:
    path = shutil.copy(GOLDEN_FILES / "st_rr_true.safetensors", tmp_path)
    shown = run("inspect", path).stdout
    assert "state      unverified (no manifest: nothing vouches for this file)\n" in shown
    assert "metadata   remove_redundancy = 'True'\n" in shown
    assert "format     safetensors, no CRC32\n" in shown


def test_name_that_steers_terminals_is_spelled_out(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], content=[tensor_from_array("\x1b[2J", np.ones(1))])
    shown = run("inspect", path)
    assert "\\x1b[2J" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_damaged_content_is_an_error_with_its_place(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    flip(path, 70)
    result = run("inspect", path, "--stats")
    assert result.exit_code == 1
    assert "do not match the digest" in result.stderr


def test_every_golden_file_is_shown_or_refused_with_a_reason(tmp_path: Path) -> None:
    for source in GOLDEN_FILES.rglob("*.*"):
        if source.suffix in (".ckpt", ".safetensors"):
            path = shutil.copy(source, tmp_path)
            result = run("inspect", path)
            assert result.exit_code in (0, 1, 2), source
            assert "internal error" not in result.stderr, source


def with_stats(tmp_path: Path, **stats: float) -> str:
    (path,) = save_run(tmp_path, [10])
    store = api.place(tmp_path)
    manifest = store.read_manifest(path.name)
    assert manifest is not None
    size_bytes = manifest.file.digest.size_bytes
    store.update_manifest(replace(manifest, stats={**stats, "write_s": size_bytes / 1e9}))
    shown = run("inspect", path).stdout.splitlines()
    return next((line for line in shown if line.startswith("cost ")), "")


def test_cost_of_a_synchronous_save(tmp_path: Path) -> None:
    assert with_stats(tmp_path).endswith(" s, synced in 0 s, 1.0 GB/s")


def test_cost_of_a_save_in_the_background(tmp_path: Path) -> None:
    shown = with_stats(
        tmp_path,
        stage_s=0.25,
        blocked_s=0.5,
        queue_s=2.0,
        staging_bytes=float(3 << 20),
        buffer_bytes=float(1 << 20),
    )
    assert shown.endswith(
        "1.0 GB/s, copied in 0.25 s, training held up for 0.5 s, queued for 2 s, 4.0 MiB of memory"
    )


def test_cost_that_is_not_noted_is_not_shown(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    store = api.place(tmp_path)
    manifest = store.read_manifest(path.name)
    assert manifest is not None
    store.update_manifest(replace(manifest, stats={}))
    assert "written in" not in run("inspect", path).stdout


@pytest.mark.parametrize("key", [None, KEY.raw], ids=["plain", "encrypted"])
def test_checkpoint_of_many_ranks_shows_whole_tensors(key: bytes | None, tmp_path: Path) -> None:
    directory, meeting = tmp_path / "runs", Meeting(2)
    config = CheckpointConfig(remove_redundancy=True, enc_key=key)

    def save(rank: int) -> None:
        with CheckpointManager(directory, config, ranks=Ranks(Seat(meeting, rank))) as ours:
            ours.save(1, {"w": np.zeros((6, 2), np.float32), "own": np.array([rank])})

    for outcome in run_ranks(meeting, save):
        assert outcome.raised is None, outcome.raised
    path = directory / "ckpt-1.shards"
    options = () if key is None else ("--key", key_file(tmp_path))
    lines = run("inspect", path, *options).stdout.splitlines()
    shown = [line.split() for line in lines]
    assert ["w", "float32", "6x2", "48", "B"] in shown
    assert ["own", "(rank", "1)", "int64", "1", "8", "B"] in shown
    assert any(line.startswith("ranks      2, from ckpt-1.0-of-2.") for line in lines)
    items = run_json("inspect", path, *options)["items"]
    assert [(one["name"], one.get("ranks")) for one in items] == [
        ("w", None),
        ("own", [0]),
        ("own", [1]),
    ]
    if key is not None:
        assert "not shown" in run("inspect", path).stdout
    assert "look at one of them" in run("inspect", path, "--stats", *options).stderr
