# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's libraries load what `export_weights` wrote: `make hub`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, export_weights

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate: make hub")
hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: make hub")
transformers = pytest.importorskip("transformers", reason="needs transformers: make hub")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.hub,
    pytest.mark.filterwarnings("default"),  # these libraries warn of each other
]
KEY = bytes(range(32))


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3)
    ).bfloat16()


def tied(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def assert_same(one: Any, other: Any) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def exported(model: Any, directory: Path, *, max_shard_size: int | str = "5GB") -> Path:
    """Return an export of the encrypted checkpoint of a training."""
    config = CheckpointConfig(format="safetensors", enc_key=KEY)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(directory / "run", config) as manager:
        manager.save(1, {"model": model, "optimizer": optimizer})
    (path,) = (directory / "run").glob("*.safetensors*[!n]")
    export_weights(path, directory / "hf", only="model", dec_key=KEY, max_shard_size=max_shard_size)
    return directory / "hf"


@pytest.mark.parametrize("max_shard_size", ["5GB", "1KB"])
def test_export_loads_in_huggingface_hub(tmp_path: Path, max_shard_size: str) -> None:
    directory = exported(network(1), tmp_path, max_shard_size=max_shard_size)
    loaded = network(2)
    hub.load_torch_model(loaded, directory)
    assert_same(loaded, network(1))


@pytest.mark.parametrize("max_shard_size", ["5GB", "1KB"])
def test_export_loads_in_accelerate(tmp_path: Path, max_shard_size: str) -> None:
    directory = exported(network(1), tmp_path, max_shard_size=max_shard_size)
    loaded = network(2)
    accelerate.load_checkpoint_in_model(loaded, str(directory))
    assert_same(loaded, network(1))


@pytest.mark.parametrize("max_shard_size", ["5GB", "2KB"])
def test_export_of_tied_weights_loads_in_transformers(tmp_path: Path, max_shard_size: str) -> None:
    model = tied(1)
    directory = exported(model, tmp_path, max_shard_size=max_shard_size)
    model.config.save_pretrained(directory)
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(
        directory, local_files_only=True, output_loading_info=True
    )
    assert_same(loaded, model)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_export_names_ties_as_the_hub_does(tmp_path: Path) -> None:
    model = tied(1)
    directory = exported(model, tmp_path, max_shard_size="2KB")
    (tmp_path / "theirs").mkdir()
    hub.save_torch_model(model, tmp_path / "theirs", max_shard_size="2KB")
    names = [
        {name for path in one.glob("*.safetensors") for name in safetensors_torch.load_file(path)}
        for one in (directory, tmp_path / "theirs")
    ]
    # The hub keeps the first name of tied weights in the alphabet, the export that in the state.
    assert names[0] - names[1] == {"transformer.wte.weight"}
    assert names[1] - names[0] == {"lm_head.weight"}
    other = tied(2)
    safetensors_torch.load_model(tied(2), exported(model, tmp_path / "one") / "model.safetensors")
    hub.load_torch_model(other, directory)
    assert_same(other, model)
