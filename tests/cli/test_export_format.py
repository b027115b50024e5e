# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr export --to`: a checkpoint in another format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from ckptmgr import (
    CheckpointManager,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
)
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.mindspore import writer
from ckptmgr.formats.tensor import MapTensors, Tensor, TensorSpec, tensor_from_array
from tests.cli.running import key_file, process_env, run, run_json
from tests.support.saved import KEY, flip, items, save_run

NET = {"weight": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.ones(4, np.float16)}
STATE = {"net": NET, "optimizer": {"m": np.zeros(50)}, "step": 7}


def export(path: Path, out: Path, format: str, *options: str | Path) -> Any:
    return run("export", path, "-o", out, "--to", format, *options)


def same(found: Any, wanted: Any) -> bool:
    assert found.keys() == wanted.keys()
    return all(
        found[name].dtype == array.dtype and (found[name] == array).all()
        for name, array in wanted.items()
    )


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("a.ckpt", {}),
        ("a.safetensors", {}),
        ("a.safetensors.ckpz", {"compression": "zstd"}),
        ("a.ckpt", {"enc_key": KEY.raw}),
        ("a.safetensors.ckpe", {"enc_key": KEY.raw}),
    ],
    ids=["ckpt", "safetensors", "compressed", "sealed", "container"],
)
def test_state_of_every_format_loads_from_the_new_file(
    tmp_path: Path, format: str, name: str, config: dict[str, Any]
) -> None:
    path = save_state(STATE, tmp_path / name, **config).path
    key = ("--key", key_file(tmp_path)) if "enc_key" in config else ()
    out = tmp_path / f"out.{format}"
    result = export(path, out, format, *key)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith(f"{path} → {out}  3 tensors, 1 file, ")
    state: Any = load_state(out)
    assert state["step"] == 7
    assert same(state["net"], NET)
    assert sorted(load_checkpoint(out)) == ["net/bias", "net/weight", "optimizer/m"]
    assert run("verify", out).exit_code == 0


def test_names_of_mindspore_stay_in_both_directions(tmp_path: Path) -> None:
    names = {"fc.weight": np.ones((2, 3), np.float32), "moments.fc.weight": np.zeros(6)}
    path = save_checkpoint(names, tmp_path / "net").path
    assert export(path, tmp_path / "b.safetensors", "safetensors").exit_code == 0
    assert same(load_checkpoint(tmp_path / "b.safetensors"), names)
    assert export(tmp_path / "b.safetensors", tmp_path / "c.ckpt", "ckpt").exit_code == 0
    assert same(load_checkpoint(tmp_path / "c.ckpt"), names)


def test_part_loses_its_name_and_is_all_that_is_written(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "a.ckpt").path
    assert export(path, tmp_path / "b.ckpt", "ckpt", "--only", "net").exit_code == 0
    assert same(load_checkpoint(tmp_path / "b.ckpt"), NET)


def test_step_and_metrics_go_along_into_a_directory(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", prefix="net") as manager:
        manager.save(4, STATE, metrics={"loss": 0.5})
    (tmp_path / "out").mkdir()
    document = run_json(
        "export", "4", "--dir", tmp_path / "run", "-o", tmp_path / "out", "--to", "safetensors"
    )
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert document["items"] == [{"path": str(path), "size_bytes": path.stat().st_size}]
    assert document["summary"]["directory"] == str(tmp_path / "out")
    (listed,) = run_json("ls", tmp_path / "out")["items"]
    assert (listed["step"], listed["metrics"]) == (4, {"loss": 0.5})


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(2)
    path = save_state({"net": {"a": weight, "b": weight}}, tmp_path / "a.ckpt").path
    for only in ((), ("--only", "net")):
        out = tmp_path / f"b{len(only)}.safetensors"
        assert "1 tensor (1 tied)" in export(path, out, "safetensors", *only).stdout
    state: Any = load_state(tmp_path / "b0.safetensors")
    assert sorted(state["net"]) == ["a", "b"]
    with safe_open(tmp_path / "b2.safetensors", "np") as file:
        assert file.metadata() == {"b": "a", "format": "pt"}


def test_texts_stay_in_a_ckpt_and_are_left_out_of_safetensors(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path / "run", [1])
    assert export(path, tmp_path / "a.ckpt", "ckpt").stderr == ""
    assert load_checkpoint(tmp_path / "a.ckpt")["net"] == load_checkpoint(path)["net"]
    result = export(path, tmp_path / "b.safetensors", "safetensors")
    assert result.exit_code == 0
    assert "left out: 1 text" in result.stderr
    assert sorted(load_checkpoint(tmp_path / "b.safetensors")) == ["epoch_num", "fc.weight"]


def test_map_parameter_stays_in_a_ckpt_and_is_refused_for_safetensors(tmp_path: Path) -> None:
    key = tensor_from_array("key", np.arange(2, dtype=np.int32))
    value = tensor_from_array("value", np.ones((2, 3), np.float32))
    status = tensor_from_array("status", np.zeros(2, np.int32))
    content = [*items(), MapTensors(name="table", key=key, value=value, status=status)]
    (path,) = save_run(tmp_path / "run", [1], content=content)
    assert export(path, tmp_path / "a.ckpt", "ckpt").exit_code == 0
    found: Any = load_checkpoint(tmp_path / "a.ckpt")["table"]
    assert (found.value == np.ones((2, 3))).all()
    result = export(path, tmp_path / "b.safetensors", "safetensors")
    assert result.exit_code == 2
    assert "'table' is a map parameter" in result.stderr
    assert not (tmp_path / "b.safetensors").exists()


def test_int4_of_mindspore_goes_there_and_back(tmp_path: Path) -> None:
    spec = TensorSpec(name="w", dtype=BY_NAME["int4"], shape=(2,))
    tensors = [Tensor(spec=spec, content=lambda: memoryview(b"ab"))]
    (path,) = save_run(tmp_path / "run", [1], content=tensors)
    assert export(path, tmp_path / "b.safetensors", "safetensors").exit_code == 0
    assert export(tmp_path / "b.safetensors", tmp_path / "c.ckpt", "ckpt").exit_code == 0
    assert (tmp_path / "c.ckpt").read_bytes() == path.read_bytes()


def test_tensor_of_a_type_that_mindspore_lacks_is_refused_by_name(tmp_path: Path) -> None:
    values = {"w": np.ones(2, np.complex64)}
    path = save_checkpoint(values, tmp_path / "a", format="safetensors").path
    result = export(path, tmp_path / "b.ckpt", "ckpt")
    assert result.exit_code == 2
    assert "MindSpore cannot load complex64" in result.stderr
    assert not (tmp_path / "b.ckpt").exists()


def test_tensor_of_several_slices_is_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(writer.build_ckpt_image.__kwdefaults__ or {})
    monkeypatch.setattr(
        writer.build_ckpt_image, "__kwdefaults__", options | {"slice_bytes": 70_000}
    )
    values = {"a": np.arange(50_001, dtype=np.float64), "b": np.arange(60_000, dtype=np.uint8)}
    path = save_checkpoint(values, tmp_path / "net", format="safetensors").path
    assert export(path, tmp_path / "b.ckpt", "ckpt").exit_code == 0
    assert same(load_checkpoint(tmp_path / "b.ckpt"), values)


def test_damaged_checkpoint_leaves_no_file(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "a.ckpt").path
    flip(path, path.stat().st_size // 2)
    assert export(path, tmp_path / "b.safetensors", "safetensors").exit_code == 1
    assert not list(tmp_path.glob("*b.safetensors*"))


def test_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "a.ckpt").path
    out = save_state({"w": np.ones(1)}, tmp_path / "b.safetensors").path
    assert export(path, out, "safetensors").exit_code == 13
    assert list(load_checkpoint(out)) == ["w"]
    assert export(path, out, "safetensors", "--force").exit_code == 0
    assert len(load_checkpoint(out)) == 3


def test_part_is_refused_beside_the_whole_checkpoints_of_its_run(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path / "run", [1])
    series = path.name.partition("-")[0]
    refused = export(path, tmp_path / f"run/{series}-1_9.ckpt", "ckpt", "--only", "fc")
    assert refused.exit_code == 13
    assert "only a part of its state" in refused.stderr
    assert export(path, tmp_path / "run/fc.ckpt", "ckpt", "--only", "fc").exit_code == 0


def test_file_without_any_proof_is_exported_with_a_note(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "a.ckpt", manifest=False, crc_check=False).path
    assert "not verified" in export(path, tmp_path / "b.safetensors", "safetensors").stderr
    path = save_state(STATE, tmp_path / "c.ckpt", manifest=False).path
    assert export(path, tmp_path / "d.safetensors", "safetensors").stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "ckpt", "--hf"), "takes --hf or --to"),
        (("--to", "pickle"), "--to"),
        (("--to", "ckpt", "--max-shard-size", "1GB"), "--max-shard-size goes with --hf"),
        (("--to", "safetensors"), "must end in .safetensors"),
        (("--to", "ckpt", "--only", "nothing"), "its parts are 'net', 'optimizer'"),
    ],
)
def test_unusable_option_is_refused_by_name(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    path = save_state(STATE, tmp_path / "a.ckpt").path
    result = run("export", path, "-o", tmp_path / "b.ckpt", *options)
    assert result.exit_code in (2, 13)
    assert message in result.stderr
    assert not (tmp_path / "b.ckpt").exists()


def test_checkpoint_of_many_ranks_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "net-1_1.shards"
    path.touch()
    result = export(path, tmp_path / "b.ckpt", "ckpt")
    assert result.exit_code == 2
    assert "many ranks" in result.stderr


_LARGE_BYTES = 384 << 20
_MOST_BYTES = _LARGE_BYTES * 3 // 4
_PEAK = """
import sys
from pathlib import Path
from ckptmgr.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


# So large that the window of 16 MiB in every thread is small beside it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("large.ckpt", ("--to", "safetensors")),
        ("large.safetensors.ckpe", ("--to", "ckpt")),
        ("large.safetensors.ckpe", ("--hf",)),
    ],
    ids=["plain to safetensors", "encrypted to ckpt", "encrypted for the Hub"],
)
def test_process_that_exports_needs_less_memory_than_the_largest_tensor(
    fast_path: Path, source: str, layout: tuple[str, ...]
) -> None:
    config: dict[str, Any] = (
        {"enc_key": KEY.raw, "format": "safetensors"} if "ckpe" in source else {}
    )
    large = {"w": np.zeros(_LARGE_BYTES >> 2, np.float32)}
    path = save_checkpoint(large, fast_path / source, **config).path
    del large
    key = ("--key", key_file(fast_path)) if config else ()
    out = fast_path / ("out" if layout == ("--hf",) else f"out.{layout[-1]}")
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, "export", path, "-o", out, *layout, *key],
        stdout=subprocess.PIPE,
        env=process_env(),
        check=True,
    )
    assert int(done.stdout.split()[-1]) << 10 < _MOST_BYTES
