# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr ls`."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.running import key_file, run, run_json
from tests.support import api
from tests.support.saved import GOLDEN_FILES, KEY, OTHER_KEY, overwrite, save_run, tree_of

METRICS = {
    10: {"loss": 0.5, "acc": 0.25, "lr": 1e-3},
    20: {"loss": math.nan},
}


def make_runs(directory: Path) -> Path:
    """Make a run with metrics, a pin, and a damaged file."""
    save_run(directory, [10, 20, 30], metrics=METRICS)
    store = api.place(directory)
    with store.lease("net"):
        (first,) = [c for c in store.scan() if c.step == 10]
        store.change_pins(first, lambda _: (api.Pin(name="paper", reason="table 2"),))
    overwrite(directory / "net-3_10.ckpt", b"cut")
    return directory


def test_list_is_newest_last_with_a_summary(tmp_path: Path) -> None:
    result = run("ls", make_runs(tmp_path))
    assert result.exit_code == 0
    assert (
        result.stdout
        == """\
STEP     SAVED   SIZE  METRIC                FORMAT  CIPHER  STATE    TAGS
  10   1 d ago  144 B  acc=0.25 loss=0.5 +1  ckpt    -       ok       @paper
  20  23 h ago  144 B  loss=n/a              ckpt    -       ok       -
  30  22 h ago  144 B  -                     ckpt    -       corrupt  -
net-3_10.ckpt: 3 bytes, but the manifest says 144
3 checkpoints, 432 B, 1 corrupt
"""
    )


def test_manifests_alone_are_read(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    before = tree_of(tmp_path)
    run("ls", tmp_path)
    assert tree_of(tmp_path) == before


def test_bare_files_show_their_cipher_and_that_nothing_vouches_for_them(tmp_path: Path) -> None:
    shutil.copy(GOLDEN_FILES / "gcm128.ckpt", tmp_path / "CKP-1_1.ckpt")
    shutil.copy(GOLDEN_FILES / "st_async.safetensors", tmp_path / "CKP-1_2.safetensors")
    items = run_json("ls", tmp_path)["items"]
    assert [(i["step"], i["format"], i["cipher"], i["state"]) for i in items] == [
        (1, "ckpt", "AES-GCM", "unverified"),
        (2, "safetensors", None, "unverified"),
    ]


def test_golden_directory_is_listed(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN_FILES, tmp_path / "files")
    assert run_json("ls", tmp_path / "files")["summary"]["count"] == 26
    assert run("ls", tmp_path / "files/broken").exit_code == 0


def test_bare_file_that_cannot_be_opened_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "CKP-1_1.ckpt"
    path.touch()
    assert run_json("ls", tmp_path)["items"][0]["cipher"] is None


def test_json_has_raw_values(tmp_path: Path) -> None:
    document = run_json("ls", make_runs(tmp_path))
    first, second, third = document["items"]
    assert (document["schema"], document["root"]) == ("ckptmgr.ls/1", str(tmp_path))
    assert document["summary"] == {
        "count": 3,
        "size_bytes": sum(item["size_bytes"] for item in document["items"]),
        "states": {"corrupt": 1, "ok": 2},
        "lines": [
            {
                "run": "run-of-net",
                "runs": ["run-of-net"],
                "series": ["net"],
                "count": 3,
                "newest": second["path"].rpartition("/")[2],
                "step": second["step"],
                "is_latest": True,
            }
        ],
    }
    assert first == {
        "path": str(tmp_path / "net-1_10.ckpt"),
        "series": "net",
        "run": "run-of-net",
        "line": "run-of-net",
        "step": 10,
        "attempt": 0,
        "sequence": 1,
        "epoch": 1,
        "why": "policy",
        "saved_at": "2026-03-01T10:00:00Z",
        "size_bytes": (tmp_path / "net-1_10.ckpt").stat().st_size,
        "metrics": METRICS[10],
        "pins": [{"name": "paper", "reason": "table 2"}],
        "state": "ok",
        "health": None,
        "format": "ckpt",
        "cipher": None,
        "key_id": None,
        "opened_by": [],
        "tags": [],
        "problem": None,
        "tool": None,
        "named_by": [],
        "checked": None,
        "id": api.place(tmp_path).read_manifest("net-1_10.ckpt").id,  # type: ignore[union-attr]
    }
    assert second["metrics"] == {"loss": None}
    assert third["state"] == "corrupt"


def test_quiet_prints_paths_byte_for_byte(tmp_path: Path) -> None:
    odd = os.fsdecode(b"net\xff-1_1.ckpt")
    (tmp_path / odd).write_bytes(b"x")
    result = run("ls", "-q", tmp_path)
    assert result.stdout_bytes == os.fsencode(tmp_path / odd) + b"\n"


def test_leftovers_are_shown_only_with_all(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    (tmp_path / "net-1_10.ckpt").unlink()
    assert "leftover" not in run("ls", tmp_path).stdout
    shown = run("ls", "--all", tmp_path).stdout
    assert "leftover" in shown
    assert "net-1_10.ckpt: a manifest without its data file" in shown


def test_several_series_get_a_column_and_can_be_filtered(tmp_path: Path) -> None:
    for series in ("a", "b"):
        save_run(tmp_path, [10], series=series)
    assert run("ls", tmp_path).stdout.startswith("SERIES  STEP")
    assert run("ls", tmp_path, "--series", "b").stdout.startswith("STEP")


def test_empty_directory_is_no_error(tmp_path: Path) -> None:
    assert run("ls", tmp_path).stdout == "0 checkpoints, 0 B\n"


def test_file_in_place_of_a_directory_is_told_so(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    shown = run("ls", path)
    assert shown.exit_code == 10
    assert "not a directory" in shown.stderr
    assert "ckptmgr inspect" in shown.stderr


def test_key_authenticates_the_manifests(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    save_run(runs, [10, 20], options=api.SaveOptions(key=KEY), metrics=METRICS)
    source = key_file(tmp_path)
    manifest = runs / api.manifest_name("net-1_10.ckpt")
    overwrite(manifest, manifest.read_bytes().replace(b"0.25", b"0.99"))
    states = {i["path"][-13:]: i["state"] for i in run_json("ls", runs, "--key", source)["items"]}
    assert states == {"net-1_10.ckpt": "corrupt", "net-2_10.ckpt": "ok"}
    other = key_file(tmp_path, hex_digits=OTHER_KEY.raw.hex())
    states = {i["path"][-13:]: i["state"] for i in run_json("ls", runs, "--key", other)["items"]}
    assert states == {"net-1_10.ckpt": "other-key", "net-2_10.ckpt": "other-key"}


def test_unauthenticated_manifest_with_a_key_is_unproven_unless_allowed(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [10])
    source = key_file(tmp_path)
    (item,) = run_json("ls", tmp_path / "runs", "--key", source)["items"]
    assert (item["state"], "not authenticated" in item["problem"]) == ("unproven", True)
    allowed = run_json("ls", tmp_path / "runs", "--key", source, "--allow-unencrypted")
    assert allowed["items"][0]["state"] == "ok"


def test_breakpoint_file_is_tagged(tmp_path: Path) -> None:
    (tmp_path / "net-1_1_breakpoint.ckpt").write_bytes(b"x")
    assert "emergency" in run("ls", tmp_path).stdout


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "utf-8"])
def test_names_outside_the_charset_are_spelled_out(tmp_path: Path, charset: str) -> None:
    for series in ("netz-ä-→", "b"):
        save_run(tmp_path, [10], series=series)
    result = run("ls", tmp_path, charset=charset)
    assert result.exit_code == 0
    assert ("→" in result.stdout_bytes.decode(charset)) is (charset == "utf-8")


def test_json_is_ascii_whatever_the_names(tmp_path: Path) -> None:
    save_run(tmp_path, [10], series="ä")
    assert run("ls", tmp_path, "--json", charset="ascii").stdout.isascii()
    assert json.loads(run("ls", tmp_path, "--json").stdout)["items"][0]["series"] == "ä"


def test_wrong_key_is_said(tmp_path: Path) -> None:
    save_run(tmp_path / "run", [10, 20], options=api.SaveOptions(key=OTHER_KEY))
    key = key_file(tmp_path)
    assert (
        "wrong key: none of these checkpoints" in run("ls", tmp_path / "run", "--key", key).stdout
    )
    right = key_file(tmp_path, hex_digits=OTHER_KEY.raw.hex())
    assert "wrong key" not in run("ls", tmp_path / "run", "--key", right).stdout


def test_problem_of_many_checkpoints_is_said_once(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30], options=api.SaveOptions(key=KEY))
    other = key_file(tmp_path, hex_digits=OTHER_KEY.raw.hex())
    shown = run("ls", tmp_path, "--key", other).stdout
    assert re.findall(r"^.* is authenticated under key", shown, re.MULTILINE) == [
        "net-1_10.ckpt and 2 more: the manifest is authenticated under key"
    ]
