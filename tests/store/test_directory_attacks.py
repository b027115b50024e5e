# SPDX-License-Identifier: Apache-2.0
"""Attacks of a user who can write a directory, in every format and suite: the verdict of `verify`, and the loads.

Each kind of directory vouches for itself in another way: digests alone tell accidents, a key and a signature tell people.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, CkptmgrError, Trust, load_checkpoint
from ckptmgr.core.names import extension_of
from tests.support import api
from tests.support.saved import overwrite, verify_all

KEY, SIGNER = bytes(range(16)), api.SigningKey(bytes(range(32)))
STEPS = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the checkpoints of a directory are made."""

    format: str = "ckpt"
    mode: str | None = None
    has_crc: bool = False
    is_compressed: bool = False
    is_signed: bool = False

    @property
    def extension(self) -> str:
        return extension_of(
            self.format, is_encrypted=self.mode is not None, is_compressed=self.is_compressed
        )

    @property
    def proves_the_writer(self) -> bool:
        return self.mode is not None or self.is_signed

    def config(self) -> CheckpointConfig:
        options: dict[str, Any] = {"format": self.format, "crc_check": self.has_crc}
        if self.is_compressed:
            options["compression"] = "zstd"
        if self.mode is not None:
            options |= {"enc_key": KEY, "enc_mode": self.mode}
        return CheckpointConfig(**options, signing_key=SIGNER if self.is_signed else None)

    def reading(self) -> api.ReadOptions:
        return api.reading(
            keys=None if self.mode is None else api.Key(KEY),
            trusted_keys=(SIGNER.public_key,) if self.is_signed else (),
        )


KINDS = {
    "plain ckpt with CRC32": Kind(has_crc=True),
    "plain safetensors": Kind(format="safetensors"),
    "compressed": Kind(format="safetensors", is_compressed=True),
    "signed ckpt": Kind(is_signed=True),
    "signed safetensors": Kind(format="safetensors", is_signed=True),
    **{f"sealed {mode}": Kind(mode=mode) for mode in ("AES-GCM", "AES-CBC", "SM4-CBC")},
    **{
        f"container {mode}": Kind(format="safetensors", mode=mode)
        for mode in ("AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM")
    },
    **{
        f"container {mode}, compressed": Kind(format="safetensors", mode=mode, is_compressed=True)
        for mode in ("AES-GCM", "SM4-CBC")
    },
}
PROVING = [name for name, kind in KINDS.items() if kind.proves_the_writer]


def train(directory: Path, kind: Kind, *, scale: float = 1.0) -> None:
    """Save the steps; the value is the number of the step, times the scale."""
    with CheckpointManager(directory, kind.config(), prefix="net") as manager:
        for step in STEPS:
            manager.save(step, {"w": np.full(300, step * scale)})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return directories of each kind, made once: `run`, and `past`, where the same names held other values."""
    found: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp("made")
            train(found[name] / "run", KINDS[name])
            train(found[name] / "past", KINDS[name], scale=100.0)
        return found[name]

    return make


def path_of(directory: Path, kind: Kind, step: int) -> Path:
    return directory / f"net-{step}.{kind.extension}"


def manifest_of(path: Path) -> Path:
    return api.manifest_of(path)


def copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    shutil.copy(source, target)


def flip_data(past: Path, run: Path, kind: Kind) -> None:
    path = path_of(run, kind, 2)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    overwrite(path, bytes(data))


def cut_data(past: Path, run: Path, kind: Kind) -> None:
    path = path_of(run, kind, 2)
    overwrite(path, path.read_bytes()[:-1])


def extend_data(past: Path, run: Path, kind: Kind) -> None:
    path = path_of(run, kind, 2)
    overwrite(path, path.read_bytes() + b"\0")


def append_another_file(past: Path, run: Path, kind: Kind) -> None:
    path = path_of(run, kind, 2)
    overwrite(path, path.read_bytes() + path_of(past, kind, 2).read_bytes())


def empty_data(past: Path, run: Path, kind: Kind) -> None:
    overwrite(path_of(run, kind, 2), b"")


def swap_data(past: Path, run: Path, kind: Kind) -> None:
    copy(path_of(run, kind, 1), path_of(run, kind, 2))


def swap_manifest(past: Path, run: Path, kind: Kind) -> None:
    copy(manifest_of(path_of(run, kind, 1)), manifest_of(path_of(run, kind, 2)))


def rename_pair(past: Path, run: Path, kind: Kind) -> None:
    """Pass step 1 off as step 2, in its manifest, too."""
    one, two = path_of(run, kind, 1), path_of(run, kind, 2)
    copy(one, two)
    text = manifest_of(one).read_bytes().replace(one.name.encode(), two.name.encode())
    overwrite(manifest_of(two), text)


def put_past_data_back(past: Path, run: Path, kind: Kind) -> None:
    copy(path_of(past, kind, 2), path_of(run, kind, 2))


def put_past_pair_back(past: Path, run: Path, kind: Kind) -> None:
    put_past_data_back(past, run, kind)
    copy(manifest_of(path_of(past, kind, 2)), manifest_of(path_of(run, kind, 2)))


def cut_manifest(past: Path, run: Path, kind: Kind) -> None:
    path = manifest_of(path_of(run, kind, 2))
    overwrite(path, path.read_bytes()[:-3])


def edit_manifest(past: Path, run: Path, kind: Kind, change: Callable[[Any], object]) -> None:
    path = manifest_of(path_of(run, kind, 2))
    document = json.loads(path.read_bytes())
    change(document)
    overwrite(path, json.dumps(document).encode())


def restate_step(past: Path, run: Path, kind: Kind) -> None:
    edit_manifest(past, run, kind, lambda document: document.update(step=9))


def restate_sequence(past: Path, run: Path, kind: Kind) -> None:
    edit_manifest(past, run, kind, lambda document: document.update(sequence=99))


def strip_proofs(past: Path, run: Path, kind: Kind) -> None:
    def strip(document: dict[str, Any]) -> None:
        document.pop("auth", None)
        document.pop("signatures", None)

    edit_manifest(past, run, kind, strip)


def plain_in_its_place(past: Path, run: Path, kind: Kind) -> None:
    """Put a plain file there, with a manifest and a CRC32 that are right but prove nothing."""
    plain = Kind(has_crc=True)
    other = run.parent / "plain"
    train(other, plain, scale=1000.0)
    one, two = path_of(other, plain, 2), path_of(run, kind, 2)
    copy(one, two)
    text = manifest_of(one).read_bytes().replace(one.name.encode(), two.name.encode())
    overwrite(manifest_of(two), text)


def link_data(past: Path, run: Path, kind: Kind) -> None:
    path = path_of(run, kind, 2)
    path.unlink()
    path.symlink_to(path_of(past, kind, 2))


def pipe_for_data(past: Path, run: Path, kind: Kind) -> None:
    path = path_of(run, kind, 2)
    path.unlink()
    os.mkfifo(path)


def link_manifest(past: Path, run: Path, kind: Kind) -> None:
    path = manifest_of(path_of(run, kind, 2))
    path.unlink()
    path.symlink_to(manifest_of(path_of(run, kind, 1)))


def pipe_for_manifest(past: Path, run: Path, kind: Kind) -> None:
    path = manifest_of(path_of(run, kind, 2))
    path.unlink()
    os.mkfifo(path)


def device_for_manifest(past: Path, run: Path, kind: Kind) -> None:
    path = manifest_of(path_of(run, kind, 2))
    path.unlink()
    path.symlink_to("/dev/zero")


def name_in_another_unicode_form(past: Path, run: Path, kind: Kind) -> None:
    edit_manifest(
        past, run, kind, lambda document: document["files"][0].update(name="ne\u0301t-2.ckpt")
    )


DAMAGED, UNPROVEN = api.Status.DAMAGED, api.Status.UNPROVEN
ACCIDENTS: dict[str, Callable[[Path, Path, Kind], None]] = {
    one.__name__: one
    for one in (
        flip_data,
        cut_data,
        extend_data,
        append_another_file,
        empty_data,
        swap_data,
        swap_manifest,
        put_past_data_back,
        put_past_pair_back,
        cut_manifest,
    )
}
FORGERIES: dict[str, tuple[Callable[[Path, Path, Kind], None], api.Status]] = {
    "rename_pair": (rename_pair, DAMAGED),
    "restate_step": (restate_step, DAMAGED),
    "restate_sequence": (restate_sequence, DAMAGED),
    "strip_proofs": (strip_proofs, UNPROVEN),
    "plain_in_its_place": (plain_in_its_place, UNPROVEN),
}


NO_FILES = {
    one.__name__: one
    for one in (
        link_data,
        pipe_for_data,
        link_manifest,
        pipe_for_manifest,
        device_for_manifest,
        name_in_another_unicode_form,
    )
}


def attacked(
    made: Path, tmp_path: Path, kind: Kind, attack: Callable[[Path, Path, Kind], None]
) -> Path:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    attack(made / "past", run, kind)
    return run


def statuses(run: Path, kind: Kind) -> dict[str, api.Status]:
    options = kind.reading()
    store = api.place(run, trust=options.trust)
    answers = verify_all(store, options=options)
    return {answer.checkpoint.name: answer.status for answer in answers}


@pytest.mark.parametrize("attack", ACCIDENTS)
@pytest.mark.parametrize("name", KINDS)
def test_changed_file_is_named_and_the_others_are_whole(
    made: Callable[[str], Path], tmp_path: Path, name: str, attack: str
) -> None:
    kind = KINDS[name]
    run = attacked(made(name), tmp_path, kind, ACCIDENTS[attack])
    assert statuses(run, kind) == {
        path_of(run, kind, 1).name: api.Status.OK,
        path_of(run, kind, 2).name: DAMAGED,
        path_of(run, kind, 3).name: api.Status.OK,
    }


@pytest.mark.parametrize("attack", NO_FILES)
@pytest.mark.parametrize("name", ["plain safetensors", "signed ckpt", "container AES-GCM"])
def test_link_pipe_or_device_in_place_of_a_file_is_named_and_passed_over(
    made: Callable[[str], Path], tmp_path: Path, name: str, attack: str
) -> None:
    kind = KINDS[name]
    run = attacked(made(name), tmp_path, kind, NO_FILES[attack])
    found = statuses(run, kind)
    assert found[path_of(run, kind, 2).name] in (DAMAGED, api.Status.UNREADABLE)
    path_of(run, kind, 3).unlink()
    with CheckpointManager(run, kind.config(), prefix="net") as manager:
        assert manager.resume().step == 1


@pytest.mark.parametrize("attack", FORGERIES)
@pytest.mark.parametrize("name", PROVING)
def test_forged_file_is_named_where_somebody_vouches_for_the_writer(
    made: Callable[[str], Path], tmp_path: Path, name: str, attack: str
) -> None:
    kind, (forge, expected) = KINDS[name], FORGERIES[attack]
    run = attacked(made(name), tmp_path, kind, forge)
    found = statuses(run, kind)
    assert found[path_of(run, kind, 2).name] is expected


@pytest.mark.parametrize("attack", [*ACCIDENTS, *FORGERIES])
@pytest.mark.parametrize("name", PROVING)
def test_nothing_loads_as_step_two_but_what_was_once_saved_as_step_two(
    made: Callable[[str], Path], tmp_path: Path, name: str, attack: str
) -> None:
    kind = KINDS[name]
    forge = ACCIDENTS[attack] if attack in ACCIDENTS else FORGERIES[attack][0]
    run = attacked(made(name), tmp_path, kind, forge)
    options = kind.reading()
    path = path_of(run, kind, 2)
    with CheckpointManager(
        run, kind.config(), trust=Trust(trusted_keys=options.trust.trusted_keys), prefix="net"
    ) as manager:
        found = manager.resume()
        assert isinstance(found.state, dict)
        assert (found.step, found.state["w"][0]) in ((3, 3.0), (1, 1.0))
        try:
            loaded = manager.load(path.name)
        except CkptmgrError:
            return
    # A genuine pair from the past is authentic; only the chain shows that it is not the newest of its name.
    assert attack == "put_past_pair_back"
    assert isinstance(loaded, dict)
    assert loaded["w"][0] == 200.0


@pytest.mark.parametrize("name", PROVING)
def test_file_under_the_name_of_another_format_is_refused_or_still_what_it_is(
    made: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    kind = KINDS[name]
    other = "safetensors" if kind.format == "ckpt" else "ckpt"
    target = tmp_path / f"net-1.{other}"
    copy(path_of(made(name) / "run", kind, 1), target)
    try:
        loaded = load_checkpoint(
            target,
            dec_key=None if kind.mode is None else KEY,
            dec_mode=kind.mode or "AES-GCM",
            format=other,
            trusted_keys=kind.reading().trust.trusted_keys,
        )
    except CkptmgrError:
        return
    assert name.startswith("container")  # which states its content, authenticated
    assert loaded["w"][0] == 1.0
