# SPDX-License-Identifier: Apache-2.0
"""Whatever is saved loads back, in every format, cipher and with or without CRC; whatever is damaged is an error.

Every single bit and every length of small files is tried. Only a plain file that neither a CRC nor a manifest vouches for may
give other values, and then well-formed ones.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    Checkpoint,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    UnsupportedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.values import read_values
from ckptmgr.files.save.job import SaveOrder, draft_entry
from ckptmgr.files.save.saver import save_items
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Item, MapTensors, Tensor
from tests.support import api
from tests.support.stored import Stored, StoredItem
from tests.support.strategies import ckpt_items, item_name, safetensors_items
from tests.support.surface import KEY, comparable, everything_said, shows

_OTHER_KEY = b"another 16 bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One way to write a file."""

    format: str = "ckpt"
    mode: str | None = None
    crc: bool = False

    @property
    def name(self) -> str:
        return f"x.{self.format}"

    def __str__(self) -> str:
        return "-".join([self.format, *([self.mode] if self.mode else []), *(["crc"] * self.crc)])


_KINDS = [
    _Kind(format=format, mode=mode, crc=crc)
    for format, modes in (
        ("ckpt", (None, "AES-GCM", "AES-CBC", "SM4-CBC")),
        ("safetensors", (None,)),
    )
    for mode in modes
    for crc in (False, True)
]


def _save(directory: Path, kind: _Kind, items: Sequence[Item]) -> Checkpoint:
    key = None if kind.mode is None else api.Key(KEY)
    store = api.place(directory, keys=key, allow_unencrypted=True)
    options = api.SaveOptions(
        format=kind.format, key=key, mode=kind.mode or "AES-GCM", has_crc=kind.crc
    )
    manifest = save_items(
        store,
        SaveOrder(
            name=kind.name,
            items=items,
            options=options,
            series="x",
            draft=api.Manifest(
                file=draft_entry(kind.name, options),
                series="x",
                run_id="",
                step=0,
                sequence=0,
                saved_at=datetime.now(UTC),
            ),
        ),
    )
    return manifest.to_checkpoint(directory)


def _load(path: Path, kind: _Kind) -> dict[str, StoredItem]:
    key = None if kind.mode is None else KEY
    mode = kind.mode or "AES-GCM"
    return comparable(load_checkpoint(path, dec_key=key, dec_mode=mode, crc_check=kind.crc))


def _expected(items: Sequence[Item]) -> dict[str, StoredItem]:
    expected: dict[str, StoredItem] = {}
    for item in items:
        if isinstance(item, Tensor):
            expected[item_name(item)] = _stored(item)
        elif isinstance(item, MapTensors):
            expected[item.name] = tuple(map(_stored, (item.key, item.value, item.status)))
        else:
            expected[item.name] = item.text
    return expected


def _stored(tensor: Tensor) -> Stored:
    spec = tensor.spec
    return Stored(spec.dtype.to_numpy().name, spec.shape, bytes(tensor.content()))


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind.format == "ckpt"], ids=str)
@settings(max_examples=12)
@given(items=ckpt_items())
def test_ckpt_of_anything_loads_back(kind: _Kind, items: list[Item]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = _save(Path(directory), kind, items)
        loaded = _load(checkpoint.path, kind)
    assert loaded == _expected(items)
    assert list(loaded) == [item_name(item) for item in items]


@settings(max_examples=25)
@given(items=safetensors_items().filter(bool))
def test_safetensors_of_anything_load_back(items: list[Tensor]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = _save(Path(directory), _Kind(format="safetensors"), items)
        assert _load(checkpoint.path, _Kind(format="safetensors")) == _expected(items)


@settings(max_examples=10)
@given(
    names=st.sets(st.sampled_from(["w", "net.w", "net.b", "opt.m", "名前"]), min_size=1),
    prefix=st.sampled_from(["net.", "opt", "名"]),
)
def test_prefixes_choose_names_that_start_so_and_the_others(names: set[str], prefix: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.ckpt"
        save_checkpoint({name: np.zeros(1) for name in names}, path)
        chosen = {name for name in names if name.startswith(prefix)}
        if chosen:
            assert set(load_checkpoint(path, specify_prefix=prefix)) == chosen
        if names - chosen:
            assert set(load_checkpoint(path, filter_prefix=[prefix])) == names - chosen


_STATE = {
    "w": np.array([1, 2], np.float32),
    "on": np.array([True, False]),
    "n": np.array(3, np.int64),
}
_ALLOWED = (CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint)


def _stored_file(directory: Path, kind: _Kind) -> tuple[bytes, api.Manifest]:
    """Save the small state; return the file and its manifest."""
    save_checkpoint(
        _STATE,
        directory / kind.name,
        format=kind.format,
        enc_key=None if kind.mode is None else KEY,
        enc_mode=kind.mode or "AES-GCM",
        crc_check=kind.crc,
    )
    manifest = api.place(directory).read_manifest(kind.name)
    assert manifest is not None
    return (directory / kind.name).read_bytes(), manifest


def _read(data: bytes, kind: _Kind, manifest: api.Manifest | None) -> dict[str, StoredItem]:
    """Load bytes as `load_checkpoint` loads a file of that name."""
    key = None if kind.mode is None else api.Key(KEY)
    opened = open_source(
        BytesSource(data),
        path=f"/runs/{kind.name}",
        options=api.reading(keys=key, mode=kind.mode),
        manifest=manifest,
    )
    return comparable(read_values(opened, check_crc=kind.crc))


def _flips(data: bytes) -> Iterator[bytes]:
    for position in range(len(data) * 8):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        yield bytes(changed)


def _cuts(data: bytes) -> Iterator[bytes]:
    for length in range(len(data)):
        yield data[:length]


def _outcomes(
    damaged: Iterator[bytes], kind: _Kind, manifest: api.Manifest | None
) -> Iterator[dict[str, StoredItem] | CkptmgrError]:
    """Yield what each damaged file reads to; any other exception than ours ends the test."""
    for data in damaged:
        try:
            yield _read(data, kind, manifest)
        except CkptmgrError as error:
            yield error


def _assert_told(error: CkptmgrError, kind: _Kind) -> None:
    assert isinstance(error, _ALLOWED)
    assert str(error).startswith(f"/runs/{kind.name}: ")
    assert not shows(everything_said(error), KEY)


@pytest.mark.parametrize("damage", [_flips, _cuts], ids=["flip", "cut"])
@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_damaged_file_without_manifest_is_an_error_where_anything_vouches_for_it(
    kind: _Kind, damage: object, tmp_path: Path
) -> None:
    data, _ = _stored_file(tmp_path, kind)
    whole = _read(data, kind, None)
    is_vouched = kind.crc or kind.mode is not None
    damaged = _flips(data) if damage is _flips else _cuts(data)
    errors = 0
    for outcome in _outcomes(damaged, kind, None):
        if isinstance(outcome, CkptmgrError):
            _assert_told(outcome, kind)
            errors += 1
        elif is_vouched:
            # The CRC of safetensors covers names and contents; of the header only the fields that they need.
            assert kind.format == "safetensors"
            assert outcome == whole
    assert errors > 0


@pytest.mark.parametrize("damage", [_flips, _cuts], ids=["flip", "cut"])
@pytest.mark.parametrize("kind", _KINDS[::2], ids=str)
def test_damaged_file_never_matches_its_manifest(
    kind: _Kind, damage: object, tmp_path: Path
) -> None:
    data, manifest = _stored_file(tmp_path, kind)
    damaged = _flips(data) if damage is _flips else _cuts(data)
    for outcome in _outcomes(damaged, kind, manifest):
        assert isinstance(outcome, CorruptCheckpoint)
        _assert_told(outcome, kind)


@pytest.mark.parametrize("kind", _KINDS[::2], ids=str)
def test_damaged_manifest_never_gives_other_values(kind: _Kind, tmp_path: Path) -> None:
    data, _ = _stored_file(tmp_path, kind)
    whole = _read(data, kind, None)
    beside = tmp_path / f"{kind.name}.manifest.json"
    text = beside.read_bytes()
    beside.unlink()
    errors = 0
    for position in range(0, len(text), 3):
        changed = bytearray(text)
        changed[position] ^= 1 << position % 7
        beside.write_bytes(changed)
        outcome = _loaded_or_error(tmp_path / kind.name, kind)
        if isinstance(outcome, CkptmgrError):
            assert isinstance(outcome, _ALLOWED)
            assert kind.name in str(outcome)
            assert not shows(everything_said(outcome), KEY)
            errors += 1
        else:
            assert outcome == whole
    assert errors > 0


def _loaded_or_error(path: Path, kind: _Kind) -> dict[str, StoredItem] | CkptmgrError:
    try:
        return _load(path, kind)
    except CkptmgrError as error:
        return error


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind.mode], ids=str)
def test_wrong_key_is_a_key_problem_that_shows_neither_key(
    kind: _Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _stored_file(tmp_path, kind)
    with caplog.at_level(logging.DEBUG), pytest.raises(KeyProblem) as caught:
        load_checkpoint(tmp_path / kind.name, dec_key=_OTHER_KEY, dec_mode=kind.mode or "")
    said = everything_said(caught.value) + caplog.text
    assert not shows(said, KEY)
    assert not shows(said, _OTHER_KEY)


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind.mode], ids=str)
def test_wrong_key_without_a_manifest_is_a_key_problem(kind: _Kind, tmp_path: Path) -> None:
    data, _ = _stored_file(tmp_path, kind)
    with pytest.raises(KeyProblem) as caught:
        open_source(
            BytesSource(data),
            path="/runs/x.ckpt",
            options=api.reading(keys=api.Key(_OTHER_KEY), mode=kind.mode),
        )
    assert not shows(everything_said(caught.value), _OTHER_KEY)
