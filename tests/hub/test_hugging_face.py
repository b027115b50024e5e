# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's libraries load what `save_checkpoint` wrote of a torch module: `make hub`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, save_checkpoint

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate: make hub")
hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: make hub")
transformers = pytest.importorskip("transformers", reason="needs transformers: make hub")

pytestmark = [
    pytest.mark.hub,
    pytest.mark.filterwarnings("default"),  # these libraries warn of each other
]


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).bfloat16()


def assert_same(one: Any, other: Any) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file that a user saved of `network(1)`."""
    saved = save_checkpoint(network(1), tmp_path / "model.safetensors", format="safetensors")
    return saved.path


def test_file_of_a_module_loads_in_huggingface_hub(saved: Path) -> None:
    loaded = network(2)
    hub.load_torch_model(loaded, saved)
    assert_same(loaded, network(1))


def test_file_of_a_module_loads_in_accelerate(saved: Path) -> None:
    loaded = network(2)
    accelerate.load_checkpoint_in_model(loaded, str(saved))
    assert_same(loaded, network(1))


def test_file_of_a_model_loads_in_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.BertConfig(num_hidden_layers=1, vocab_size=16, **sizes)
    model = transformers.BertModel(config)
    config.save_pretrained(tmp_path)
    save_checkpoint(model, tmp_path / "model.safetensors", format="safetensors")
    loaded = transformers.BertModel.from_pretrained(tmp_path, local_files_only=True)
    assert_same(loaded, model)


def test_file_of_a_manager_loads_in_huggingface_hub(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(format="safetensors")) as manager:
        manager.save(1, network(1).state_dict())
    (path,) = tmp_path.glob("*.safetensors")
    loaded = hub.load_state_dict_from_file(path)
    for name, tensor in network(1).state_dict().items():
        assert torch.equal(loaded[name], tensor), name
