# SPDX-License-Identifier: Apache-2.0
"""`save_state` and `save_checkpoint` to the address of an object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import Checkpoint, UnsafeWrite, save_checkpoint, save_state
from ckptmgr.objects import staging
from tests.support import api
from tests.support.counted_objects import CountedObjects, Died
from tests.support.saved import KEY

pytest.importorskip("obstore")


from tests.cli.running import run
from tests.remote.buckets import new_url, whole_names

_TENSORS = {"w": np.arange(50.0)}
_SAVES: list[Callable[..., Checkpoint]] = [save_state, save_checkpoint]

pytestmark = pytest.mark.usefixtures("machine")


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("save", _SAVES)
def test_file_is_whole_at_the_address_when_it_is_saved_and_nothing_stays_here(
    tmp_path: Path, machine: Path, save: Callable[..., Checkpoint]
) -> None:
    url = new_url()
    saved = save(_TENSORS, f"{url}/net.ckpt")
    assert str(saved.path) == f"{url}/net.ckpt"
    assert whole_names(api.open_objects(url), tmp_path) == {"net.ckpt"}
    assert list(machine.iterdir()) == []
    back = run("copy", f"{url}/net.ckpt", tmp_path / "back")
    assert back.exit_code == 0, back.stderr


@pytest.mark.parametrize("save", _SAVES)
def test_checkpoint_that_has_the_name_there_is_not_replaced(
    tmp_path: Path, machine: Path, save: Callable[..., Checkpoint]
) -> None:
    url = new_url()
    first = save(_TENSORS, f"{url}/net.ckpt")
    with pytest.raises(UnsafeWrite, match="another checkpoint has this name there"):
        save({"w": np.ones(3)}, f"{url}/net.ckpt")
    assert whole_names(api.open_objects(url), tmp_path) == {"net.ckpt"}
    assert [one.size_bytes for one in api.open_objects(url).list("data/")] == [first.size_bytes]
    assert _files(machine) == []


@pytest.mark.parametrize("save", _SAVES)
@pytest.mark.parametrize("option", [{"manifest": False}, {"file_mode": 0o640}])
def test_option_without_effect_is_refused_by_name(
    save: Callable[..., Checkpoint], option: dict[str, int]
) -> None:
    url = new_url()
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}.* has no effect in an object store"):
        save(_TENSORS, f"{url}/net.ckpt", **option)
    assert api.open_objects(url).list("data/") == []


@pytest.mark.parametrize("save", _SAVES)
@pytest.mark.parametrize("address", ["s3://bucket", Path("s3://bucket"), "s3:/bucket/net.ckpt"])
def test_address_that_names_no_object_is_refused(
    save: Callable[..., Checkpoint], address: str | Path
) -> None:
    with pytest.raises(ValueError, match="s3://bucket/run"):
        save(_TENSORS, address)


def test_encrypted_file_stays_encrypted_there() -> None:
    url = new_url()
    save_state({"w": np.arange(50.0)}, f"{url}/net.ckpe", format="safetensors", enc_key=KEY.raw)
    (stored,) = api.open_objects(url).list("data/")
    assert np.arange(50.0).tobytes()[80:160] not in api.open_objects(url).get(stored.key)


def test_save_that_dies_at_any_request_shows_a_whole_file_or_none(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = CountedObjects(api.open_objects(new_url()))
    monkeypatch.setattr(staging, "open_objects", lambda url: calm)
    save_state(_TENSORS, f"{calm.url}/net.ckpt")
    assert len(calm.requests) == 6
    for last in range(1, 7):
        bucket = api.open_objects(new_url())
        dying = CountedObjects(bucket, last=last, is_done=True)
        monkeypatch.setattr(staging, "open_objects", lambda url, store=dying: store)
        with pytest.raises(Died):
            save_state(_TENSORS, f"{bucket.url}/net.ckpt")
        assert whole_names(bucket, tmp_path) == ({"net.ckpt"} if last >= 4 else set())
        assert _files(machine) == []
