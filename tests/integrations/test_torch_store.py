# SPDX-License-Identifier: Apache-2.0
"""Ranks of PyTorch: over a store in memory, and four real ones that torchrun starts."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # noqa: E402

from ckptmgr.core.model import State  # noqa: E402
from ckptmgr.formats.strict_json import Json  # noqa: E402
from ckptmgr.integrations.torch_store import (  # noqa: E402
    group_coordinator,
    store_coordinator,
    torchrun_coordinator,
)
from ckptmgr.parallel.coordinator import RanksMissing  # noqa: E402
from ckptmgr.store.store import Store  # noqa: E402
from tests.parallel.test_coordinator import together  # noqa: E402

ROOT = Path(__file__).parents[2]
WORLD = 4


def test_ranks_hear_each_other_over_a_store() -> None:
    store = HashStore()
    one, two = (store_coordinator(store, rank=rank, world=2) for rank in range(2))
    heard = together(
        lambda: one.all_gather("a", {"x": 1}, timeout_s=60),
        lambda: two.all_gather("a", [2], timeout_s=60),
    )
    assert heard == [[{"x": 1}, [2]]] * 2


@pytest.mark.parametrize("timeout_s", [0.0, 0.01])
def test_rank_that_does_not_come_is_named(timeout_s: float) -> None:
    ranks = store_coordinator(HashStore(), rank=0, world=2)
    with pytest.raises(RanksMissing, match="rank 1 did not come"):
        ranks.all_gather("a", None, timeout_s=timeout_s)


def test_store_that_is_gone_is_like_ranks_that_do_not_come() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    ranks = store_coordinator(client, rank=0, world=2)
    del server
    with pytest.raises(RanksMissing, match="rank"):
        ranks.all_gather("a", None, timeout_s=0.1)


def test_waiting_does_not_hold_up_others_who_use_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    waiting = store_coordinator(client, rank=0, world=2)

    def use_and_come() -> list[Json]:
        client.set("collective", "1")
        return store_coordinator(store, rank=1, world=2).all_gather("a", 1, timeout_s=20)

    heard = together(lambda: waiting.all_gather("a", 0, timeout_s=20), use_and_come)
    assert heard == [[0, 1]] * 2


def test_two_threads_of_a_rank_meet_the_others_in_any_order() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(2)]
    one, two = (store_coordinator(client, rank=n, world=2) for n, client in enumerate(clients))

    def other() -> list[Json]:
        server.wait(["a/1/0"], timedelta(seconds=20))  # one thread of rank 0 waits
        return one.all_gather("b/1", 0, timeout_s=20)

    def both() -> list[Json]:
        return two.all_gather("b/1", 1, timeout_s=10) + two.all_gather("a/1", 1, timeout_s=10)

    heard = together(lambda: one.all_gather("a/1", 0, timeout_s=20), other, both)
    assert heard == [[0, 1], [0, 1], [0, 1, 0, 1]]


def test_process_of_torchrun_reaches_the_store_of_its_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "WORLD_SIZE": "1",
        "RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    starts = [torchrun_coordinator(timeout_s=20) for _ in range(2)]
    assert [start.all_gather("a", n, timeout_s=20) for n, start in enumerate(starts)] == [[0], [1]]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RanksMissing, match="rank 1 did not come to 'the start of the job'"):
        torchrun_coordinator(timeout_s=0.1)


def test_ranks_of_a_process_group_meet_over_its_store() -> None:
    with pytest.raises(ValueError, match="not been initialized"):
        group_coordinator()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        groups: tuple[Any, ...] = (None, dist.new_group([0]))
        assert [group_coordinator(g).all_gather("a", 1, timeout_s=20) for g in groups] == [[1], [1]]
    finally:
        dist.destroy_process_group()


def test_process_that_torchrun_did_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="start the program with torchrun"):
        torchrun_coordinator()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match="would die with it"):
        torchrun_coordinator()


@pytest.mark.slow
def test_four_ranks_of_torchrun_save_together_or_not_at_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        str(WORLD),
        "-m",
        "tests.integrations.torchrun_job",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda t: t["rank"])
    assert [t["sum"] for t in told] == [6.0] * WORLD
    (saved,) = Store(tmp_path).scan()
    assert (saved.name, saved.state) == ("run1-1.shards", State.OK)
    assert [t["step 1"] for t in told] == [list(saved.shards)] * WORLD
    assert len(saved.shards) == WORLD
    for one in told:
        assert "step 2 was not saved: rank 3: StoreFull [ENOSPC]" in one["step 2"]
