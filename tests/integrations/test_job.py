# SPDX-License-Identifier: Apache-2.0
"""Which way to meet the ranks of this job have."""

from __future__ import annotations

import pytest

from ckptmgr.integrations.job import job_coordinator

VARIABLES = ("TORCHELASTIC_USE_AGENT_STORE", "MS_ROLE")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_process_that_is_alone_is_told_how_to_meet() -> None:
    with pytest.raises(ValueError, match=r"torchrun, mpiexec or msrun[\s\S]*SharedDirectory"):
        job_coordinator()


def test_several_ways_to_meet_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    with pytest.raises(ValueError, match=r"torchrun_coordinator\(\), mindspore_coordinator\(\)"):
        job_coordinator()


def test_ranks_of_msrun_are_asked_for_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    with pytest.raises(ValueError, match="a directory that all of them see"):
        job_coordinator()


def test_process_of_torchrun_meets_over_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        job_coordinator()


def test_initialized_process_group_is_a_way_to_meet() -> None:
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert job_coordinator().all_gather("a", 1, timeout_s=20) == [1]
    finally:
        dist.destroy_process_group()


def test_jax_that_is_not_initialized_is_no_way_to_meet() -> None:
    pytest.importorskip("jax")
    from ckptmgr.integrations.jax_distributed import jax_coordinator

    with pytest.raises(ValueError, match=r"call jax.distributed.initialize\(\) first"):
        jax_coordinator()
    with pytest.raises(ValueError, match="nothing says"):
        job_coordinator()
