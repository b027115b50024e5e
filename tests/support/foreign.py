# SPDX-License-Identifier: Apache-2.0
"""Directories of other tools: golden ones of the real tools, and built ones after their sources."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden/foreign"
GOLDEN_RUNS = {
    "transformers": "transformers/run",
    "lightning": "lightning/lightning_logs/version_0/checkpoints",
    "torchtitan-or-dcp": "dcp/checkpoint",
    "orbax": "orbax/run",
}


def golden_run(tool: str, into: Path) -> Path:
    """Copy the directory that a real tool wrote."""
    return Path(shutil.copytree(GOLDEN / GOLDEN_RUNS[tool], into))


def write_archive(path: Path) -> Path:
    """Write a ZIP archive of stored records, as torch.save does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("archive/data/0", bytes(range(64)))
    return path


def torchtitan_run(directory: Path) -> Path:
    """Make of two checkpoints of DCP those of torchtitan 0.3: with the name of a value of its trainer."""
    golden_run("torchtitan-or-dcp", directory)
    for path in directory.glob("step-*/.metadata"):
        # After the end of the pickle, where a reader of its opcodes does not look.
        path.write_bytes(path.read_bytes() + b"train_state.ntokens_seen")
    return directory


def deepspeed_run(directory: Path, steps: tuple[int, ...] = (10, 20, 30), latest: int = 30) -> Path:
    """Write what DeepSpeed's `save_checkpoint` leaves with ZeRO on two ranks."""
    for step in steps:
        folder = directory / f"global_step{step}"
        write_archive(folder / "mp_rank_00_model_states.pt")
        for rank in range(2):
            write_archive(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (directory / "latest").write_text(f"global_step{latest}")
    (directory / "zero_to_fp32.py").write_text("# a script of DeepSpeed\n")
    return directory


def megatron_run(
    directory: Path, steps: tuple[int, ...] = (100, 200, 300), latest: str = "300"
) -> Path:
    """Write what Megatron-LM leaves with two tensor-parallel ranks."""
    for step in steps:
        for rank in range(2):
            write_archive(directory / f"iter_{step:07d}/mp_rank_{rank:02d}/model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text(latest)
    return directory


def any_run(tool: str, into: Path) -> Path:
    """Make a directory of a tool."""
    if tool == "deepspeed":
        return deepspeed_run(into)
    if tool == "torchtitan":
        return torchtitan_run(into)
    return megatron_run(into) if tool == "megatron" else golden_run(tool, into)


TOOLS = (
    "transformers",
    "lightning",
    "torchtitan",
    "torchtitan-or-dcp",
    "orbax",
    "deepspeed",
    "megatron",
)
