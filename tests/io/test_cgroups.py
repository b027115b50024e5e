# SPDX-License-Identifier: Apache-2.0
"""Limits of control groups, of both versions, as containers and batch systems set them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.io.cgroups import GroupMemory, cpu_limit, cpus_of, memory_limit, memory_of
from tests.cli.running import process_env

MIB = 1 << 20
UNLIMITED = "9223372036854771712\n"


class Tree:
    """A tree of control groups."""

    def __init__(self, directory: Path) -> None:
        self.root, self.groups = directory / "cgroup", directory / "self"
        self.root.mkdir()
        self.groups.write_text("")

    def put(self, group: str, **files: str) -> None:
        """Write the files of a group, `_` for the dots in their names."""
        place = self.root / group
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name.replace("__", ".")).write_text(text)

    def memory(self) -> int | None:
        found = memory_limit(root=self.root, groups=self.groups)
        return None if found is None else found.available

    def cpus(self) -> float | None:
        return cpu_limit(root=self.root, groups=self.groups)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def group_v2(limit: str, current: int, inactive: int = 0) -> dict[str, str]:
    stat = f"anon {current}\ninactive_file {inactive}\nactive_file 0\n"
    return {"memory__max": limit, "memory__current": f"{current}\n", "memory__stat": stat}


def group_v1(limit: str, current: int, inactive: int = 0) -> dict[str, str]:
    stat = f"inactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file 0\n"
    return {
        "memory__limit_in_bytes": limit,
        "memory__usage_in_bytes": f"{current}\n",
        "memory__stat": stat,
    }


def test_group_of_version_2_leaves_its_limit_less_what_is_in_use_and_not_idle_cache(
    tree: Tree,
) -> None:
    tree.groups.write_text("0::/job/step\n")
    tree.put("job/step", **group_v2(f"{700 * MIB}\n", 500 * MIB, 200 * MIB))
    assert tree.memory() == 400 * MIB


def test_group_of_version_1_leaves_its_limit_less_what_is_in_use_and_not_idle_cache(
    tree: Tree,
) -> None:
    tree.groups.write_text("9:cpuset:/\n4:memory:/slurm/uid_0/job_7\n0::/\n")
    tree.put("memory/slurm/uid_0/job_7", **group_v1(f"{700 * MIB}\n", 500 * MIB, 200 * MIB))
    assert tree.memory() == 400 * MIB


def test_smallest_of_a_group_and_those_above_it_counts(tree: Tree) -> None:
    tree.groups.write_text("0::/pod/container\n")
    tree.put("pod", **group_v2(f"{300 * MIB}\n", 100 * MIB))
    tree.put("pod/container", **group_v2(f"{900 * MIB}\n", 100 * MIB))
    assert tree.memory() == 200 * MIB


@pytest.mark.parametrize("path", ["/", "/../..", "/docker/0f3c"])
def test_group_of_a_container_that_is_mounted_as_the_root_is_found(tree: Tree, path: str) -> None:
    tree.groups.write_text(f"4:memory:{path}\n0::{path}\n")
    tree.put("memory", **group_v1(f"{700 * MIB}\n", 100 * MIB))
    assert tree.memory() == 600 * MIB


def test_version_2_beside_version_1_is_read_where_it_is_mounted(tree: Tree) -> None:
    tree.groups.write_text("1:cpu:/\n0::/job\n")
    tree.put("unified/job", **group_v2(f"{700 * MIB}\n", 100 * MIB))
    tree.put("cpu")
    (tree.root / "memory.max").write_text("1\n")  # of no group: nothing states the memory in use
    assert tree.memory() in (600 * MIB, None)


@pytest.mark.parametrize(
    "files", [group_v2("max\n", 5), group_v1(UNLIMITED, 5), {}, {"memory__max": "12\n"}]
)
def test_group_without_a_limit_has_none(tree: Tree, files: dict[str, str]) -> None:
    tree.groups.write_text("4:memory:/\n0::/\n")
    tree.put(".", **files)
    tree.put("memory", **files)
    assert tree.memory() is None


def test_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert memory_limit(root=missing, groups=missing) is None
    assert cpu_limit(root=missing, groups=missing) is None


def test_group_over_its_limit_leaves_nothing() -> None:
    texts = {"memory.max": "100", "memory.current": "150", "memory.stat": "inactive_file 20\n"}
    assert memory_of(texts) == GroupMemory(100, 150, 20, 0)
    assert GroupMemory(100, 150, 20, 0).available == 0


def test_whole_page_cache_is_room_before_a_kill() -> None:
    memory = GroupMemory(limit=100, used=90, inactive_file=20, active_file=50)
    assert (memory.available, memory.room) == (30, 80)


def test_quota_of_processors_is_that_of_the_strictest_group(tree: Tree) -> None:
    tree.groups.write_text("0::/pod/container\n")
    tree.put("pod", cpu__max="150000 100000\n")
    tree.put("pod/container", cpu__max="max 100000\n")
    assert tree.cpus() == 1.5


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1_is_read(tree: Tree, mount: str) -> None:
    tree.groups.write_text("3:cpu,cpuacct:/job\n")
    tree.put(f"{mount}/job", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    tree.put(mount, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert tree.cpus() == 0.5


FILES = "memory.max memory.current memory.limit_in_bytes memory.usage_in_bytes memory.stat cpu.max"
TEXTS = st.text(max_size=20) | st.sampled_from(["max", "max 1", "5 0", "-1", "0", "10\n", "²"])


@given(st.dictionaries(st.sampled_from([*FILES.split(), "cpu.cfs_quota_us"]), TEXTS))
def test_no_text_of_a_group_is_an_error(texts: dict[str, str]) -> None:
    memory_of(texts)
    cpus_of(texts)


PROGRAM = r"""
import logging, sys
import numpy as np
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="LOG %(message)s")
from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.core.errors import StagingExhausted
from ckptmgr.io.threads import producer_threads
state = {"w": np.ones(200 << 17)}
config = CheckpointConfig(save_checkpoint_steps=1, async_save="thread", format="safetensors")
manager = CheckpointManager(sys.argv[1], config)
try:
    manager.save(1, state)
except StagingExhausted as error:
    print("refused:", error)
manager.close()
with CheckpointManager(sys.argv[1], CheckpointConfig(format="safetensors")) as manager:
    manager.save(2, state)
print("saved", producer_threads())
"""


@pytest.fixture
def real_group() -> Iterator[Path]:
    """Make a control group of this machine with 350 MiB."""
    own = Path("/sys/fs/cgroup/memory")
    group = own / f"ckptmgr-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(350 * MIB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_save_in_the_background_that_a_real_limit_would_kill_is_refused_and_warned_of(
    tmp_path: Path, real_group: Path
) -> None:
    enter = (
        f"echo $$ > {real_group}/cgroup.procs && exec {sys.executable} -c '{PROGRAM}' {tmp_path}"
    )
    done = subprocess.run(
        ["sh", "-c", enter],
        capture_output=True,
        text=True,
        env=process_env(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LOG saving in the background takes 200 MiB of memory" in done.stdout
    assert "the memory limit of this container or job leaves" in done.stdout
    assert "refused:" in done.stdout
    assert "save with async_save=False" in done.stdout
    assert "saved" in done.stdout
