# SPDX-License-Identifier: Apache-2.0
"""`save_items`: its files, and that a save that fails for any reason changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CkptmgrError, KeyProblem, StoreFull, UnsupportedCheckpoint
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.values import read_values
from ckptmgr.files.save.job import SaveOrder, draft_entry
from ckptmgr.files.save.saver import save_items
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.tensor import Item, Tensor, TensorSpec
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk, every_failure
from tests.support.strategies import named_tensor
from tests.support.surface import KEY, shows

_RUNS = Path("/runs")
_SEALED = api.SaveOptions(key=api.Key(KEY), has_crc=True)


def _save(
    store: api.Place,
    items: Sequence[Item],
    options: api.SaveOptions | None = None,
    *,
    metadata: dict[str, str] | None = None,
) -> api.Manifest:
    options = options or api.SaveOptions()
    return save_items(
        store,
        SaveOrder(
            name="x.ckpt",
            items=items,
            options=options,
            series="x",
            draft=api.Manifest(
                file=draft_entry("x.ckpt", options),
                series="x",
                run_id="",
                step=1,
                sequence=0,
                saved_at=datetime.now(UTC),
            ),
            metadata=metadata,
        ),
    )


def _weights(fs: api.FileSystem, directory: Path, options: api.ReadOptions) -> object:
    store = api.place(directory, fs=fs, trust=replace(options.trust, allow_unencrypted=True))
    manifest = store.read_manifest("x.ckpt")
    raw = fs.open(directory / "x.ckpt")
    try:
        values = read_values(
            open_source(raw, path="x.ckpt", options=options, manifest=manifest), check_crc=True
        )
    finally:
        raw.close()
    weights = values["w"]
    assert isinstance(weights, np.ndarray)
    return weights.tolist()


def _tensor(value: float, *, count: int = 2) -> Tensor:
    content = np.full(count, value, np.float32).tobytes()
    return named_tensor("w", shape=(count,), content=content)


def _giving(content: Callable[[], memoryview], *, size_bytes: int) -> Tensor:
    spec = TensorSpec(name="w", dtype=BY_NAME["uint8"], shape=(size_bytes,))
    return Tensor(spec=spec, content=content)


def test_metadata_is_kept_in_the_file(tmp_path: Path) -> None:
    store = api.place(tmp_path)
    _save(store, [_tensor(1)], metadata={"tree": "{}"})
    opened = open_source(
        store.fs.open(tmp_path / "x.ckpt"), path="x.ckpt", options=api.reading(), manifest=None
    )
    assert (opened.format, opened.metadata) == ("ckpt", {"tree": "{}"})


def test_figures_of_the_stages_are_in_the_manifest(tmp_path: Path) -> None:
    manifest = _save(api.place(tmp_path), [_tensor(1)])
    assert manifest.stats["until_synced_s"] >= manifest.stats["write_s"] >= 0


def test_manifest_names_cipher_and_key_without_the_key(tmp_path: Path) -> None:
    manifest = _save(
        api.place(tmp_path, keys=api.Key(KEY), allow_unencrypted=True), [_tensor(1)], _SEALED
    )
    assert (manifest.file.cipher, manifest.file.key_id) == ("AES-GCM", api.Key(KEY).key_id)
    assert not shows((tmp_path / "x.ckpt.manifest.json").read_text(), KEY)


def test_permissions_are_those_asked_for(tmp_path: Path) -> None:
    _save(api.place(tmp_path), [_tensor(1)], api.SaveOptions(file_mode=0o640))
    for name in ("x.ckpt", "x.ckpt.manifest.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "value", [api.SaveOptions(key=api.Key(KEY)), api.reading(keys=api.Key(KEY))], ids=type
)
def test_options_never_show_the_key(value: object) -> None:
    assert not shows(repr(value) + str(value), KEY)


@pytest.mark.parametrize("size_bytes", [100, 33 << 20], ids=["one range", "many ranges"])
def test_tensor_that_gives_other_bytes_than_it_promised_changes_nothing(
    tmp_path: Path, size_bytes: int
) -> None:
    store = api.place(tmp_path)
    _save(store, [_tensor(1)])
    before = sorted(tmp_path.iterdir())
    liar = _giving(lambda: memoryview(bytes(size_bytes - 1)), size_bytes=size_bytes)
    with pytest.raises(UnsupportedCheckpoint, match=r"cannot be saved: .*\(tensor 'w'\)"):
        _save(store, [liar])
    assert sorted(tmp_path.iterdir()) == before
    assert _weights(store.fs, tmp_path, api.reading()) == [1, 1]


@pytest.mark.parametrize("size_bytes", [100, 33 << 20], ids=["one range", "many ranges"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
def test_exception_while_a_tensor_is_fetched_passes_and_changes_nothing(
    tmp_path: Path, size_bytes: int, error: BaseException
) -> None:
    def fetch() -> memoryview:
        raise error

    store = api.place(tmp_path)
    _save(store, [_tensor(1)])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(type(error)):
        _save(store, [_giving(fetch, size_bytes=size_bytes)])
    assert sorted(tmp_path.iterdir()) == before


def test_key_that_does_not_fit_the_mode_is_a_key_problem(tmp_path: Path) -> None:
    options = api.SaveOptions(key=api.Key(bytes(24)), mode="SM4-CBC")
    with pytest.raises(KeyProblem, match="SM4-CBC"):
        _save(api.place(tmp_path), [_tensor(1)], options)
    assert list(tmp_path.iterdir()) == []


def test_unstorable_item_is_refused_before_the_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="'w'"):
        _save(
            api.place(tmp_path / "new"), [named_tensor("w", dtype="complex64", content=bytes(16))]
        )
    assert not (tmp_path / "new").exists()


def test_lack_of_space_is_told_with_figures_before_anything_is_written(tmp_path: Path) -> None:
    disk = FailingDisk(api.OsFileSystem(), space_bytes=1 << 20)
    with pytest.raises(StoreFull, match=r"\d+ bytes needed, 1048576 free, \d+ missing"):
        _save(api.place(tmp_path, fs=disk), [_tensor(1)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [api.SaveOptions(), _SEALED], ids=["plain", "sealed"])
@pytest.mark.parametrize("is_lasting", [False, True])
def test_save_over_an_old_file_that_fails_at_any_call_leaves_the_old_or_the_new(
    options: api.SaveOptions, is_lasting: bool
) -> None:
    disk = ModelDisk()
    disk.make_directory(_RUNS, mode=0o700)
    _save(
        api.place(_RUNS, fs=disk, keys=options.key, allow_unencrypted=True),
        [_tensor(1)],
        options,
    )

    def overwrite(failing: FailingDisk) -> None:
        _save(
            api.place(_RUNS, fs=failing, keys=options.key, allow_unencrypted=True),
            [_tensor(2)],
            options,
        )

    reading = api.reading(keys=options.key)
    failures = list(every_failure(disk, overwrite, is_lasting=is_lasting))
    assert len(failures) > 20
    for failure in failures:
        assert _weights(failure.disk, _RUNS, reading) in ([1, 1], [2, 2]), failure
        assert failure.raised is None or isinstance(failure.raised, (OSError, CkptmgrError))
