# SPDX-License-Identifier: Apache-2.0
"""Loads by ranges from real servers: `make objects`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckptmgr
from ckptmgr import load_checkpoint, open_checkpoint, save_checkpoint
from tests.cli.running import run
from tests.support import api
from tests.support.counted_objects import CountedObjects
from tests.support.stores_of_objects import open_as, upload

pytestmark = pytest.mark.objects

MIB = 1 << 20
KEY = bytes(range(32))
STATE = {
    f"w{number}": np.random.default_rng(number).integers(0, 256, 4 * MIB, np.uint8)
    for number in range(6)
}
KINDS: dict[str, dict[str, object]] = {
    "ckpt": {},
    "container": {"format": "safetensors", "enc_key": KEY},
    "compressed": {"format": "safetensors", "compression": "zstd"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_whole_load_and_one_tensor_come_from_the_server(
    new_bucket: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    options = KINDS[kind]
    key = KEY if "enc_key" in options else None
    name = save_checkpoint(STATE, tmp_path / "x", **options).name  # type: ignore[arg-type]
    url = upload(tmp_path, name, new_bucket())
    found = load_checkpoint(url, dec_key=key)
    assert all(np.array_equal(found[one], STATE[one]) for one in STATE)
    stores: list[CountedObjects] = []

    def count(objects: api.Objects) -> api.Objects:
        stores.append(CountedObjects(objects))
        return stores[-1]

    open_as(monkeypatch, count)
    with open_checkpoint(url, dec_key=key) as reader:
        assert np.array_equal(reader.read("w1", rows=slice(5, 9)), STATE["w1"][5:9])
    assert stores[0].fetched_bytes <= 16 * MIB + 3 * 4 * MIB + 256 * 1024 or kind == "compressed"
    assert run("inspect", url, *([] if key is None else ["--key", "env:K"]), env={"K": KEY.hex()}).exit_code == 0  # fmt: skip


@pytest.mark.parametrize("change", ["replaced", "shorter", "removed"])
def test_object_that_changes_during_a_load_is_an_error(
    new_bucket: Callable[..., str], tmp_path: Path, change: str
) -> None:
    base = new_bucket()
    objects = api.open_objects(base)
    data = save_checkpoint(STATE, tmp_path / "x", format="safetensors").path.read_bytes()
    objects.put("x.safetensors", [data], len(data))
    with open_checkpoint(f"{base}/x.safetensors") as reader:
        assert np.array_equal(reader.read("w0", rows=slice(0, 9)), STATE["w0"][:9])
        if change == "removed":
            objects.delete(["x.safetensors"])
        else:
            other = bytes(len(data) if change == "replaced" else 100)
            objects.put("x.safetensors", [other], len(other))
        wanted = "removed" if change == "removed" else "replaced"
        with pytest.raises(ckptmgr.CkptmgrError, match=f"was {wanted} while it was being read"):
            reader.read("w5")


def test_empty_object_is_truncated(new_bucket: Callable[..., str]) -> None:
    base = new_bucket()
    api.open_objects(base).create("x.ckpt", b"")
    with pytest.raises(ckptmgr.TruncatedCheckpoint, match=f"{base}/x.ckpt"):
        load_checkpoint(f"{base}/x.ckpt")
