# SPDX-License-Identifier: Apache-2.0
"""Every parameter of the public surfaces has an effect that a user can see, or is refused.

The tables map each parameter to a probe; a parameter without one fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    MemoryConfig,
    ModelCheckpoint,
    Resume,
    export_weights,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
)
from ckptmgr.config.memory_keys import _CHECKS as OFFLOAD_KEYS
from ckptmgr.crypto.keys.key import Key
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.parallel import AutoParallelContext
from ckptmgr.policy.save import EverySteps
from ckptmgr.training.options import SUBJECTS, System
from tests.parallel.ranks import Meeting, Seat
from tests.support import memory_options as memory
from tests.support import options as see
from tests.support.exports import exported
from tests.support.failingdisk import FailingDisk
from tests.support.options import HALVES, KEY, KEYED, SIGNER, STEPS_3, WHOLE, At, Probe
from tests.support.staging_memory import MIB

SAFE = {"format": "safetensors"}
PACKED = {**SAFE, "compression": "zstd"}
BACKGROUND = {"async_save": True}
LONG = {"steps": 6}
ONE_RANK = At(lambda _: Seat(Meeting(1), 0))
RANK_1 = AutoParallelContext(device_num=2, global_rank=1)
FAILING = At(lambda _: FailingDisk(OsFileSystem(), operation="create", call=1, is_lasting=True))
DEDUPLICATED = {"config": {"remove_redundancy": True}, "held": see.same, "layout": WHOLE}
MANAGED, LOOPED = {"surface": CheckpointManager}, {"surface": ModelCheckpoint}

CONFIG = {
    "save_checkpoint_steps": Probe(see.trained, 3, LONG),
    "save_checkpoint_seconds": Probe(see.trained, 50, {**LONG, "save_checkpoint_steps": None}),
    "keep_checkpoint_max": Probe(see.trained, 2, LONG),
    "keep_checkpoint_per_n_minutes": Probe(see.trained, 1, {**LONG, "keep_checkpoint_max": None}),
    "integrated_save": Probe(see.constructed, True, refusal="^integrated_save has no effect"),
    "async_save": Probe(see.heard, True),
    "saved_network": Probe(
        lambda directory, **config: see.looped(directory, config=config), {"v": np.ones(3)}
    ),
    "append_info": Probe(see.trained, ["epoch_num", "step_num", {"lr": 0.5}]),
    "enc_key": Probe(see.trained, KEY),
    "enc_mode": Probe(see.trained, "AES-CBC", {"enc_key": KEY}),
    "exception_save": Probe(see.interrupted, True, {"save_checkpoint_steps": 100}),
    "crc_check": Probe(see.trained, True),
    "remove_redundancy": Probe(
        lambda directory, **config: see.by_two(
            directory, surface=CheckpointManager, held=see.same, layout=WHOLE, config=config
        ),
        True,
    ),
    "format": Probe(see.trained, "safetensors"),
    "keep": Probe(see.trained, "every(3)", LONG),
    "save_only_kept": Probe(see.heard, True, {"keep": "every(4)"}),
    "save_when_measured": Probe(see.trained, "loss", {**LONG, "save_checkpoint_steps": 4}),
    "save_checkpoint_overhead": Probe(see.trained, 1e-9, LONG),
    "memory": Probe(see.staged, MemoryConfig(host_budget_bytes=4096, is_automatic=False)),
    "back_pressure": Probe(see.queued, "skip", {"back_pressure": "coalesce"}),
    "on_error": Probe(see.failed, "warn"),
    "zero_stall": Probe(see.copied, True),
    "verify_after_write": Probe(see.trained, True),
    "file_mode": Probe(see.trained, 0o640),
    "enc_recipients": Probe(see.trained, At(lambda d: [see.key_file(d)]), SAFE),
    "signing_key": Probe(see.trained, SIGNER),
    "compression": Probe(see.trained, "zstd", SAFE),
    "compression_level": Probe(see.trained, 19, PACKED),
    "incremental": Probe(see.trained, True, refusal="^incremental has no effect"),
    "enable_redundance": Probe(see.trained, True, refusal="^enable_redundance has no effect"),
}

MANAGER = {
    "directory": Probe(see.managed, At(lambda d: d / "elsewhere")),
    "config": Probe(see.managed, STEPS_3),
    "prefix": Probe(see.managed, "other"),
    "save_policy": Probe(see.managed, EverySteps(2)),
    "allow_unsealed": Probe(
        see.resumed, True, {"saved": {"enc_key": KEY}, "is_bare": True, "config": KEYED}
    ),
    "allow_unencrypted": Probe(see.resumed, True, {"saved": {}, "config": KEYED}),
    "trusted_keys": Probe(see.resumed, [SIGNER.public_key], {"saved": {}}),
    "keys": Probe(see.managed, Key(KEY), refusal="^a run takes keys from"),
    "signing_key": Probe(see.managed, SIGNER, refusal="^a run takes signing_key from"),
    "every": Probe(see.gone_back, 1, {"steps": 1}),
    "most": Probe(see.gone_back, 9, {"every": 1, "steps": 3}),
    "observe": Probe(see.managed, At(see.note_in)),
    "coordinator": Probe(see.managed, ONE_RANK),
    "timeout_s": Probe(see.alone, 7.5, MANAGED),
    "layout": Probe(see.by_two, HALVES, {**MANAGED, "held": see.half, "config": {}}),
    "keep_redundancy": Probe(see.by_two, 2, {**MANAGED, **DEDUPLICATED}),
    "balance": Probe(see.by_two, "round_robin", {**MANAGED, **DEDUPLICATED}),
    "grace": Probe(see.preempted, 3600.0),
    "after": Probe(see.preempted, 1e-9),
    "signals": Probe(see.held, False),
    "put_aside": Probe(see.left, False, {"config": CheckpointConfig(save_checkpoint_steps=9)}),
    "save_now": Probe(
        see.asked_to_save, "SIGURG", {"config": CheckpointConfig(save_checkpoint_steps=9)}
    ),
    "mirror": Probe(
        lambda d, **options: see.tried(lambda: see.managed(d, **options)),
        At(lambda d: f"file://{d}/bucket"),
    ),
    "context": Probe(see.managed, RANK_1),
    "clock": Probe(see.managed, lambda: 1_600_000_000.0),
    "fs": Probe(lambda d, **options: see.tried(lambda: see.managed(d, **options)), FAILING),
    "processes": Probe(see.cleaned, see.OnlyProcess(), MANAGED),
}

RESUME = {
    "start": Probe(see.resumed, "new", {"saved": {}}),
    "at": Probe(see.resumed, 7, {"saved": {}}),
    "allow_bare": Probe(see.resumed, True, {"saved": {}, "is_bare": True}),
    "only": Probe(see.resumed, "healthy", {"saved": {}, "value": np.nan}),
    "renamed": Probe(see.resumed, {"missing": "v"}, {"saved": {}}),
    "skip_batches": Probe(see.resumed, 1, {"saved": {}, "batches": [1, 2]}),
    "read_back": Probe(see.resumed, False, {"saved": {}, "loads": see.changed}),
    "may_differ": Probe(see.resumed, ["held"], {"saved": {}, "loads": see.changed}),
    "strict": Probe(see.resumed, True, {"saved": {}, "loads": see.counted_on}),
    "on_difference": Probe(see.repeated, "raise"),
    "tolerance": Probe(see.repeated, {"loss": 1.0}),
}

BATCHES = {
    "loader": Probe(see.iterated, [3, 4]),
    "name": Probe(see.iterated, "validation"),
    "epoch": Probe(see.iterated, 2),
    "random": Probe(see.iterated, [see.HIDDEN]),
}

CALLBACK = {
    "prefix": Probe(see.looped, "other"),
    "directory": Probe(see.looped, At(lambda d: str(d / "elsewhere"))),
    "config": Probe(see.looped, {"save_checkpoint_steps": 3}),
    "metrics": Probe(see.looped, {"loss": 0.5}),
    "observe": Probe(see.looped, At(see.note_in)),
    "coordinator": Probe(see.looped, ONE_RANK),
    "timeout_s": Probe(see.alone, 7.5, LOOPED),
    "layout": Probe(see.by_two, HALVES, {**LOOPED, "held": see.half, "config": {}}),
    "keep_redundancy": Probe(see.by_two, 2, {**LOOPED, **DEDUPLICATED}),
    "balance": Probe(see.by_two, "round_robin", {**LOOPED, **DEDUPLICATED}),
    "context": Probe(see.looped, RANK_1),
    "clock": Probe(see.looped, lambda: 1_600_000_000.0),
    "fs": Probe(lambda d, **options: see.tried(lambda: see.looped(d, **options)), FAILING),
    "processes": Probe(see.cleaned, see.OnlyProcess(), LOOPED),
}

SAVE = {
    "save_obj": Probe(see.saved_file, {"v": np.ones(3)}),
    "ckpt_file_name": Probe(see.saved_file, At(lambda d: d / "y")),
    "append_dict": Probe(see.saved_file, {"lr": 0.5}),
    "enc_key": Probe(see.saved_file, KEY),
    "enc_mode": Probe(see.saved_file, "SM4-CBC", {"enc_key": KEY}),
    "choice_func": Probe(see.saved_file, lambda name: name == "n"),
    "crc_check": Probe(see.saved_file, True),
    "format": Probe(see.saved_file, "safetensors"),
    "verify_after_write": Probe(see.saved_file, True),
    "file_mode": Probe(see.saved_file, 0o640),
    "manifest": Probe(see.saved_file, False),
    "signing_key": Probe(see.saved_file, SIGNER),
    "compression": Probe(see.saved_file, "zstd", SAFE),
    "compression_level": Probe(see.saved_file, 19, PACKED),
    "metadata": Probe(see.saved_file, {"author": "me"}, SAFE),
    "remove_redundancy": Probe(see.saved_file, True, SAFE),
    "global_step_num": Probe(see.saved_file, 7),
    "incremental": Probe(see.saved_file, True, refusal="^incremental has no effect"),
}

LOAD = {
    "ckpt_file_name": Probe(see.opened, At(lambda d: d / "other.ckpt")),
    "net": Probe(see.opened, At(see.blank)),
    "strict_load": Probe(
        see.opened, True, {"net": At(lambda d: {n: np.zeros(2) for n in see.blank(d)})}
    ),
    "filter_prefix": Probe(see.opened, "w"),
    "specify_prefix": Probe(see.opened, "w"),
    "choice_func": Probe(see.opened, lambda name: name == "w"),
    "dec_key": Probe(see.opened, KEY, {"saved": {"enc_key": KEY}}),
    "dec_mode": Probe(
        see.opened, "AES-CBC", {"saved": {"enc_key": KEY, "enc_mode": "AES-CBC"}, "dec_key": KEY}
    ),
    "crc_check": Probe(see.opened, True, {"has_manifest": False}),
    "remove_redundancy": Probe(see.opened, True, {"saved": {**SAFE, "remove_redundancy": False}}),
    "format": Probe(see.opened, "safetensors"),
    "allow_unsealed": Probe(
        see.opened, True, {"saved": {"enc_key": KEY}, "is_authenticated": False, "dec_key": KEY}
    ),
    "allow_unencrypted": Probe(see.opened, True, {"dec_key": KEY}),
    "into": Probe(see.opened, At(see.blank)),
    "only": Probe(see.opened, "w"),
    "framework": Probe(see.framework, "pt"),
    "trusted_keys": Probe(see.opened, [SIGNER.public_key]),
}

SAVE_STATE = {
    "state": Probe(see.saved_state, {"v": np.ones(3)}),
    "path": Probe(see.saved_state, At(lambda d: d / "y.ckpt")),
    "step": Probe(see.saved_state, 7),
    "epoch": Probe(see.saved_state, 2),
    "metrics": Probe(see.saved_state, {"loss": 0.5}),
    "format": Probe(
        lambda d, **options: see.tried(lambda: see.saved_state(d, **options)),
        "ckpt",
        {"path": At(lambda d: d / "x")},
    ),
    "enc_key": Probe(see.saved_state, KEY),
    "enc_mode": Probe(see.saved_state, "SM4-GCM", {"enc_key": KEY}),
    "enc_recipients": Probe(see.saved_state, At(lambda d: [see.key_file(d)])),
    "signing_key": Probe(see.saved_state, SIGNER),
    "compression": Probe(see.saved_state, "zstd"),
    "compression_level": Probe(see.saved_state, 19, {"compression": "zstd"}),
    "crc_check": Probe(see.saved_state, True),
    "verify_after_write": Probe(see.saved_state, True),
    "file_mode": Probe(see.saved_state, 0o640),
    "manifest": Probe(see.saved_state, False),
}

_STATE = {"load": load_state}
LOAD_STATE = {
    "path": Probe(see.opened, At(lambda d: d / "other.ckpt"), _STATE),
    "into": Probe(see.opened, At(see.blank), _STATE),
    "only": Probe(see.opened, "w", _STATE),
    "dec_key": Probe(see.opened, KEY, {**_STATE, "saved": {"enc_key": KEY}}),
    "dec_mode": Probe(see.opened, "AES-CBC", {**_STATE, "saved": {"enc_key": KEY}, "dec_key": KEY}),
    "allow_unsealed": Probe(
        see.opened,
        True,
        {**_STATE, "saved": {"enc_key": KEY}, "is_authenticated": False, "dec_key": KEY},
    ),
    "allow_unencrypted": Probe(see.opened, True, {**_STATE, "dec_key": KEY}),
    "trusted_keys": Probe(see.opened, [SIGNER.public_key], _STATE),
}

EXPORT = {
    "path": Probe(exported, At(lambda d: d / "other.ckpt")),
    "directory": Probe(exported, At(lambda d: d / "elsewhere")),
    "only": Probe(exported, "net"),
    "max_shard_size": Probe(exported, "20B"),
    "dec_key": Probe(exported, KEY, {"saved": {"enc_key": KEY}}),
    "dec_mode": Probe(exported, "SM4-CBC", {"saved": {"enc_key": KEY}, "dec_key": KEY}),
    "allow_unsealed": Probe(
        exported, True, {"saved": {"enc_key": KEY}, "is_authenticated": False, "dec_key": KEY}
    ),
    "allow_unencrypted": Probe(exported, True, {"dec_key": KEY}),
    "trusted_keys": Probe(exported, [SIGNER.public_key]),
    "force": Probe(exported, True, {"is_there_already": True}),
}

_SPILL = {"spill_directory": At(lambda d: d / "spill")}
_LITTLE = {"host_budget_bytes": 4096}
_SNAPSHOTS = {"sizes": {step: 2 * MIB for step in range(1, 10)}}
_NO_COSTS = {"restore_time_exponent": 0, "restore_memory_exponent": 0}
_AFTERWARDS = {"is_afterwards": True, "slab_bytes": 2 * MIB}
_WRITES = {"write_block_bytes": MIB // 8, "writes_in_flight": 2}
MEMORY = {
    "host_budget_bytes": Probe(memory.held, 4096),
    "host_share": Probe(memory.held, 0.001, {"host_budget_bytes": 4 * MIB}),
    "disk_budget_bytes": Probe(memory.held, 4096, {**_SPILL, **_LITTLE}),
    "spill_directory": Probe(memory.held, _SPILL["spill_directory"], _LITTLE),
    "device_copy_share": Probe(memory.on_device, 0.5),
    "is_page_locked": Probe(memory.held, True, {"slab_bytes": MIB}),
    "write_block_bytes": Probe(memory.written, MIB // 4, _WRITES),
    "writes_in_flight": Probe(memory.written, 4, _WRITES),
    "slab_bytes": Probe(memory.held, 2 * MIB),
    "staging_place": Probe(memory.held, "disk", {**_SPILL, "is_automatic": False}),
    "snapshot_place": Probe(
        memory.snapped, "disk", {**_SPILL, "is_automatic": False, "sizes": {1: MIB}}
    ),
    "is_automatic": Probe(memory.held, False, {**_SPILL, **_LITTLE}),
    "snapshot_budget_bytes": Probe(memory.snapped, 5 * MIB, _SNAPSHOTS),
    "smallest_evictee_bytes": Probe(
        memory.snapped, 3 * MIB, {"snapshot_budget_bytes": 5 * MIB, **_SNAPSHOTS}
    ),
    "restore_time_exponent": Probe(memory.evicted, 1, _NO_COSTS),
    "restore_memory_exponent": Probe(memory.evicted, 1, _NO_COSTS),
    "is_sampling": Probe(
        memory.snapped,
        True,
        {
            **_NO_COSTS,
            "snapshot_budget_bytes": 6 * MIB,
            "sizes": {1: MIB, 2: 2 * MIB, 3: MIB, 4: MIB, 5: MIB, 6: MIB},
        },
    ),
    "wipe": Probe(memory.held, "at_end", _AFTERWARDS),
    "allocation": Probe(memory.held, "exact", _AFTERWARDS),
    "huge_pages": Probe(memory.held, 1),
}
_MINDSPORE, _DTR, _ASCEND = ({"of": f"from_{name}"} for name in ("mindspore", "dtr", "ascend"))
FROM_MINDSPORE = {
    name: Probe(memory.made, value, _MINDSPORE)
    for name, value in {
        "offload_path": "elsewhere",
        "offload_cpu_size": "2GB",
        "offload_disk_size": "2GB",
        "hbm_ratio": 0.5,
        "cpu_ratio": 0.5,
        "enable_pinned_mem": True,
        "enable_aio": False,
        "aio_block_size": "1GB",
        "aio_queue_depth": 3,
        "aio_queue_size": 3,
        "offload_param": "disk",
        "offload_checkpoint": "disk",
        "auto_offload": True,
        "host_mem_block_size": "1GB",
    }.items()
}
_THRESHOLD = {**_DTR, "eviction_threshold": "5GB"}
FROM_DTR = {
    name: Probe(memory.made, value, _THRESHOLD)
    for name, value in {
        "eviction_threshold": "4GB",
        "evictee_minimum_size": "2MB",
        "recomp_memory_factor": 2,
        "recomp_time_factor": 2,
        "enable_sqrt_sampling": True,
    }.items()
}
FROM_ASCEND = {
    "atomic_clean_policy": Probe(memory.made, 1, _ASCEND),
    "static_memory_policy": Probe(memory.made, 3, _ASCEND),
    "memory_optimization_policy": Probe(memory.made, "x", _ASCEND, refusal="must be one of"),
    "variable_use_1g_huge_page": Probe(memory.made, 2, _ASCEND),
}

# The parameters that stand for others, and which.
_FIELDS = {
    name: [field.name for field in fields(kind)]
    for name, kind in {**SUBJECTS, "old": System}.items()
}
_KEYWORDS = {
    CheckpointManager: _FIELDS,
    ModelCheckpoint: _FIELDS,
    CheckpointConfig: {"options": ["incremental", "enable_redundance"]},
    MemoryConfig.from_mindspore: {"offload_config": [*OFFLOAD_KEYS, "aio_queue_size"]},
    save_checkpoint: {"kwargs": ["incremental", "global_step_num", "remove_redundancy"]},
}
TABLES: Mapping[Callable[..., Any], Mapping[str, Probe]] = {
    CheckpointConfig: CONFIG,
    CheckpointManager: MANAGER,
    CheckpointManager.batches: BATCHES,
    Resume: RESUME,
    ModelCheckpoint: CALLBACK,
    save_checkpoint: SAVE,
    load_checkpoint: LOAD,
    save_state: SAVE_STATE,
    load_state: LOAD_STATE,
    export_weights: EXPORT,
    MemoryConfig: MEMORY,
    MemoryConfig.from_mindspore: FROM_MINDSPORE,
    MemoryConfig.from_dtr: FROM_DTR,
    MemoryConfig.from_ascend: FROM_ASCEND,
}


def parameters_of(surface: Callable[..., Any]) -> list[str]:
    """Return the names of all options of a surface, also of those that come by keyword."""
    made = surface.__init__ if isinstance(surface, type) else surface  # type: ignore[misc]
    names = [name for name in inspect.signature(made).parameters if name != "self"]
    others: Mapping[str, list[str]] = _KEYWORDS.get(surface, {})
    return [one for name in names for one in others.get(name, [name])]


# Options of MindSpore that are taken and change nothing in one file that is durable on return.
ACCEPTED: Mapping[str, tuple[object, object]] = {
    "integrated_save": (False, "yes"),
    "async_save": ("thread", "later"),
}


@pytest.mark.parametrize("option", ACCEPTED)
def test_option_that_is_only_accepted_says_so_changes_nothing_and_is_checked(
    option: str, tmp_path: Path
) -> None:
    taken, wrong = ACCEPTED[option]
    assert f"{option}: Accepted" in str(save_checkpoint.__doc__)
    files = []
    for name, options in (("without", {}), ("with", {option: taken})):
        (tmp_path / name).mkdir()
        files.append(see.saved_file(tmp_path / name, **options))
    assert files[0] == files[1]
    with pytest.raises((TypeError, ValueError)):
        see.saved_file(tmp_path, **{option: wrong})


@pytest.mark.parametrize(
    ("surface", "option"),
    [
        (surface, option)
        for surface in TABLES
        for option in parameters_of(surface)
        if surface is not save_checkpoint or option not in ACCEPTED
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_option_has_an_effect_or_is_refused(
    surface: Callable[..., Any], option: str, tmp_path: Path
) -> None:
    assert option in TABLES[surface], f"{option} of {surface.__name__} needs a probe"
    see.check(TABLES[surface][option], option, tmp_path)
