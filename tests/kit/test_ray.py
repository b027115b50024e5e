# SPDX-License-Identifier: Apache-2.0
"""Ray Train goes on bit for bit after a killed worker: `make kit FRAMEWORK=ray`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, CheckpointNotFound, UnsupportedCheckpoint, load_state
from ckptmgr.testing.child import find_program
from ckptmgr.testing.kit import differences
from tests.cli.running import key_file
from tests.kit.cuts import KILLS_AT_EDGES, every_cut
from tests.test_examples import MOST_LINES, lines_of

pytest.importorskip("torch")
pytest.importorskip("ray", reason="needs ray: make kit FRAMEWORK=ray")
train = pytest.importorskip("ray.train", reason="needs ray: make kit FRAMEWORK=ray")
ours = pytest.importorskip("ckptmgr.integrations.ray")

pytestmark = [
    pytest.mark.kit,
    pytest.mark.filterwarnings("ignore"),  # those of Ray
]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_train.py"
OWN = "tests/kit/ray_programs.py"
PROGRAMS = {f"{OWN}:local": {"steps_per_epoch": 4, "keep": 2, "fork": True}}
PREPARED = {f"{OWN}:prepared": {"steps_per_epoch": 4, "keep": 2, "fork": True}}
# Ray asks its workers every two seconds, and the nodes every five.
FAST = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2"}


@every_cut(PROGRAMS)
@pytest.mark.usefixtures("kit")
def test_local_mode_goes_on_as_if_it_had_not_been_cut(
    cut: str, check: Callable[[str], None]
) -> None:
    check(cut)


@every_cut(PREPARED, KILLS_AT_EDGES)
@pytest.mark.usefixtures("kit")
def test_prepared_loader_goes_on_at_the_edges_of_an_epoch(
    cut: str, check: Callable[[str], None]
) -> None:
    check(cut)


# ---------------------------------------------------------------------- two workers, one killed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the results of runs of two workers, one of them with a killed worker."""
    folder = tmp_path_factory.mktemp("cluster")
    environment = {**os.environ, **FAST, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = ROOT / "tests" / "kit" / "ray_programs.py"
    subprocess.run([sys.executable, str(program), str(folder)], env=environment, check=True)
    return folder, json.loads((folder / "found.json").read_text())


Cluster = tuple[Path, dict[str, Any]]


def test_killed_worker_is_restarted_at_the_last_committed_step_and_goes_on_bit_for_bit(
    cluster: Cluster,
) -> None:
    folder, found = cluster
    assert (found["uncut"]["metrics"]["begun"], found["cut"]["metrics"]["begun"]) == (0, 9)
    whole, cut = (load_state(folder / f"{name}.safetensors") for name in ("uncut", "cut"))
    assert differences(whole, cut) == []


def test_result_has_metrics_and_a_reference_to_the_checkpoint_of_the_last_step(
    cluster: Cluster,
) -> None:
    folder, found = cluster
    assert found["uncut"]["metrics"]["loss"] > 0
    assert found["uncut"]["reference"]["step"] == 14  # saved after the last report of the loop
    assert found["uncut"]["reference"]["directory"] == str(folder / "uncut")


def test_num_to_keep_of_ray_removes_references_and_no_checkpoint(cluster: Cluster) -> None:
    _, found = cluster
    assert len(found["uncut"]["references"]) == 1
    assert found["uncut"]["steps"] == [12, 14]


def test_second_start_under_the_same_name_finds_its_references_and_the_end_of_the_run(
    cluster: Cluster,
) -> None:
    _, found = cluster
    assert found["again"]["metrics"]["begun"] == 14
    assert found["again"]["reference"]["step"] == 14


def test_node_that_is_going_to_be_taken_away_has_its_step_saved_once_and_goes_on(
    cluster: Cluster,
) -> None:
    _, found = cluster
    (step, why), *others = found["preempted"]["saved"]
    assert (why, others) == ("preempted", [[step + 1, "end"]])
    assert found["preempted"]["metrics"] == {"stop": False}  # else Ray would not restart the run


def test_relative_directory_in_a_worker_is_refused_because_it_would_be_lost(
    cluster: Cluster,
) -> None:
    _, found = cluster
    assert "'runs/ray' is relative" in found["refused"]["relative"]


def test_workers_without_a_coordinator_are_refused_by_name(cluster: Cluster) -> None:
    _, found = cluster
    assert "2 workers save together" in found["refused"]["many"]
    assert "TorchTrainer" in found["refused"]["many"]


def test_trial_of_ray_tune_is_refused_with_the_way_out(cluster: Cluster) -> None:
    _, found = cluster
    assert "this is a trial of Ray Tune: use CheckpointManager here" in found["trial"]["problem"]
    assert found["trial"]["saved"] == "TRIAL-1.ckpt"


# ---------------------------------------------------------------------- in local mode


def run(
    loop: Callable[[dict[str, Any]], None], directory: Path, *, workers: int = 0, **config: Any
) -> Any:
    """Run a loop in this process; return the result of Ray."""
    torch_trainer = pytest.importorskip("ray.train.torch").TorchTrainer
    return torch_trainer(
        loop,
        train_loop_config={"directory": str(directory), **config},
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(storage_path=str(directory / "ray")),
    ).fit()


def counting(config: dict[str, Any]) -> None:
    state = {"count": 0, "other": 1}
    saves = CheckpointConfig(keep="last(1)", enc_key=bytes(32))
    with ours.RayCheckpointManager(config["directory"], saves) as manager:
        for step in range(1, 4):
            state["count"] = step
            manager.step_end(step, state)
            manager.report({"step": step})


def test_reported_checkpoint_is_loaded_whole_or_in_parts(tmp_path: Path) -> None:
    result = run(counting, tmp_path)
    assert ours.load_reported(result.checkpoint, key=bytes(32)) == {"count": 3, "other": 1}
    part = ours.load_reported(result.checkpoint, key=bytes(32), only="count")
    assert part == {"count": 3}


def test_reference_whose_checkpoint_was_pruned_since_is_a_lookup_error(tmp_path: Path) -> None:
    first = run(counting, tmp_path).checkpoint
    facts = first.get_metadata()
    facts["ckptmgr"]["name"] = "ckpt-1.ckpt"
    first.set_metadata(facts)
    with pytest.raises(CheckpointNotFound, match=r"ckpt-1\.ckpt"):
        ours.load_reported(first, key=bytes(32))


def test_checkpoint_of_another_origin_is_refused_by_name(tmp_path: Path) -> None:
    for other in (train.Checkpoint.from_directory(tmp_path), None):
        with pytest.raises(UnsupportedCheckpoint, match="RayCheckpointManager"):
            ours.load_reported(other)


def test_manager_outside_of_a_worker_is_refused(tmp_path: Path) -> None:
    command = (
        f"from ckptmgr.integrations.ray import RayCheckpointManager as M; M({str(tmp_path)!r})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True
    )
    assert "RuntimeError" in done.stderr.splitlines()[-1]
    assert "train" in done.stderr.splitlines()[-1].lower()


# ---------------------------------------------------------------------- the example and the page


def without_checkpoints(text: str) -> str:
    """Return the same program without ckptmgr."""
    text = re.sub(r"from ckptmgr.*\n", "", text)
    text = re.sub(r" +manager\.step_end\(.*\n", "", text)
    text = text.replace("manager.resume(state).step", "0")
    text = text.replace("manager.batches(loader)", "loader").replace("manager.report", "report")
    head, _, body = re.split(r"( +with RayCheckpointManager.*\n)", text)
    block, end, tail = body.partition("\n\ndef main")
    text = head + re.sub("^    ", "", block, flags=re.MULTILINE) + end + tail
    assert "manager" not in text
    return text.replace("from ray.train import", "from ray.train import report,")


def test_example_is_at_most_three_lines_longer_and_trains_alike(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    plain = without_checkpoints(text)
    assert 0 < lines_of(text) - lines_of(plain) <= MOST_LINES
    names: dict[str, Any] = {"__name__": "plain"}
    exec(plain, names)  # noqa: S102 - our own example
    expected = names["main"](str(tmp_path / "none"), 13, workers=0)
    found = find_program(f"{EXAMPLE}:main")(str(tmp_path / "runs"), 13, workers=0)  # type: ignore[call-arg]
    assert found.metrics == expected.metrics  # type: ignore[attr-defined]


def test_example_runs_as_printed(tmp_path: Path) -> None:
    environment = {**os.environ, **FAST, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLE)]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert list((tmp_path / "runs").rglob("ckpt-25.ckpt"))


def test_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    first, second, third = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    in_this_process = first.replace("num_workers=2", "num_workers=0")
    assert in_this_process != first
    exec(in_this_process, names)  # noqa: S102 - our own page
    exec(second, names)  # noqa: S102
    assert names["result"].metrics["loss"] < 1
    source = key_file(tmp_path, hex_digits=bytes(32).hex())
    exec(third.replace("file:/run/secrets/run-key", source), names)  # noqa: S102
    assert names["found"].summary["statuses"] == {"ok": names["found"].summary["count"]}
