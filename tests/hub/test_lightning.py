# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning trains, resumes and cleans up through `CkptmgrIO`: `make hub`."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pl = pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning: make hub")
torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics: make hub")
omegaconf = pytest.importorskip("omegaconf", reason="needs omegaconf: make hub")

from pytorch_lightning.callbacks import Callback, ModelCheckpoint  # noqa: E402
from pytorch_lightning.demos.boring_classes import BoringModel  # noqa: E402
from pytorch_lightning.plugins import AsyncCheckpointIO, CheckpointIO  # noqa: E402

from ckptmgr import save_state  # noqa: E402
from ckptmgr.core.errors import (  # noqa: E402
    CorruptCheckpoint,
    KeyProblem,
    UnsupportedCheckpoint,
    UnsupportedState,
)
from ckptmgr.integrations.lightning import CkptmgrIO  # noqa: E402
from tests.support.saved import overwrite  # noqa: E402

pytestmark = [
    pytest.mark.hub,
    pytest.mark.filterwarnings("default"),  # Lightning advises
]
KEY = bytes(range(16))


class Model(BoringModel):  # type: ignore[misc]
    """A model with hyper parameters, a metric and Adam."""

    def __init__(self, width: int = 2, conf: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(*([] if conf is None else [conf]))
        self.mean = torchmetrics.MeanMetric()
        self.mean.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, which goes into the metric."""
        loss = super().training_step(batch, batch_idx)["loss"]
        self.mean.update(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        """Return Adam with a schedule."""
        adam = torch.optim.Adam(self.parameters(), lr=0.1)
        return [adam], [torch.optim.lr_scheduler.StepLR(adam, step_size=2)]


class Notes(Callback):  # type: ignore[misc]
    """A callback with a state of many types."""

    def __init__(self) -> None:
        self.notes: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the values that training cannot know."""
        return {
            "notes": {
                1: (torch.tensor(3), torch.Size([2])),
                "order": OrderedDict(b=1, a=2),
                "dtype": torch.bfloat16,
                "path": Path("runs"),
                "half": torch.ones(2, dtype=torch.bfloat16),
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        self.notes = state["notes"]


def trainer(directory: Path, plugin: Any, steps: int, *callbacks: Any, **options: Any) -> Any:
    """Return a trainer on the CPU that prints nothing."""
    return pl.Trainer(
        default_root_dir=directory,
        max_steps=steps,
        max_epochs=steps,
        limit_train_batches=2,
        limit_val_batches=0,
        accelerator="cpu",
        devices=1,
        plugins=[plugin],
        callbacks=[*callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def names(directory: Path) -> set[str]:
    """Return all names in a directory."""
    return {path.name for path in directory.iterdir()}


def saved(directory: Path, plugin: CkptmgrIO, steps: int = 4) -> Path:
    """Train, and return the only file that is left."""
    pl.seed_everything(1)
    keeper = ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=1)
    trainer(directory, plugin, steps, keeper, Notes()).fit(Model())
    (path,) = directory.iterdir()
    return path


def test_io_is_one_of_lightning(tmp_path: Path) -> None:
    assert isinstance(CkptmgrIO(), CheckpointIO)


def test_checkpoints_of_a_training_are_one_file_each_and_old_ones_go(tmp_path: Path) -> None:
    pl.seed_everything(1)
    keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=1, save_last=True)
    trainer(tmp_path, CkptmgrIO(), 6, keeper).fit(Model())
    assert names(tmp_path) == {"epoch=2-step=6.ckpt", "last.ckpt"}
    assert not (tmp_path / "last.ckpt").read_bytes().startswith(b"PK")  # no pickle


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_resumed_training_ends_as_one_without_a_break(tmp_path: Path, key: bytes | None) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    pl.seed_everything(1)
    model = Model()
    trainer(whole, CkptmgrIO(), 8, enable_checkpointing=False).fit(model)
    path = saved(resumed, CkptmgrIO(enc_key=key))
    pl.seed_everything(1)  # the model draws its data in the same way
    again, notes = Model(), Notes()
    torch.nn.init.zeros_(again.layer.weight)
    going_on = trainer(resumed, CkptmgrIO(enc_key=key), 8, notes, enable_checkpointing=False)
    going_on.fit(again, ckpt_path=path, weights_only=True)
    assert going_on.global_step == 8
    assert again.mean.compute() == model.mean.compute()
    assert again.optimizers().state_dict()["state"][0]["step"] == 8
    assert again.lr_schedulers().state_dict() == model.lr_schedulers().state_dict()
    assert notes.notes[1] == (torch.tensor(3), torch.Size([2]))
    assert list(notes.notes["order"]) == ["b", "a"]
    assert (notes.notes["dtype"], notes.notes["path"]) == (torch.bfloat16, Path("runs"))
    assert notes.notes["half"].dtype is torch.bfloat16


def test_everything_in_a_checkpoint_comes_back_with_its_type(tmp_path: Path) -> None:
    pl.seed_everything(1)
    training = trainer(tmp_path, CkptmgrIO(), 2, Notes())
    training.fit(Model(width=3))
    torch.save(training._checkpoint_connector.dump_checkpoint(), content := io.BytesIO())
    content.seek(0)
    expected = torch.load(content, weights_only=False)
    training.save_checkpoint(tmp_path / "x.ckpt")
    assert_same(CkptmgrIO().load_checkpoint(tmp_path / "x.ckpt"), expected)


def assert_same(found: Any, expected: Any) -> None:
    """Check that two values are equal, with their types, to the last leaf."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_model_loads_from_a_checkpoint_with_its_hyper_parameters(tmp_path: Path) -> None:
    path = saved(tmp_path, CkptmgrIO())
    model = Model.load_from_checkpoint(CkptmgrIO().as_torch_file(path), weights_only=False)
    expected = CkptmgrIO().load_checkpoint(path)["state_dict"]
    assert model.hparams == {"width": 2, "conf": None}
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_configuration_of_omegaconf_comes_back_as_one(tmp_path: Path) -> None:
    conf = omegaconf.OmegaConf.create({"layers": [1, {"width": 2}], "name": "a"})
    training = trainer(tmp_path, CkptmgrIO(), 2, enable_checkpointing=False)
    training.fit(Model(conf=conf))
    training.save_checkpoint(tmp_path / "x.ckpt")
    found = CkptmgrIO().load_checkpoint(tmp_path / "x.ckpt")
    assert found["hparams_type"] is omegaconf.DictConfig
    assert found["hyper_parameters"] == conf


def test_class_that_a_file_names_is_not_imported(tmp_path: Path) -> None:
    checkpoint = {"hparams_type": "os.system", "hyper_parameters": {"command": "true"}}
    CkptmgrIO().save_checkpoint(checkpoint, tmp_path / "x.ckpt")
    assert CkptmgrIO().load_checkpoint(tmp_path / "x.ckpt") == checkpoint


def test_hyper_parameter_that_is_code_is_refused_with_its_place(tmp_path: Path) -> None:
    checkpoint = {"hyper_parameters": {"activation": torch.nn.ReLU}}
    with pytest.raises(UnsupportedState, match=r"\['hyper_parameters'\]\['activation'\]"):
        CkptmgrIO().save_checkpoint(checkpoint, tmp_path / "x.ckpt")
    assert names(tmp_path) == set()


def test_other_key_and_no_key_open_nothing(tmp_path: Path) -> None:
    CkptmgrIO(enc_key=KEY).save_checkpoint({"n": 1}, tmp_path / "x.ckpt")
    for plugin in (CkptmgrIO(), CkptmgrIO(enc_key=bytes(16))):
        with pytest.raises(KeyProblem):
            plugin.load_checkpoint(tmp_path / "x.ckpt")
    assert CkptmgrIO(dec_key=KEY).load_checkpoint(tmp_path / "x.ckpt") == {"n": 1}


def test_unusable_key_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'enc_key'"):
        CkptmgrIO(enc_key="0123456789abcdef")
    with pytest.raises(ValueError, match="'dec_key'"):
        CkptmgrIO(dec_key="0123456789abcdef")


def test_plain_file_is_loaded_beside_a_key_on_request(tmp_path: Path) -> None:
    CkptmgrIO().save_checkpoint({"n": 1}, tmp_path / "x.ckpt")
    with pytest.raises(KeyProblem):
        CkptmgrIO(enc_key=KEY).load_checkpoint(tmp_path / "x.ckpt")
    plugin = CkptmgrIO(enc_key=KEY, allow_unencrypted=True)
    assert plugin.load_checkpoint(tmp_path / "x.ckpt") == {"n": 1}


def test_file_of_another_name_is_safetensors_and_may_have_several_keys(tmp_path: Path) -> None:
    recipient = tmp_path / "other.key"
    recipient.write_bytes(bytes(range(32)))
    recipient.chmod(0o600)
    plugin = CkptmgrIO(enc_key=KEY, enc_recipients=[f"file:{recipient}"], compression="zstd")
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "new" / "x.pt")
    assert names(tmp_path / "new") == {"x.pt"}
    found = CkptmgrIO(dec_key=f"file:{recipient}").load_checkpoint(tmp_path / "new" / "x.pt")
    assert found["w"].tolist() == [1, 1, 1]


def test_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    CkptmgrIO().save_checkpoint({"w": torch.ones(3)}, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    overwrite(path, bytes(content))
    with pytest.raises(CorruptCheckpoint):
        CkptmgrIO().load_checkpoint(path)


def test_link_to_a_checkpoint_is_replaced_and_not_the_checkpoint(tmp_path: Path) -> None:
    plugin, last = CkptmgrIO(), tmp_path / "last.ckpt"
    plugin.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    last.symlink_to("a.ckpt")
    assert plugin.load_checkpoint(last) == {"n": 1}
    plugin.save_checkpoint({"n": 2}, last)
    assert plugin.load_checkpoint(tmp_path / "a.ckpt") == {"n": 1}
    assert (plugin.load_checkpoint(last), last.is_symlink()) == ({"n": 2}, False)


def test_asynchronous_plugin_of_lightning_saves_through_it(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
    plugin = AsyncCheckpointIO(CkptmgrIO(enc_key=KEY))
    trainer(tmp_path, plugin, 4, keeper).fit(Model())
    assert len(names(tmp_path)) == 2
    assert {
        CkptmgrIO(enc_key=KEY).load_checkpoint(p)["global_step"] for p in tmp_path.iterdir()
    } == {2, 4}


def test_removal_of_what_is_not_there_is_none_and_takes_a_manifest_along(tmp_path: Path) -> None:
    plugin = CkptmgrIO()
    plugin.remove_checkpoint(tmp_path / "none.ckpt")
    plugin.remove_checkpoint(tmp_path / "no" / "none.ckpt")
    plugin.save_checkpoint({"n": 1}, tmp_path / "x.ckpt")
    plugin.remove_checkpoint(tmp_path / "x.ckpt")
    plugin.teardown()
    assert names(tmp_path) == set()


def test_page_about_lightning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "coming-from" / "lightning.md"
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    exec("\n".join(code), {})  # noqa: S102 - our own page
    assert [path.suffix for path in (tmp_path / "runs").iterdir()] == [".ckpt"]


def test_what_has_no_effect_is_refused_by_name(tmp_path: Path) -> None:
    plugin = CkptmgrIO()
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
    with pytest.raises(ValueError, match="is a URL"):
        plugin.save_checkpoint({}, "memory://x.ckpt")
    with pytest.raises(ValueError, match="is a URL"):
        plugin.remove_checkpoint("s3://bucket/x.ckpt")
    plugin.save_checkpoint({}, tmp_path / "x.ckpt")
    assert plugin.load_checkpoint(tmp_path / "x.ckpt", map_location=torch.device("cpu")) == {}
    with pytest.raises(ValueError, match=r"^map_location="):
        plugin.load_checkpoint(tmp_path / "x.ckpt", map_location="cuda")


def test_directory_of_shards_and_missing_file_are_refused(tmp_path: Path) -> None:
    plugin = CkptmgrIO()
    with pytest.raises(UnsupportedCheckpoint, match="sharded strategies"):
        plugin.load_checkpoint(tmp_path)
    with pytest.raises(IsADirectoryError):
        plugin.remove_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        plugin.load_checkpoint(tmp_path / "none.ckpt")
    save_state([1], tmp_path / "list.ckpt")
    with pytest.raises(UnsupportedCheckpoint, match="no checkpoint of Lightning"):
        plugin.load_checkpoint(tmp_path / "list.ckpt")


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "a ${b} c", "${eval:'1+1'}"])
def test_interpolation_of_a_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    name = "omegaconf.dictconfig.DictConfig"
    hyper = {"layers": [{"tag": text}]}
    checkpoint = {"state_dict": {}, "hparams_type": name, "hyper_parameters": hyper}
    save_state(checkpoint, tmp_path / "x.ckpt", manifest=False)
    for load in (CkptmgrIO().load_checkpoint, CkptmgrIO().as_torch_file):
        with pytest.raises(UnsupportedCheckpoint, match="layers") as caught:
            load(tmp_path / "x.ckpt")
        assert repr(text) in str(caught.value)
    found = CkptmgrIO(allow_interpolations=True).load_checkpoint(tmp_path / "x.ckpt")
    assert omegaconf.OmegaConf.to_container(found["hyper_parameters"]) == hyper


def test_configuration_with_interpolations_is_refused_when_it_is_loaded_anew(
    tmp_path: Path,
) -> None:
    conf = omegaconf.OmegaConf.create({"width": 2, "double": "${width}"})
    training = trainer(tmp_path, CkptmgrIO(), 2, enable_checkpointing=False)
    training.fit(Model(conf=conf))
    training.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(UnsupportedCheckpoint, match=r"OmegaConf\.resolve"):
        CkptmgrIO().load_checkpoint(tmp_path / "x.ckpt")
    trusted = CkptmgrIO(allow_interpolations=True)
    assert trusted.load_checkpoint(tmp_path / "x.ckpt")["hyper_parameters"] == conf
