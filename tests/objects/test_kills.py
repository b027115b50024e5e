# SPDX-License-Identifier: Apache-2.0
"""Runs that save to an address, and prunes of it, killed at and in the middle of requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointManager
from tests.cli.running import run
from tests.objects.dying_save import STEPS, WATCH_KEEP, WATCHED_STEPS, train, train_mirrored
from tests.support import api
from tests.support.rekeying import NEW, OLD
from tests.support.saved import save_run

pytestmark = pytest.mark.objects

_PROGRAM = [sys.executable, "-m", "tests.objects.dying_save"]
_WRITES = ("put", "create", "delete")
_REQUESTS = (*_WRITES, "get", "read", "fetch", "find", "list")
_PROCESSES = 2


def _run(
    kind: str, url: str, folder: Path, last: int = 0, *how: str
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [*_PROGRAM, kind, url, str(last), *how]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )


def _listed(url: str) -> dict[int, api.State]:
    from ckptmgr.objects.place import ObjectPlace

    pass

    found = ObjectPlace(api.open_objects(url), trust=api.DEFAULT_TRUST).scan()
    return {one.step: one.state for one in found}


def _writes(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    kinds = [line for line in done.stdout.splitlines() if line in _REQUESTS]
    return [number for number, kind in enumerate(kinds, start=1) if kind in _WRITES]


def _cut_everywhere(
    kind: str, new_bucket: Callable[..., str], prepare: Callable[[str], None], folder: Path
) -> list[tuple[str, Path, list[str]]]:
    """Return address, folder and lines of output of programs that ended at each write.

    Each is ended before it, and in another run by SIGKILL while the store gets it.
    """
    first = new_bucket()
    prepare(first)
    writes = _writes(_run(kind, first, folder / "calm"))
    cuts = [(number, how) for number in writes for how in ((), ("in-flight",))]
    cases = []
    for number, how in cuts:
        url = new_bucket()
        prepare(url)
        cases.append((url, folder / f"{number}{''.join(how)}", number, how))
    with ThreadPoolExecutor(_PROCESSES) as pool:
        ended = list(pool.map(lambda one: _run(kind, one[0], one[1], one[2], *one[3]), cases))
    for (_, _, _, how), one in zip(cases, ended, strict=True):
        assert one.returncode == (-9 if how else 9), one.stderr
    return [
        (url, place, one.stdout.splitlines())
        for (url, place, _, _), one in zip(cases, ended, strict=True)
    ]


def test_run_that_is_killed_at_any_write_loses_nothing_and_goes_on_on_both_machines(
    new_bucket: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = _cut_everywhere("save", new_bucket, lambda url: None, tmp_path)
    assert len(ended) == 2 * 6
    for number, (url, folder, acknowledged) in enumerate(ended):
        found = _listed(url)
        assert set(found.values()) <= {api.State.OK}
        assert run("verify", url).exit_code in ((0,) if found else (10,))
        if acknowledged:
            assert max(found) >= int(acknowledged[-1])
        other = tmp_path / f"other-{number}"
        other.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder if number % 2 else other))
        state = {"w": np.zeros(9)}
        with CheckpointManager(url) as manager:
            assert manager.resume(state).step == max(found, default=0)
        assert (state["w"] == max(found, default=0)).all()
        train(url, STEPS + 1)
        assert max(_listed(url)) == STEPS + 1
        staged = [path for path in folder.rglob("ckpt*") if path.is_file()]
        assert not (number % 2 and staged), "the same machine leaves what the killed run has staged"


def test_mirror_that_is_killed_at_any_write_loses_nothing_and_the_next_run_finishes(
    new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    ended = _cut_everywhere("mirror", new_bucket, lambda url: None, tmp_path)
    assert len(ended) == 2 * 6
    for url, folder, acknowledged in ended:
        found = _listed(url)
        assert set(found.values()) <= {api.State.OK}
        assert run("verify", url).exit_code in ((0,) if found else (10,))
        if acknowledged:
            assert max(found) >= int(acknowledged[-1])
        train_mirrored(folder / "run", url)
        assert _listed(url) == {STEPS: api.State.OK}


def test_change_of_keys_that_is_killed_at_any_write_leaves_what_the_old_or_new_key_opens(
    new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    ended = _cut_everywhere("rekeyed", new_bucket, lambda url: None, tmp_path)
    assert len(ended) == 2 * 4
    keys = []
    for key in (OLD, NEW):
        path = tmp_path / f"{key.key_id}.key"
        path.touch(mode=0o600)
        path.write_text(key.raw.hex())
        keys.append(("--key", f"file:{path}"))
    for url, folder, _ in ended:
        codes = [run("verify", url, *key).exit_code for key in keys]
        assert 0 in codes, "neither key opens it"
        assert run("copy", folder / "run", url).exit_code == 0
        assert run("verify", url, *keys[1]).exit_code == 0
        assert run("verify", url, *keys[0]).exit_code == 12


def test_watch_that_is_killed_at_any_write_loses_nothing_and_the_next_one_finishes_the_mirror(
    new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    ended = _cut_everywhere("watch", new_bucket, lambda url: None, tmp_path)
    assert len(ended) == 2 * 6
    for url, folder, lines in ended:
        found = _listed(url)
        assert set(found.values()) == {api.State.OK}
        assert run("verify", url).exit_code == 0
        events = [json.loads(line) for line in lines]
        mirrored = {one["checkpoint"]["step"] for one in events if one["event"] == "mirrored"}
        assert mirrored <= set(found)
        pruned = [one["checkpoint"]["step"] for one in events if one["event"] == "pruned"]
        assert not set(pruned) & set(found)
        again = run("watch", folder / "run", "--once", "--mirror", url, "--mirror-keep", WATCH_KEEP)
        assert again.exit_code == 0, again.output
        assert _listed(url) == {2: api.State.OK, WATCHED_STEPS: api.State.OK}
        assert run("verify", url).exit_code == 0


def test_prune_that_is_killed_at_any_write_loses_nothing_and_the_next_one_finishes(
    new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    save_run(tmp_path / "runs", [1, 2])

    def prepare(url: str) -> None:
        assert run("copy", tmp_path / "runs", url).exit_code == 0

    ended = _cut_everywhere("prune", new_bucket, prepare, tmp_path)
    assert len(ended) == 2 * 2
    for url, _, _ in ended:
        found = _listed(url)
        assert set(found.values()) == {api.State.OK}
        assert 2 in found
        assert run("prune", url, "--keep", "last(1)", "--now", "--yes").exit_code == 0
        assert _listed(url) == {2: api.State.OK}
        assert run("verify", url).exit_code == 0
