# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose floats are not finite: noted by the save, and never preferred to one that is finite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    Ranks,
    Resume,
    UnsupportedCheckpoint,
    save_checkpoint,
)
from ckptmgr.events import Event
from tests.cli.running import key_file, run, run_json
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support.surface import Loop

NAN, INF = float("nan"), float("inf")
LARGE = 3_000_001  # elements: a chunk boundary cuts one of most types
BYTE_TYPES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128", "bfloat16", *BYTE_TYPES]


def saved(directory: Path, state: object, **config: Any) -> Checkpoint:
    """Save one checkpoint of a state; return it as it is listed."""
    with CheckpointManager(directory, CheckpointConfig(**config)) as manager:
        manager.save(1, state)
        manager.wait()
    with CheckpointManager(directory, CheckpointConfig(**config)) as reader:
        (found,) = reader.checkpoints()
    return found


def train(
    directory: Path,
    bad: Sequence[int] = (),
    *,
    steps: int = 4,
    resume: Resume | None = None,
    **config: Any,
) -> tuple[Any, list[int]]:
    """Train to a step, with a weight that is NaN after the `bad` ones; return start and kept steps."""
    state = {"w": np.ones(3)}
    with CheckpointManager(directory, CheckpointConfig(1, **config), prefix="net") as manager:
        start = manager.resume(state, resume)
        for step in range(start.next_step or 1, steps + 1):
            state["w"][1] = NAN if step in bad else step
            manager.step_end(step, state, metrics={"loss": 1 / step})
        kept = [one.step for one in manager.checkpoints()]
    return start, kept


def manifest_of(directory: Path) -> dict[str, Any]:
    (path,) = directory.glob("*.manifest.json")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def array(dtype: str, size: int = 3, value: float = NAN) -> np.ndarray:
    made: np.ndarray = np.ones(size, getattr(ml_dtypes, dtype, dtype))
    made[size - 1] = value
    return made


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_manifest_names_the_tensor_that_is_not_finite(
    tmp_path: Path, dtype: str, format: str
) -> None:
    state = {"a": np.ones(4, np.float32), "m": {"w": array(dtype)}, "i": np.arange(3)}
    assert saved(tmp_path, state, format=format).health == "not finite: m/w"
    assert manifest_of(tmp_path)["stats"]["not_finite"] == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_elements_of_any_bits_are_counted(tmp_path: Path, dtype: type[np.generic]) -> None:
    values = np.frombuffer(np.random.default_rng(1).bytes(1 << 16), dtype)
    expected = int((~np.isfinite(values)).sum())
    assert saved(tmp_path, {"w": values}).health == "not finite: w"
    assert manifest_of(tmp_path)["stats"]["not_finite"] == expected


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "float8_e5m2"])
def test_one_element_in_a_large_tensor_is_found(tmp_path: Path, dtype: str) -> None:
    assert saved(tmp_path, {"w": array(dtype, LARGE, INF)}).health == "not finite: w"


@pytest.mark.parametrize(
    "config",
    [
        {"async_save": "thread"},
        {"async_save": "process"},
        {"async_save": "thread", "zero_stall": True},
        {"format": "safetensors", "compression": "zstd"},
        {"crc_check": True},
    ],
)
def test_every_way_to_save_counts_what_is_not_finite(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    values = array("float32", LARGE)
    values[:2] = INF
    assert saved(tmp_path, {"w": values, "b": array("float8_e5m2")}, **config).health
    assert manifest_of(tmp_path)["stats"]["not_finite"] == 4


@pytest.mark.parametrize(
    "values",
    [
        np.array([np.finfo(np.float32).max, -0.0], np.float32),
        np.full(3, 65504, np.float16),
        np.full(3, -1),
        np.full(8, 255, np.uint8),
        np.array([True]),
        np.empty(0, np.float32),
        np.triu(np.full((4, 4), -INF), 1),
        np.full(3, -INF, ml_dtypes.bfloat16),
    ],
)
def test_finite_floats_integers_and_masks_are_healthy(tmp_path: Path, values: np.ndarray) -> None:
    assert saved(tmp_path, {"v": values}).health is None
    document = manifest_of(tmp_path)
    assert document["schema"] == "ckptmgr.manifest/1"
    assert "health" not in document
    assert "not_finite" not in document["stats"]


def test_infinite_moment_of_a_torch_optimizer_is_named(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg_sq"][1] = INF
    found = saved(tmp_path, {"model": model, "optimizer": optimizer})
    assert found.health == "not finite: optimizer/state/1/exp_avg_sq"


def test_bfloat16_weight_of_torch_is_named(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    weights = torch.ones(LARGE, dtype=torch.bfloat16)
    weights[2_000_000] = NAN
    assert saved(tmp_path, {"w": weights}).health == "not finite: w"


def test_array_of_jax_is_named(tmp_path: Path) -> None:
    jnp: Any = pytest.importorskip("jax.numpy")
    assert saved(tmp_path, {"w": jnp.array([1, NAN], jnp.bfloat16)}).health == "not finite: w"


def test_views_of_one_memory_are_looked_at(tmp_path: Path) -> None:
    memory = array("float32", 10)
    state = {"a": memory[:6], "b": memory[4:]}
    assert saved(tmp_path, state).health == "not finite: a~storage"


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_manifest_of_an_encrypted_file_names_no_tensor(tmp_path: Path, format: str) -> None:
    found = saved(tmp_path, {"secret": array("float32")}, enc_key=b"k" * 32, format=format)
    assert found.health == "not finite"
    assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_manifest_names_no_tensor_once_its_file_is_encrypted(tmp_path: Path) -> None:
    saved(tmp_path / "plain", {"secret": array("float32")}, format="safetensors")
    (plain,) = (tmp_path / "plain").glob("*.safetensors")
    into = tmp_path / f"{plain.name}.ckpe"
    assert run("encrypt", plain, "-o", into, "--key", key_file(tmp_path)).exit_code == 0
    assert manifest_of(tmp_path)["health"] == "not finite"


def test_set_names_the_tensor_of_the_first_rank_that_is_not_finite(tmp_path: Path) -> None:
    meeting = Meeting()

    def one(rank: int) -> str | None:
        config = CheckpointConfig(10)
        with CheckpointManager(tmp_path, config, ranks=Ranks(Seat(meeting, rank))) as manager:
            manager.save(1, {f"w{rank}": array("float32", value=NAN if rank else 1)})
        return manager.checkpoints()[0].health

    found = [outcome.must() for outcome in run_ranks(meeting, one)]
    assert set(found) == {"not finite: w1"}
    assert manifest_of(tmp_path)["schema"] == "ckptmgr.manifest/2"


def test_checkpoint_of_named_tensors_has_its_health(tmp_path: Path) -> None:
    save_checkpoint({"fc.weight": array("float32")}, tmp_path / "net.ckpt")
    assert manifest_of(tmp_path)["health"] == "not finite: fc.weight"


def test_retention_keeps_the_newest_finite_checkpoint(tmp_path: Path) -> None:
    _, kept = train(tmp_path, [3, 4, 5, 6], steps=6, keep="last(2)")
    assert kept == [2, 5, 6]
    _, kept = train(tmp_path, steps=9, keep="last(2)")
    assert kept == [6, 8, 9]  # the one that it was resumed from stays


def test_best_prefers_finite_checkpoints(tmp_path: Path) -> None:
    _, kept = train(tmp_path, [3, 4], keep="best(1, loss, min)")
    assert kept == [2, 4]
    with CheckpointManager(tmp_path, prefix="net") as manager:
        best = manager.best("loss", "min")
    assert best is not None
    assert best.step == 2


def test_latest_is_finite_where_one_is(tmp_path: Path) -> None:
    train(tmp_path / "some", [3, 4], keep="all")
    train(tmp_path / "none", [1, 2], steps=2, keep="all")
    for name, step in (("some", 2), ("none", 2)):
        with CheckpointManager(tmp_path / name, prefix="net") as manager:
            latest = manager.latest()
        assert latest is not None
        assert latest.step == step


def test_prune_and_rm_keep_the_newest_finite_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, [3, 4], keep="all")
    refused = run("rm", "2", "--dir", tmp_path, "--yes")
    assert "net-2.ckpt is the newest finite one of run" in refused.stderr
    assert run("prune", tmp_path, "--keep", "last(1)", "--yes").exit_code == 0
    assert [one["step"] for one in run_json("ls", tmp_path)["items"]] == [2, 4]


def test_resume_of_a_checkpoint_that_is_not_finite_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, [3, 4], keep="all")
    start, _ = train(tmp_path, steps=4)
    note = (
        'net-4.ckpt is not finite: w; the newest finite one is net-2.ckpt: Resume(only="healthy")'
    )
    assert (start.step, [one.startswith(note) for one in start.notes]) == (4, [True])
    assert note in caplog.text


def test_healthy_resume_passes_over_what_is_not_finite(tmp_path: Path) -> None:
    train(tmp_path, [3, 4], keep="all")
    start, kept = train(tmp_path, steps=4, resume=Resume(only="healthy"), keep="all")
    assert (start.step, start.notes) == (2, ())
    assert [(one.checkpoint.step, one.is_damaged) for one in start.skipped] == [
        (4, False),
        (3, False),
    ]
    assert "not finite: w" in start.skipped[0].reason
    assert kept == [1, 2, 3, 4, 3, 4]


def test_healthy_resume_without_a_healthy_checkpoint_is_refused(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], steps=2)
    with pytest.raises(UnsupportedCheckpoint, match=r"not finite: w.*healthy"):
        train(tmp_path, resume=Resume(only="healthy"))
    start, _ = train(tmp_path, steps=2)
    assert start.step == 2


def test_callback_that_resumes_what_is_not_finite_says_so(tmp_path: Path) -> None:
    network = {"w": np.ones(2), "bias": array("float32")}
    callback = ModelCheckpoint("net", str(tmp_path), CheckpointConfig(save_checkpoint_steps=1))
    Loop(callbacks=(callback,), batch_num=10, network=network).run(1)
    found = ModelCheckpoint("net", str(tmp_path), CheckpointConfig()).resume()
    assert found is not None
    assert found.doubt == "net-1_1.ckpt is not finite: bias"


@pytest.mark.parametrize("other", [{"at": 3}, {"start": "new"}])
def test_healthy_with_a_chosen_start_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="only has no effect"):
        Resume(only="healthy", **other)


def test_ranks_pass_over_what_is_not_finite_together(tmp_path: Path) -> None:
    def job(bad: Sequence[int], resume: Resume | None) -> list[int]:
        meeting = Meeting()

        def one(rank: int) -> int:
            config = CheckpointConfig(1, keep="all")
            with CheckpointManager(tmp_path, config, ranks=Ranks(Seat(meeting, rank))) as manager:
                state = {f"w{rank}": np.ones(2)}
                start = manager.resume(state, resume)
                for step in range(start.next_step or 1, 4):
                    state[f"w{rank}"][0] = NAN if step in bad and rank == 1 else 1
                    manager.step_end(step, state)
            return start.step

        return [outcome.must() for outcome in run_ranks(meeting, one)]

    assert job([3], None) == [0, 0, 0]
    assert job([], Resume(only="healthy")) == [2, 2, 2]


def test_save_warns_of_the_first_one_that_is_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, [2, 3])
    assert caplog.text.count("is not finite: w: NaN or infinite elements were saved") == 1


@pytest.mark.parametrize(
    "line", [("ls",), ("inspect", "4", "--dir"), ("verify",)], ids=lambda line: line[0]
)
def test_commands_show_the_health(tmp_path: Path, line: tuple[str, ...]) -> None:
    train(tmp_path, [3, 4], keep="all")
    assert "not finite: w" in run(*line, tmp_path).stdout


def test_report_shows_the_health(tmp_path: Path) -> None:
    train(tmp_path / "runs", [3, 4], keep="all")
    assert run("report", tmp_path / "runs", "-o", tmp_path / "report.html").exit_code == 0
    assert "not finite: w" in (tmp_path / "report.html").read_text()


def test_event_of_the_save_has_the_health(tmp_path: Path) -> None:
    events: list[Event] = []
    with CheckpointManager(tmp_path, observe=events.append) as manager:
        manager.save(1, {"w": array("float32")})
    assert [one.notes for one in events if one.name == "save.durable"] == [("not finite: w",)]


def test_json_has_the_health(tmp_path: Path) -> None:
    train(tmp_path, [2], steps=2)
    found = [one["health"] for one in run_json("ls", tmp_path)["items"]]
    assert found == [None, "not finite: w"]


def test_health_that_others_wrote_has_no_control_characters(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.full(2, np.nan)})
    (path,) = tmp_path.glob("*.manifest.json")
    path.write_text(path.read_text().replace("not finite: w", r"not finite: \u001b[31m\n"))
    (found,) = CheckpointManager(tmp_path).checkpoints()
    assert found.health == r"not finite: \x1b[31m\n"
