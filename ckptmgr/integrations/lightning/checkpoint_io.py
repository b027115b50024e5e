# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of PyTorch Lightning, each one durable file, without pickle.

```
trainer = Trainer(plugins=[CkptmgrIO(enc_key="env:RUN_KEY")], callbacks=[ModelCheckpoint(...)])
trainer.fit(model, ckpt_path="last")
```

`ModelCheckpoint` decides about saves and retention, as ever. Works with `lightning` and
`pytorch_lightning`, whichever is installed; one of the two may also be imported later.

A checkpoint of Lightning is a dictionary: versions and counters, `state_dict`, `loops`,
`callbacks`, `optimizer_states`, `lr_schedulers`, hyper parameters, what hooks add. Everything comes
back with its type: tensors with theirs (also of `torchmetrics`), `OrderedDict`, tuples, integer
keys, paths, and the configuration of omegaconf as such. Hyper parameters that are classes,
functions or other objects are refused by name when they are saved; an enum comes back as the name
of its member, a `Namespace` as a dictionary.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptmgr.config.checks import check_file_mode
from ckptmgr.config.keys import check_given_key
from ckptmgr.core.arguments import check_is_bool
from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.files.save.single_file import remove_single_file
from ckptmgr.files.state_file import load_state, save_state
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.io.permissions import DEFAULT_FILE_MODE
from ckptmgr.state.configs import interpolations_of

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FORMATS = (".ckpt", ".safetensors")
# The kinds of hyper parameters that Lightning names by their class, and under which keys.
_CONFIGURATIONS = {
    "omegaconf.dictconfig.DictConfig": "DictConfig",
    "omegaconf.listconfig.ListConfig": "ListConfig",
}
_SHOWN = 5
_HYPER_PARAMETERS = {
    "hparams_type": "hyper_parameters",
    "datamodule_hparams_type": "datamodule_hyper_parameters",
}


class CkptmgrIO:
    """A `CheckpointIO` of Lightning over `save_state` and `load_state`: one file for each path.

    A path that ends in `.safetensors` (`ModelCheckpoint.FILE_EXTENSION = ".safetensors"`) or in
    anything but `.ckpt` is a safetensors file, which may also have a passphrase, several keys or a
    compression. Strategies that save a directory of shards (FSDP, DeepSpeed, model parallel) do not
    use their `CheckpointIO` for that.

    Args:
        enc_key: As for `save_state`: encrypts the files, and opens them.
        enc_mode: As for `save_state`.
        enc_recipients: As for `save_state`.
        dec_key: Opens the files, if not `enc_key` does.
        compression: As for `save_state`.
        verify_after_write: As for `save_state`.
        file_mode: As for `save_state`; directories are made as the umask allows.
        allow_unencrypted: With a key, load plain files, too.
        allow_interpolations: Load hyper parameters with interpolations of omegaconf, such as
            `${oc.env:NAME}`, which call resolvers in this process when they are read.

    Raises:
        ValueError: A key is unusable.
        ImportError: Lightning is not installed.
    """

    def __init__(
        self,
        *,
        enc_key: bytes | str | None = None,
        enc_mode: str = "AES-GCM",
        enc_recipients: Sequence[str] = (),
        dec_key: bytes | str | None = None,
        compression: str | None = None,
        verify_after_write: bool = False,
        file_mode: int = DEFAULT_FILE_MODE,
        allow_unencrypted: bool = False,
        allow_interpolations: bool = False,
    ) -> None:
        check_given_key("enc_key", enc_key)
        check_given_key("dec_key", dec_key)
        self._saving: dict[str, Any] = {
            "enc_key": enc_key,
            "enc_mode": enc_mode,
            "enc_recipients": enc_recipients,
            "compression": compression,
            "verify_after_write": verify_after_write,
            "file_mode": check_file_mode(file_mode),
        }
        self._loading: dict[str, Any] = {
            "dec_key": enc_key if dec_key is None else dec_key,
            "allow_unencrypted": allow_unencrypted,
        }
        check_is_bool("allow_interpolations", allow_interpolations)
        self._allows_interpolations = allow_interpolations
        register(type(self))

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object = None,
    ) -> None:
        """Save a checkpoint; when it returns, it survives a power cut, and an older one is replaced.

        Raises:
            TypeError: `storage_options` are given.
            ValueError: The path is a URL.
            UnsupportedState: A value cannot be stored; names its place in the checkpoint.
            StoreLocked, StoreFull, OSError: As `save_state`.
        """
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for"
                " `CkptmgrIO`: it writes to local and mounted file systems, which have none"
            )
        place = _local(path)
        OsFileSystem().make_directory(place.parent, mode=None)
        if place.is_symlink():
            # What `save_last="link"` left; saved through it, the checkpoint that it names would be
            # replaced.
            remove_single_file(place)
        save_state(
            storable(checkpoint),
            place,
            format=None if place.name.endswith(_FORMATS) else "safetensors",
            manifest=False,
            **self._saving,
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: object = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint to host memory; a damaged one is an error, never a wrong value.

        Args:
            path: The file.
            map_location: None or the CPU: Lightning copies the tensors to its devices.
            weights_only: Accepted. Nothing is ever unpickled, and no code of a file is run.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The path is a URL, or `map_location` another device.
            CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint: As `load_state`; or the hyper
                parameters have interpolations.
        """
        if map_location is not None and str(map_location) != "cpu":
            raise ValueError(
                f"map_location={map_location!r} has no effect: CkptmgrIO loads to host memory; leave it out and"
                " move the module"
            )
        place = _local(path)
        if not place.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")  # as Lightning's own
        if place.is_dir():
            raise UnsupportedCheckpoint(
                "is a directory, as sharded strategies save",
                path=place,
                hint="load it with the strategy that saved it, or, saved by DCP, with ckptmgr.integrations.dcp",
            )
        found = load_state(place, **self._loading)
        if not isinstance(found, dict):
            raise UnsupportedCheckpoint("holds no checkpoint of Lightning", path=place)
        return restored(
            found,
            way_out="if you trust the file, pass CkptmgrIO(allow_interpolations=True)",
            allow_interpolations=self._allows_interpolations,
        )

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint durably, if it is there.

        Raises:
            ValueError: The path is a URL.
            IsADirectoryError: It is a directory.
            StoreLocked: Another process is saving it now.
        """
        remove_single_file(_local(path))

    def as_torch_file(self, path: str | os.PathLike[str]) -> io.BytesIO:
        """Return a checkpoint as `torch.save` writes it, for what reads no other files.

        ```
        Model.load_from_checkpoint(checkpoint_io.as_torch_file(path))
        ```
        """
        import torch

        content = io.BytesIO()
        torch.save(self.load_checkpoint(path), content)
        content.seek(0)
        return content

    def teardown(self) -> None:
        """Do nothing: saved files are durable."""


def register(kind: type) -> None:
    """Have the base classes of Lightning take `kind` as their own.

    Raises:
        ImportError: There is none.
    """
    names = [name for name in PACKAGES if name in sys.modules]
    names = names or [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None]
    if not names:
        raise ImportError("CkptmgrIO needs lightning or pytorch_lightning")
    for name in names:
        importlib.import_module(f"{name}.plugins").CheckpointIO.register(kind)


def _local(path: str | os.PathLike[str]) -> Path:
    """Return a path; raise ValueError for the URL of a remote file system."""
    if "://" in str(path):
        raise ValueError(
            f"{path} is a URL: CkptmgrIO saves to local and mounted file systems, because others promise no atomic"
            " replacement; give a path"
        )
    return Path(path)


def storable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint in which classes of hyper parameters are named."""
    kinds = {key: checkpoint[key] for key in _HYPER_PARAMETERS if key in checkpoint}
    names = {
        key: f"{kind.__module__}.{kind.__qualname__}"
        for key, kind in kinds.items()
        if isinstance(kind, type)
    }
    return {**checkpoint, **names}


def restored(
    checkpoint: dict[str, Any],
    *,
    way_out: str,
    given: Sequence[object] = (),
    allow_interpolations: bool = False,
) -> dict[str, Any]:
    """Undo `storable`; the classes are those of omegaconf, so that a file names no others.

    `given` are the hyper parameters of the program: an interpolation in them may be one.

    Raises:
        UnsupportedCheckpoint: The file would bring another interpolation into a configuration, which
            would be resolved in this process.
    """
    for key, values in _HYPER_PARAMETERS.items():
        name = _CONFIGURATIONS.get(checkpoint.get(key, ""))
        if name is not None:
            stored = checkpoint[values]
            found = [interpolations_of(stored, one) for one in (*given, None)]
            brought = min(found, key=len)
            if brought and not allow_interpolations:
                raise UnsupportedCheckpoint(
                    f"{values} would bring interpolations into this process, where reading them calls resolvers: "
                    + "; ".join(brought[:_SHOWN]),
                    hint=f"{way_out}; or resolve them before they are saved, with OmegaConf.resolve",
                )
            kind = getattr(importlib.import_module("omegaconf"), name)
            checkpoint |= {key: kind, values: kind(stored)}
    return checkpoint
