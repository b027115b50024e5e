# SPDX-License-Identifier: Apache-2.0
"""`verify` by the workers of Ray and of Dask: `make kit FRAMEWORK=ray`."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointNotFound, KeyProblem
from ckptmgr.files.save.job import SaveOptions
from tests.cli.running import key_file, run
from tests.support.saved import KEY, flip, save_run

ray = pytest.importorskip("ray", reason="needs ray: make kit FRAMEWORK=ray")
pytest.importorskip("dask", reason="needs dask: make kit FRAMEWORK=ray")
by_ray = pytest.importorskip("ckptmgr.integrations.ray")
by_dask = pytest.importorskip("ckptmgr.integrations.dask")

pytestmark = [
    pytest.mark.kit,
    pytest.mark.filterwarnings("ignore"),  # those of Ray
]
STEPS = list(range(10, 110, 10))
ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ray": (by_ray, {"num_cpus": 0.5}),
    "dask threads": (by_dask, {"scheduler": "threads"}),
    "dask processes": (by_dask, {"scheduler": "processes", "num_workers": 2}),
}
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster of Ray on this machine."""
    ray.shutdown()  # that of other tests in this process
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000
    )
    yield
    ray.shutdown()


def verified(engine: str, place: Path, **options: Any) -> Any:
    module, own = ENGINES[engine]
    return module.verify(place, **{"parts": 3, **own, **options})


@engines
def test_answer_is_that_of_the_command(engine: str, tmp_path: Path) -> None:
    flip(save_run(tmp_path, STEPS)[3], -1)
    answer = verified(engine, tmp_path)
    command = run("verify", tmp_path, "--json")
    expected = json.loads(command.stdout)
    assert list(answer.results) == expected["items"]
    assert answer.summary == {**expected["summary"], "parts": 3, "failed": {}}
    assert (answer.exit_code, command.exit_code) == (1, 1)


@engines
def test_key_is_read_by_the_worker(engine: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run", [10, 20], options=SaveOptions(key=KEY))
    answer = verified(engine, tmp_path / "run", key=key_file(tmp_path))
    assert answer.is_ok
    assert answer.summary["statuses"] == {"ok": 2}
    with pytest.raises(TypeError, match="must be the source of a key"):
        verified(engine, tmp_path / "run", key=KEY.raw)
    with pytest.raises(KeyProblem, match="NOT_SET"):
        verified(engine, tmp_path / "run", key="env:NOT_SET")


@engines
def test_missing_directory_is_named(engine: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no such directory"):
        verified(engine, tmp_path / "none")


def killing_source(folder: Path, times: int) -> str:
    """Return the source of a key whose command kills the worker that asks for it, so often."""
    folder.mkdir()
    script = folder / "key.sh"
    kills = "".join(
        f'mkdir "{folder}/{one}" 2>/dev/null && kill -9 $PPID && exit\n' for one in range(times)
    )
    script.write_text(f"#!/bin/sh\n{kills}echo {KEY.raw.hex()}\n")
    script.chmod(stat.S_IRWXU)
    return f"cmd:{script}"


def test_part_whose_worker_dies_is_repeated_by_ray(tmp_path: Path) -> None:
    save_run(tmp_path / "run", STEPS, options=SaveOptions(key=KEY))
    answer = verified("ray", tmp_path / "run", key=killing_source(tmp_path / "key", 1))
    assert (answer.is_ok, answer.summary["count"]) == (True, len(STEPS))


def test_part_whose_worker_died_for_good_is_named(tmp_path: Path) -> None:
    save_run(tmp_path / "run", STEPS, options=SaveOptions(key=KEY))
    source = killing_source(tmp_path / "key", 1)
    answer = verified("ray", tmp_path / "run", key=source, max_retries=0)
    ((part, reason),) = answer.failed.items()
    assert part in ("1/3", "2/3", "3/3")
    assert reason.startswith("WorkerCrashedError: ")
    assert (answer.exit_code, answer.is_ok) == (3, False)
    assert 0 < answer.summary["count"] < len(STEPS)


def test_part_that_kills_the_processes_of_dask_is_named(tmp_path: Path) -> None:
    save_run(tmp_path / "run", STEPS, options=SaveOptions(key=KEY))
    # The first death ends the computation, the second one a part that is computed by itself.
    source = killing_source(tmp_path / "key", 2)
    program = (
        "import sys\n"
        "from ckptmgr.integrations.dask import verify\n"
        "if __name__ == '__main__':\n"
        "    found = verify(sys.argv[1], parts=3, key=sys.argv[2], scheduler='processes', num_workers=1)\n"
        "    print(found.failed, found.exit_code, found.summary['count'])\n"
    )
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "run"), source]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("{'1/3': 'BrokenProcessPool: ")
    assert done.stdout.split()[-2] == "3"
