# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Transformers pyright takes this folder for it)
"""`from_pretrained`: the model of a run, or of a folder in the layout of the Hub, for inference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.arguments import no_effect
from ckptmgr.core.errors import CheckpointNotFound, UnsupportedCheckpoint
from ckptmgr.formats.strict_json import parse_bounded
from ckptmgr.integrations.hub_folder import is_hub_folder, weights_in
from ckptmgr.state.paths import StateMismatch
from ckptmgr.training.manager import CheckpointManager

_SHOWN = 20


def from_pretrained(
    cls: Any,
    directory: str | os.PathLike[str],
    *,
    key: bytes | str | None = None,
    prefix: str = "ckpt",
    checkpoint: int | str = "latest",
    **options: Any,
) -> Any:
    """Return the model of a checkpoint of a run, by default the newest, for inference.

    A directory in the layout of the Hub is taken, too: `config.json` beside `model.safetensors`, or
    its shards and their index, of which each may be encrypted, under its name or with `.ckpe` at its
    end.

    Args:
        cls: The class of the model, or one of the `Auto` classes.
        directory: Directory of the checkpoints that `TrainerCheckpoints` saved, or of the model.
        key: Opens the files. A file that is not encrypted is then refused.
        prefix: As for `TrainerCheckpoints`.
        checkpoint: As for `CheckpointManager.load`: a step, or a selector such as
            `best:eval_loss:min`.
        options: As for `cls.from_pretrained`, such as `dtype`.

    Raises:
        StateMismatch: The model of the configuration has other weights than the run has saved, such as
            one that was trained with adapters of PEFT.
        CheckpointNotFound, UnsupportedCheckpoint: There is no checkpoint, or no configuration in it.
        ValueError: A model of the Hub's layout is asked for a checkpoint.
        CorruptCheckpoint, KeyProblem, OSError: As `CheckpointManager.load`.
    """
    place = Path(directory)
    if is_hub_folder(place):
        if checkpoint != "latest":
            raise no_effect("checkpoint", f"in {place}", "it holds one model in the Hub's layout")
        weights = weights_in(place, key)
        return _made(cls, AutoConfig.from_pretrained(place), weights, place, **options)
    config = CheckpointConfig() if key is None else CheckpointConfig(enc_key=key)
    with CheckpointManager(directory, config, prefix=prefix) as manager:
        newest = manager.latest()
        if newest is None:
            raise CheckpointNotFound(
                "there is no checkpoint of a Trainer",
                path=place,
                hint="name the directory, and prefix=, of a TrainerCheckpoints, or one with config.json and model.safetensors",
            )
        chosen = newest if checkpoint == "latest" else checkpoint
        found: Any = manager.load(chosen, only=["model", "config"])
    if found["config"] is None:
        raise UnsupportedCheckpoint(
            f"{checkpoint} has no configuration of Transformers",
            path=newest.path if chosen is newest else place,
            hint="build the model, and load it with load(..., {'model': model}, only='model')",
        )
    weights = {name: torch.as_tensor(value) for name, value in found["model"].items()}
    made = AutoConfig.for_model(**parse_bounded(found["config"], what="configuration"))
    return _made(cls, made, weights, None, **options)


def _made(
    cls: Any, config: Any, weights: Mapping[str, Any], directory: Path | None, **options: Any
) -> Any:
    """Return a model with these weights, and the generation settings of the directory."""
    if not hasattr(cls, "config_class") or cls.config_class is None:  # an Auto class
        with torch.device("meta"):
            cls = type(cls.from_config(config))
    is_asked = options.pop("output_loading_info", False)
    model, found = cls.from_pretrained(
        None, config=config, state_dict=dict(weights), output_loading_info=True, **options
    )
    if directory is None:  # of a folder Transformers says so itself: a head may be new on purpose
        _check_loaded(cls, found)
    if directory is not None and (directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return (model, found) if is_asked else model


def _check_loaded(cls: Any, found: Mapping[str, Any]) -> None:
    """Raise StateMismatch if the model has weights that are not stored, or lacks stored ones."""
    lines = [f"{name} is not in the checkpoint" for name in sorted(found["missing_keys"])]
    lines += [f"{name} is only in the checkpoint" for name in sorted(found["unexpected_keys"])]
    lines += [f"{one[0]} has another shape" for one in found["mismatched_keys"]]
    if lines:
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        text = "\n  ".join(lines[:_SHOWN]) + more
        raise StateMismatch(
            f"the checkpoint does not fit {cls.__name__}, whose weights would be random:\n  {text}",
            hint="build the model as it was trained, with its adapters (peft.get_peft_model), and load it with"
            " CheckpointManager(DIRECTORY).load('latest', {'model': model}, only='model')",
        )
