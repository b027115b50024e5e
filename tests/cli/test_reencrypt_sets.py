# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr reencrypt` of checkpoints of many ranks, in a real directory."""

from __future__ import annotations

from pathlib import Path

from tests.cli.running import run, run_json
from tests.cli.test_rekey import source
from tests.faults.training import KEY, RUNS
from tests.maintenance.test_repair_sealed import WEIGHTS, ZSTD, saved
from tests.support import api
from tests.support.rekeying import NEW


def test_set_is_encrypted_anew_and_old_files_that_were_left_are_removed(tmp_path: Path) -> None:
    disk, runs = saved(enc_key=KEY, weights=WEIGHTS[:20], **ZSTD), tmp_path / "runs"
    runs.mkdir()
    before = {name: disk.read_bytes(RUNS / name) for name in disk.list(RUNS) if "net" in name}
    for name, content in before.items():
        (runs / name).write_bytes(content)
    new = source(tmp_path, NEW)
    plan = ("reencrypt", runs, "--key", source(tmp_path, api.Key(KEY)), "--to", new)
    (item,) = run_json(*plan, "--dry-run")["items"]
    assert (item["action"], item["is_done"]) == ("re-encrypt", False)
    assert run_json(*plan, "--yes")["summary"] == {"planned": 1, "done": 1, "failed": 0}
    assert run("verify", runs, "--key", new).exit_code == 0
    assert not {path.name for path in runs.glob("*-of-*")} & set(before)
    for name, content in before.items():
        if "-of-" in name:
            (runs / name).write_bytes(content)
    (item,) = run_json(*plan, "--yes")["items"]
    assert (item["action"], item["is_done"]) == ("clean up", True)
    assert not {path.name for path in runs.glob("*-of-*")} & set(before)
    assert run_json(*plan, "--yes")["summary"]["planned"] == 0
