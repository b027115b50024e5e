# SPDX-License-Identifier: Apache-2.0
"""Directories of every kind to try all commands on, and the commands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from ckptmgr import save_checkpoint
from ckptmgr.cli import cli
from tests.cli.running import run
from tests.maintenance.test_repair import damage
from tests.maintenance.test_repair import saved as save_ranks
from tests.support import api
from tests.support.foreign import golden_run
from tests.support.saved import flip, items, save_run


class World(NamedTuple):
    """Directories that commands are tried on, and the name of the checkpoint of many ranks."""

    directory: Path
    set_name: str


def make_world(work: Path) -> World:
    """Make directories of every kind that commands meet."""
    for name in ("run.key", "new.key"):
        assert run("keygen", "--out", work / name).exit_code == 0
    assert run("keygen", "--type", "p256", "--out", work / "bundle.pem").exit_code == 0
    runs = work / "runs"
    save_run(runs, [1, 2, 3], metrics={1: {"loss": 0.5}, 2: {"loss": float("nan")}})
    assert run("pin", "3", "--dir", runs, "--reason", "paper").exit_code == 0
    assert run("tag", "3", "paper", "--dir", runs).exit_code == 0
    for name in ("damaged", "pruned"):
        shutil.copytree(runs, work / name)
    flip(work / "damaged/net-1_1.ckpt", 40)
    assert run("verify", work / "damaged").exit_code == 1
    assert run("prune", work / "pruned", "--keep", "last(1)", "--yes").exit_code == 0
    save_run(
        work / "tensors", [1, 2], options=api.SaveOptions(format="safetensors"), content=items()[:2]
    )
    for path in (work / "tensors").glob("*.safetensors"):
        line = ("encrypt", path, "-o", work / "sealed" / f"{path.name}.ckpe")
        (work / "sealed").mkdir(exist_ok=True)
        assert run(*line, "--key", f"file:{work / 'run.key'}").exit_code == 0
    golden_run("transformers", work / "hf")
    shutil.copytree(work / "hf", work / "pruned-hf")
    assert run("prune", work / "pruned-hf", "--keep", "last(1)", "--yes").exit_code == 0
    whole = save_ranks(work / "set")
    shutil.copytree(work / "set", work / "damaged-set")
    damage(work / "damaged-set" / whole.shards[2], 0.3)
    (work / "empty").mkdir()
    (work / "whole/rank_0").mkdir(parents=True)
    save_checkpoint({"w": np.arange(4)}, work / "whole/rank_0/net.ckpt")
    (work / "note.txt").write_text("a note\n")
    return World(work, whole.name)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command of the tree."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command
