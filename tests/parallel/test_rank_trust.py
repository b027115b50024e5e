# SPDX-License-Identifier: Apache-2.0
"""Files of many ranks with keys: what neither a key nor a trusted signature proves is refused, or said to be unproven."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import KeyProblem, UnprovenCheckpoint, load_checkpoint, save_checkpoint
from ckptmgr.parallel import (
    WrittenFiles,
    load_distributed_checkpoint,
    load_segmented_checkpoints,
    transform_checkpoint_by_rank,
    transform_checkpoints,
    unified_safetensors,
)
from tests.parallel.mindspore.test_rank_steps import rows_over, value_of
from tests.support import api

KEY = bytes(range(32))
SIGNER = api.SigningKey(bytes(range(32)))
STRANGER = api.SigningKey(bytes(32))

Call = Callable[..., Any]


def saved(directory: Path, *, key: bytes | None, signer: api.SigningKey | None) -> Path:
    for rank in range(2):
        path = directory / f"rank_{rank}" / "net-1_10.ckpt"
        path.parent.mkdir(parents=True)
        save_checkpoint({"w": value_of(10)}, path, enc_key=key, signing_key=signer)
    return directory


def files_of(source: Path) -> dict[int, Path]:
    return {rank: source / f"rank_{rank}" / "net-1_10.ckpt" for rank in range(2)}


def by_transform(source: Path, strategy: Path, **more: Any) -> WrittenFiles:
    return transform_checkpoints(source, source.parent / "out", "net", strategy, **more)


def by_unify(source: Path, strategy: Path, **more: Any) -> WrittenFiles:
    return unified_safetensors(source, strategy, source.parent / "out", **more)


def by_rank(source: Path, strategy: Path, **more: Any) -> Path:
    out = source.parent / "out/net.ckpt"
    return transform_checkpoint_by_rank(0, files_of(source), out, strategy, **more)


def by_loading(source: Path, strategy: Path, **more: Any) -> object:
    return load_distributed_checkpoint(
        {"w": np.zeros(4, np.int64)},
        list(files_of(source).values()),
        train_strategy_filename=strategy,
        **more,
    )


def by_segments(source: Path, _: Path, **more: Any) -> object:
    return load_segmented_checkpoints(str(source / "rank_0"), **more)


calls = pytest.mark.parametrize("call", [by_transform, by_unify, by_rank, by_loading, by_segments])


@calls
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_files_that_a_trusted_key_signed_are_taken(
    call: Call, key: bytes | None, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", key=key, signer=SIGNER)
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    assert call(source, strategy, dec_key=key, trusted_keys=[SIGNER.public_key])


@calls
@pytest.mark.parametrize("signer", [None, STRANGER], ids=["unsigned", "foreign"])
def test_files_that_no_trusted_key_signed_are_refused(
    call: Call, signer: api.SigningKey | None, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", key=None, signer=signer)
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    with pytest.raises(KeyProblem, match="signed"):
        call(source, strategy, trusted_keys=[SIGNER.public_key])
    assert not (tmp_path / "out").exists()


@calls
def test_file_without_manifest_is_refused_because_nothing_proves_its_step(
    call: Call, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", key=KEY, signer=None)
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    for name in ("rank_0", "rank_1"):
        (source / name / "net-1_10.ckpt.manifest.json").unlink()
    with pytest.raises(UnprovenCheckpoint, match="nothing proves of which training step"):
        call(source, strategy, dec_key=KEY)
    assert call(source, strategy, dec_key=KEY, allow_unsealed=True)


@pytest.mark.parametrize("call", [by_transform, by_unify])
def test_result_says_that_no_key_proves_the_strategy(
    call: Call, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(tmp_path / "in", key=KEY, signer=SIGNER)
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    (note,) = call(source, strategy, dec_key=KEY).notes
    assert "not proven by any key: the strategy in" in note
    assert str(strategy) in note
    assert caplog.messages == [note]
    caplog.clear()
    (note,) = call(source, strategy, dec_key=KEY, trusted_keys=[SIGNER.public_key]).notes
    assert str(strategy) in note


@pytest.mark.parametrize("call", [by_rank, by_loading])
def test_log_says_that_no_key_proves_the_strategy(
    call: Call, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(tmp_path / "in", key=KEY, signer=None)
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    call(source, strategy, dec_key=KEY)
    assert "not proven by any key: the strategy in" in caplog.text


def test_strategies_of_plain_files_and_no_strategy_need_no_note(tmp_path: Path) -> None:
    source = saved(tmp_path / "plain", key=None, signer=None)
    assert by_transform(source, rows_over(tmp_path / "rows.ckpt", 2)).notes == ()
    path = tmp_path / "sealed" / "rank_0" / "net.ckpt"
    path.parent.mkdir(parents=True)
    save_checkpoint({"w": value_of(1)}, path, enc_key=KEY)
    files = transform_checkpoints(tmp_path / "sealed", tmp_path / "out", "net", dec_key=KEY)
    assert files.notes == ()
    assert load_checkpoint(files[0])["w"].tolist() == [1, 1]


def test_trusted_keys_of_unified_files_are_refused_as_they_have_no_effect(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trusted_keys must be None when format is 'safetensors'"):
        load_distributed_checkpoint(
            {},
            format="safetensors",
            unified_safetensors_dir=tmp_path,
            trusted_keys=[SIGNER.public_key],
        )
