# SPDX-License-Identifier: Apache-2.0
"""Loads from the address of an object: the values and errors of a local load, by ranges of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptmgr
from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    KeyProblem,
    Ranks,
    UnprovenCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
    load_file,
    load_state,
    open_checkpoint,
    safe_open,
    save_checkpoint,
    save_state,
)
from ckptmgr.parallel import ParallelLayout
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api
from tests.support.counted_objects import CountedObjects
from tests.support.saved import flip, overwrite
from tests.support.stores_of_objects import open_as, upload

pytest.importorskip("obstore")

from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.requests import FetchedRange
from tests.remote.buckets import new_url

MIB = 1 << 20
KEY = bytes(range(32))
HEAD = 128 << 10
RANGE = 16 * MIB
BLOCK = (4 << 20) + 4096
DESCRIPTION = 32 << 10
MANIFEST = 4096
SMALL: dict[str, np.ndarray] = {
    "w": np.arange(12, dtype=np.float32),
    "b": np.arange(3, dtype=np.int64),
}

KINDS: dict[str, dict[str, Any]] = {
    "ckpt": {},
    "safetensors": {"format": "safetensors"},
    "compressed": {"format": "safetensors", "compression": "zstd"},
    "container": {"format": "safetensors", "enc_key": KEY},
    "compressed container": {"format": "safetensors", "compression": "zstd", "enc_key": KEY},
    "encrypted ckpt": {"enc_key": KEY},
    "encrypted ckpt, CBC": {"enc_key": KEY, "enc_mode": "AES-CBC"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def key_of(kind: str) -> bytes | None:
    return KINDS[kind].get("enc_key")


def mode_of(kind: str) -> str:
    return str(KINDS[kind].get("enc_mode", "AES-GCM"))


def saved(directory: Path, kind: str, state: dict[str, Any] | None = None) -> str:
    """Save a checkpoint; return its name."""
    return save_checkpoint(state or SMALL, directory / "net-1", **KINDS[kind]).name


def loaded(path: object, kind: str) -> dict[str, Any]:
    return load_checkpoint(path, dec_key=key_of(kind), dec_mode=mode_of(kind))  # type: ignore[arg-type]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[CountedObjects]:
    """Count the requests of all loads from now on."""
    stores: list[CountedObjects] = []

    def wrap(objects: api.Objects) -> api.Objects:
        stores.append(CountedObjects(objects))
        return stores[-1]

    open_as(monkeypatch, wrap)
    return stores


@kinds
def test_values_are_those_of_a_local_load(tmp_path: Path, kind: str) -> None:
    url = upload(tmp_path, saved(tmp_path, kind), new_url())
    found = loaded(url, kind)
    assert set(found) == set(SMALL)
    assert all(np.array_equal(found[name], SMALL[name]) for name in SMALL)


def test_values_come_from_a_folder_and_by_a_path_object(tmp_path: Path) -> None:
    url = upload(tmp_path, saved(tmp_path, "ckpt"), f"file://{tmp_path}/bucket")
    assert np.array_equal(load_checkpoint(url)["w"], SMALL["w"])
    assert np.array_equal(load_checkpoint(UrlPath(url))["w"], SMALL["w"])


@pytest.mark.parametrize("key", [None, KEY])
def test_state_is_put_back_whole_and_in_part(tmp_path: Path, key: bytes | None) -> None:
    state = {"net": {"w": np.arange(5.0)}, "step": 7, "note": "a"}
    save_state(state, tmp_path / "s.safetensors", enc_key=key)
    url = upload(tmp_path, "s.safetensors", new_url())
    found = load_state(url, dec_key=key)
    assert isinstance(found, dict)
    assert (found["step"], found["note"]) == (7, "a")
    net = {"w": np.zeros(5)}
    load_state(url, {"net": net}, only="net", dec_key=key)
    assert np.array_equal(net["w"], np.arange(5.0))


def test_file_of_another_tool_is_loaded_by_its_own_key(tmp_path: Path) -> None:
    path = save_checkpoint(SMALL, tmp_path / "x", format="safetensors", manifest=False).path
    url = new_url()
    api.open_objects(url).create("x.safetensors", path.read_bytes())
    assert np.array_equal(load_checkpoint(f"{url}/x.safetensors")["w"], SMALL["w"])
    assert np.array_equal(load_file(f"{url}/x.safetensors", framework="np")["b"], SMALL["b"])


def test_copied_directory_is_loaded_with_its_digests(tmp_path: Path) -> None:
    name = saved(tmp_path, "safetensors")
    url = new_url()
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 1
    api.open_objects(url).create(name, bytes(data))
    assert set(load_checkpoint(f"{url}/{name}")) == set(SMALL)
    manifest = f"{name}.manifest.json"
    api.open_objects(url).create(manifest, (tmp_path / manifest).read_bytes())
    with pytest.raises(ckptmgr.ChecksumMismatch, match=f"{url}/{name}"):
        load_checkpoint(f"{url}/{name}")


@pytest.mark.parametrize("kind", ["safetensors", "container", "compressed"])
def test_safe_open_gives_tensors_and_slices(tmp_path: Path, kind: str) -> None:
    url = upload(tmp_path, saved(tmp_path, kind), new_url())
    with safe_open(url, "np", key=key_of(kind)) as file:
        assert file.keys() == ["b", "w"]
        assert np.array_equal(file.get_tensor("w"), SMALL["w"])
        assert np.array_equal(file.get_slice("w")[2:4], SMALL["w"][2:4])


def test_address_cannot_be_mapped(tmp_path: Path) -> None:
    url = upload(tmp_path, saved(tmp_path, "safetensors"), new_url())
    with pytest.raises(UnsupportedCheckpoint, match=f"{url}: only files"):
        open_checkpoint(url, mmap=True)


@cache
def incompressible(tensors: int = 10) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {f"w{n}": random.integers(0, 256, 4 * MIB, np.uint8) for n in range(tensors)}


@pytest.mark.parametrize(
    ("kind", "most_bytes"),
    [
        # With a manifest the digest ranges, of 16 MiB, of the header and of the tensor.
        ("safetensors", HEAD + RANGE),
        ("ckpt", HEAD + RANGE + 10 * DESCRIPTION),
        # The range that binds the header to the manifest, the cipher blocks of names and tensor.
        ("container", HEAD + RANGE + 3 * BLOCK),
        # The ranges of the header and the table, which is at the end, and the frames.
        ("compressed", HEAD + RANGE + 8 * MIB + 2 * BLOCK),
    ],
)
def test_one_tensor_costs_its_own_bytes_and_the_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, most_bytes: int
) -> None:
    state = incompressible()
    url = upload(tmp_path, saved(tmp_path, kind, state), new_url())
    stores = counted(monkeypatch)
    with open_checkpoint(url, dec_key=key_of(kind)) as reader:
        assert np.array_equal(reader.read("w1"), state["w1"])
    (store,) = stores
    assert store.fetched_bytes <= most_bytes + MANIFEST
    assert len(store.requests) <= 22
    assert most_bytes < 40 * MIB


@pytest.mark.parametrize(
    ("kind", "most_bytes"),
    [
        ("safetensors", HEAD + 4 * MIB),
        ("container", HEAD + 3 * BLOCK),
        ("compressed", HEAD + 2 * BLOCK + 65536),
    ],
)
def test_tensor_of_a_file_without_manifest_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, most_bytes: int
) -> None:
    state = incompressible(5)
    name = saved(tmp_path, kind, state)
    url = new_url()
    api.open_objects(url).create(name, (tmp_path / name).read_bytes())
    stores = counted(monkeypatch)
    with safe_open(f"{url}/{name}", "np", key=key_of(kind)) as file:
        assert np.array_equal(file.get_tensor("w3"), state["w3"])
    assert stores[0].fetched_bytes <= most_bytes
    assert len(stores[0].requests) <= 8


def test_rows_of_an_encrypted_ckpt_cost_their_cipher_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": np.zeros(9, np.uint8), "w": np.zeros((40, MIB), np.uint8)}
    url = upload(tmp_path, saved(tmp_path, "encrypted ckpt", state), new_url())
    stores = counted(monkeypatch)
    with open_checkpoint(url, dec_key=KEY) as reader:
        assert np.array_equal(reader.read("w", rows=slice(20, 22)), state["w"][20:22])
    # The range of the seal, the block of the descriptions, those of the rows, and a head of each block.
    assert stores[0].fetched_bytes <= HEAD + 9 * MIB + 3 * BLOCK + 11 * DESCRIPTION + MANIFEST


def test_part_of_a_state_costs_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.ones(MIB, np.float32)
    state = {"net": {"w": weights}, "optimizer": incompressible()}
    save_state(state, tmp_path / "s.safetensors", enc_key=KEY)
    url = upload(tmp_path, "s.safetensors", new_url())
    stores = counted(monkeypatch)
    net = {"w": np.zeros(MIB, np.float32)}
    load_state(url, {"net": net}, only="net", dec_key=KEY)
    assert np.array_equal(net["w"], weights)
    assert stores[0].fetched_bytes <= HEAD + RANGE + 3 * BLOCK + MANIFEST


@pytest.mark.parametrize(
    ("tensor_bytes", "most_requests"),
    [
        (100, 12),  # close together: in longer and longer reads
        (100_000, 120),  # apart: several at a time, where the next ones are probable
    ],
)
def test_descriptions_of_many_tensors_take_few_round_trips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_bytes: int, most_requests: int
) -> None:
    state = {f"layers.{n}.w": np.zeros(tensor_bytes, np.uint8) for n in range(100)}
    name = save_checkpoint(state, tmp_path / "x", manifest=False).name
    url = new_url()
    api.open_objects(url).create(name, (tmp_path / name).read_bytes())
    stores = counted(monkeypatch)
    with open_checkpoint(f"{url}/{name}") as reader:
        assert len(reader.names()) == len(state)
    assert len(stores[0].ranges) <= most_requests
    assert stores[0].fetched_bytes <= HEAD + 100 * 2 * DESCRIPTION


class Crowd:
    """Objects whose long reads wait until several of them are in flight."""

    def __init__(self, objects: api.Objects, wanted: int) -> None:
        self._objects = objects
        self._wanted = wanted
        self.is_waiting = False
        self._lock = threading.Lock()
        self._all_here = threading.Event()
        self.most = self._present = 0

    def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
        with self._lock:
            self._present += 1
            self.most = max(self.most, self._present)
            if self._present >= self._wanted:
                self._all_here.set()
        if length >= MIB and self.is_waiting:
            self._all_here.wait(5)
        found = self._objects.fetch(key, offset, length)
        with self._lock:
            self._present -= 1
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


@pytest.mark.parametrize("kind", ["safetensors", "container", "compressed", "encrypted ckpt"])
def test_large_load_has_many_requests_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    state = incompressible()
    url = upload(tmp_path, saved(tmp_path, kind, state), new_url())
    crowds: list[Crowd] = []

    def wrap(objects: api.Objects) -> api.Objects:
        crowds.append(Crowd(objects, 6))
        found: Any = crowds[-1]  # the other methods are those of the store
        return found  # type: ignore[no-any-return]

    open_as(monkeypatch, wrap)
    with open_checkpoint(url, dec_key=key_of(kind)) as reader:
        crowds[0].is_waiting = True
        assert np.array_equal(reader.read_tensors()["w6"], state["w6"])
    assert crowds[0].most >= 6


PLACES: dict[str, tuple[str, Callable[[int], int]]] = {
    "manifest": (".manifest.json", lambda size: 40),
    "first byte": ("", lambda size: 0),
    "header": ("", lambda size: 20),
    "middle": ("", lambda size: size // 2),
    "near the end": ("", lambda size: size * 9 // 10),
    "last byte": ("", lambda size: size - 1),
}


def outcome(load: Callable[[], object]) -> tuple[type | None, str]:
    """Return the class of the error of a load, and its text; None without one."""
    try:
        load()
    except (CkptmgrError, OSError, ValueError) as error:
        return type(error), str(error)
    return None, ""


def twins(directory: Path, kind: str) -> tuple[Path, Path, str]:
    """Return a local file, the object of the same checkpoint, and its address."""
    name = saved(directory, kind)
    url = upload(directory, name, f"file://{directory}/bucket")
    (there,) = (directory / "bucket").glob(f"data/*/{name}")
    return directory / name, there, url


@kinds
@pytest.mark.parametrize("place", PLACES)
def test_damage_is_the_error_of_a_local_load_and_names_the_address(
    tmp_path: Path, kind: str, place: str
) -> None:
    here, there, url = twins(tmp_path, kind)
    suffix, place_in = PLACES[place]
    for one in (here, tmp_path / "bucket" / here.name if suffix else there):
        file = one.with_name(one.name + suffix)
        flip(file, place_in(file.stat().st_size))
    expected, _ = outcome(lambda: loaded(here, kind))
    found, text = outcome(lambda: loaded(url, kind))
    assert found is expected
    if expected is not None:
        assert url in text


@kinds
@pytest.mark.parametrize("share", ["none", "ten bytes", "half", "all but one"])
def test_truncated_object_is_the_error_of_a_local_load(
    tmp_path: Path, kind: str, share: str
) -> None:
    here, there, url = twins(tmp_path, kind)
    data = here.read_bytes()
    stop = {"none": 0, "ten bytes": 10, "half": len(data) // 2}.get(share, len(data) - 1)
    overwrite(here, data[:stop])
    overwrite(there, data[:stop])
    expected, _ = outcome(lambda: loaded(here, kind))
    found, text = outcome(lambda: loaded(url, kind))
    assert expected is not None
    assert found is expected
    assert url in text


@pytest.mark.parametrize("suffix", ["", ".manifest.json"])
def test_object_that_is_gone_is_not_found(tmp_path: Path, suffix: str) -> None:
    here, there, url = twins(tmp_path, "ckpt")
    there.unlink() if not suffix else (tmp_path / "bucket" / f"{here.name}{suffix}").unlink()
    for load in (load_checkpoint, load_state, open_checkpoint, safe_open):
        with pytest.raises(FileNotFoundError, match=url) as caught:
            load(url)
        assert isinstance(caught.value, ckptmgr.CheckpointNotFound)


@pytest.mark.parametrize("kind", ["container", "encrypted ckpt", "compressed container"])
@pytest.mark.parametrize("key", [None, bytes(32)])
def test_wrong_or_missing_key_is_a_key_problem_with_the_address(
    tmp_path: Path, kind: str, key: bytes | None
) -> None:
    url = upload(tmp_path, saved(tmp_path, kind), new_url())
    for load in (
        lambda: load_checkpoint(url, dec_key=key),
        lambda: load_state(url, dec_key=key),
        lambda: open_checkpoint(url, dec_key=key),
        lambda: safe_open(url, key=key),
    ):
        with pytest.raises(KeyProblem, match=url):
            load()


def test_signature_is_required_where_public_keys_are_given(tmp_path: Path) -> None:
    signer, other = api.SigningKey.generate(), api.SigningKey.generate()
    pem = tmp_path / "sign.pem"
    pem.write_bytes(signer.to_pem())
    pem.chmod(0o600)
    save_checkpoint(SMALL, tmp_path / "x", signing_key=f"file:{pem}")
    url = upload(tmp_path, "x.ckpt", new_url())
    assert set(load_checkpoint(url, trusted_keys=[signer.public_key])) == set(SMALL)
    with pytest.raises(KeyProblem, match=url):
        load_checkpoint(url, trusted_keys=[other.public_key])
    api.open_objects(url.rpartition("/")[0]).create("bare.ckpt", (tmp_path / "x.ckpt").read_bytes())
    with pytest.raises(UnprovenCheckpoint, match=r"bare\.ckpt"):
        load_checkpoint(url.replace("x.ckpt", "bare.ckpt"), trusted_keys=[signer.public_key])


class Changing(CountedObjects):
    """Objects that are changed after a number of fetched ranges."""

    def __init__(
        self, objects: api.Objects, change: Callable[[api.Objects], None], *, after: int
    ) -> None:
        super().__init__(objects)
        self._inner = objects
        self._change = change
        self._after = after

    def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
        if len(self.ranges) == self._after:
            self._change(self._inner)
        return super().fetch(key, offset, length)


def replaced_by(data: bytes) -> Callable[[api.Objects], None]:
    def change(objects: api.Objects) -> None:
        for one in [*objects.list(), *objects.list("data/")]:
            if not one.key.endswith(".json"):
                objects.put(one.key, [data], len(data))

    return change


def removed(objects: api.Objects) -> None:
    objects.delete([one.key for one in [*objects.list(), *objects.list("data/")]])


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("is_longer", [True, False])
def test_object_that_is_replaced_during_a_load_is_an_error_and_never_a_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_manifest: bool, is_longer: bool
) -> None:
    first = {"w": np.zeros(MIB, np.uint8)}
    second = save_checkpoint({"w": np.ones(MIB, np.uint8)}, tmp_path / "y", format="safetensors")
    data = second.path.read_bytes() if is_longer else b"short"
    path = save_checkpoint(first, tmp_path / "x", format="safetensors").path
    base = new_url()
    url = f"{base}/{path.name}"
    if has_manifest:
        upload(tmp_path, path.name, base)
    else:
        api.open_objects(base).create(path.name, path.read_bytes())
    # Ranges: the manifest if there is one, the head, and then the rest of the tensor.
    after = 2 if has_manifest else 1
    open_as(monkeypatch, lambda one: Changing(one, replaced_by(data), after=after))
    with pytest.raises(ckptmgr.ChecksumMismatch, match="was replaced while it was being read") as e:
        load_checkpoint(url)
    assert url in str(e.value)


def test_object_that_is_removed_during_a_load_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": np.zeros(MIB, np.uint8)}
    url = upload(tmp_path, saved(tmp_path, "safetensors", state), new_url())
    open_as(monkeypatch, lambda one: Changing(one, removed, after=2))
    with pytest.raises(FileNotFoundError, match="removed while it was being read") as caught:
        load_checkpoint(url)
    assert url in str(caught.value)


@pytest.mark.parametrize("kind", ["ckpt", "container", "compressed"])
def test_network_error_at_any_request_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url = upload(tmp_path, saved(tmp_path, kind, {"w": np.arange(MIB // 4)}), new_url())
    stores = counted(monkeypatch)
    loaded(url, kind)
    requests = len(stores[0].requests)
    assert requests >= 3
    for last in range(1, requests + 1):
        monkeypatch.undo()
        open_as(
            monkeypatch,
            lambda one, last=last: CountedObjects(  # type: ignore[misc]
                one, last=last, error=lambda: ConnectionError(103, "reset", url)
            ),
        )
        with pytest.raises(ConnectionError, match=url):
            loaded(url, kind)


def test_address_of_a_run_is_answered_with_the_address_of_a_checkpoint(tmp_path: Path) -> None:
    url = upload(tmp_path, saved(tmp_path, "safetensors"), f"file://{tmp_path}/bucket/run")
    for load in (load_state, open_checkpoint):
        with pytest.raises(ckptmgr.CheckpointNotFound, match=f"such as {url}"):
            load(f"file://{tmp_path}/bucket/run")
    with pytest.raises(ValueError, match="format must same") as caught:
        load_checkpoint(f"file://{tmp_path}/bucket/run")
    assert "ckptmgr ls URL" in str(caught.value.__notes__)


def test_address_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names no object; write s3://bucket/run/NAME"):
        load_state("s3://bucket")


def test_missing_object_is_named_with_the_way_out() -> None:
    url = new_url()
    with pytest.raises(ckptmgr.CheckpointNotFound, match=f"ckptmgr ls {url}"):
        load_checkpoint(f"{url}/x.ckpt")


def test_manifest_that_is_something_else_is_not_read(tmp_path: Path) -> None:
    url = upload(tmp_path, saved(tmp_path, "ckpt"), new_url())
    base, _, name = url.rpartition("/")
    objects = api.open_objects(base)
    objects.put(f"{name}.manifest.json", [bytes(65 << 20)], 65 << 20)
    with pytest.raises(ckptmgr.CorruptCheckpoint, match="a manifest at most"):
        load_checkpoint(url)


@pytest.mark.parametrize("key", [None, KEY])
def test_checkpoint_of_many_ranks_is_loaded_whole(tmp_path: Path, key: bytes | None) -> None:
    whole = np.arange(24).reshape(8, 3)
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()))}
    meeting = Meeting(2)
    config = CheckpointConfig(enc_key=key, remove_redundancy=True)

    def save(rank: int) -> None:
        seat = Seat(meeting, rank)
        with CheckpointManager(tmp_path, config, ranks=Ranks(seat, layout=layout)) as ours:
            ours.save(1, {"w": whole[4 * rank : 4 * rank + 4]})

    for one in run_ranks(meeting, save):
        assert one.raised is None, one.raised
    url = upload(tmp_path, "ckpt-1.shards", new_url())
    assert load_checkpoint(url, dec_key=key)["w"].tolist() == whole.tolist()
    with pytest.raises(UnsupportedCheckpoint, match=url):
        load_state(url, dec_key=key)
    with pytest.raises(ckptmgr.CheckpointNotFound, match="no such checkpoint"):
        load_checkpoint(url.replace("ckpt-1", "ckpt-2"))
