# SPDX-License-Identifier: Apache-2.0
"""Attacks of a writer of containers, for any content and encryption.

Each attack is tried on a file that is alone, and on one whose manifest is there, if it is a checkpoint. `verify` finds it, and
`decrypt` gives no file; without a manifest it is the seal alone that reports the damage, with its own kind of error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnsupportedCheckpoint,
    save_checkpoint,
)
from ckptmgr.maintenance import convert
from tests.support import api
from tests.support.saved import KEY, OTHER_KEY

MODES = ("AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM")
INSIDE = ("safetensors", "ckpt", "json", "compressed")
COPY, HEAD, SEGMENT = 4096, 12288, 4 << 20
READING = api.reading(keys=KEY)
Pair = tuple[Path, Path]
Make = Callable[[str, str, int], Pair]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return two containers of the same shape under one key, made once."""
    found: dict[tuple[str, str, int], Pair] = {}

    def make(inside: str, mode: str, size: int) -> Pair:
        case = (inside, mode, size)
        if case not in found:
            directory = tmp_path_factory.mktemp("made")
            found[case] = (
                container(directory / "a", *case, seed=1),
                container(directory / "b", *case, seed=2),
            )
        return found[case]

    return make


def container(directory: Path, inside: str, mode: str, size: int, *, seed: int) -> Path:
    directory.mkdir()
    noise = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if inside == "compressed":
        return save_checkpoint(
            {"w": noise},
            directory / "net-1",
            format="safetensors",
            enc_key=KEY.raw,
            enc_mode=mode,
            compression="zstd",
        ).path
    plain = directory / f"net-1.{inside}"
    if inside == "json":
        plain.write_bytes(noise.tobytes())
    else:
        save_checkpoint({"w": noise}, plain, format=inside, crc_check=True)
    target = directory / f"{plain.name}.ckpe"
    return convert.encrypt_file(plain, target, key=KEY, mode=mode).target.path


def flipped(data: bytes, *positions: int) -> bytes:
    changed = bytearray(data)
    for position in positions:
        changed[position] ^= 0x40
    return bytes(changed)


Attack = Callable[[bytes, bytes], bytes]
Outcome = tuple[api.Status, type[CkptmgrError]]
DAMAGE: Outcome = (api.Status.DAMAGED, TamperedCheckpoint)
CUT: Outcome = (api.Status.DAMAGED, TruncatedCheckpoint)
UNKNOWN: Outcome = (api.Status.UNREADABLE, UnsupportedCheckpoint)

# a: the file; b: another one of its shape.
ATTACKS: dict[str, tuple[Attack, Outcome]] = {
    "flip the plaintext length": (lambda a, b: flipped(a, 33, COPY + 33), DAMAGE),
    "flip the file id": (lambda a, b: flipped(a, 20, COPY + 20), DAMAGE),
    "flip the segment length": (lambda a, b: flipped(a, 45, COPY + 45), DAMAGE),
    "flip the generation": (lambda a, b: flipped(a, 64, COPY + 64), DAMAGE),
    "flip the slot": (lambda a, b: flipped(a, 130, COPY + 130), DAMAGE),
    "flip the MAC": (lambda a, b: flipped(a, COPY - 1, 2 * COPY - 1), DAMAGE),
    "flip the zeros": (lambda a, b: flipped(a, 2 * COPY + 9), DAMAGE),
    "flip the FLOE parameters": (lambda a, b: flipped(a, HEAD - 74), DAMAGE),
    "flip the FLOE tag": (lambda a, b: flipped(a, HEAD - 1), DAMAGE),
    "flip the length of a segment": (lambda a, b: flipped(a, HEAD), DAMAGE),
    "flip the iv of a segment": (lambda a, b: flipped(a, HEAD + 17), DAMAGE),
    "flip a segment": (lambda a, b: flipped(a, HEAD + 100), DAMAGE),
    "flip the tag of a segment": (lambda a, b: flipped(a, -1), DAMAGE),
    "a newer version": (lambda a, b: flipped(a, 8, COPY + 8), UNKNOWN),
    "an unknown suite": (lambda a, b: flipped(a, 11, COPY + 11), UNKNOWN),
    "a flag": (lambda a, b: flipped(a, 12, COPY + 12), UNKNOWN),
    "an unknown content": (lambda a, b: flipped(a, 40, COPY + 40), UNKNOWN),
    "cut to nothing": (lambda a, b: b"", CUT),
    "cut in the magic": (lambda a, b: a[:5], CUT),
    "cut in the header": (lambda a, b: a[:100], CUT),
    "cut behind the headers": (lambda a, b: a[: 2 * COPY], CUT),
    "cut before the segments": (lambda a, b: a[:HEAD], CUT),
    "cut one byte": (lambda a, b: a[:-1], CUT),
    "a byte behind it": (lambda a, b: a + b"\0", DAMAGE),
    "another file behind it": (lambda a, b: a + b, DAMAGE),
    "splice the payload": (lambda a, b: a[: HEAD - 74] + b[HEAD - 74 :], DAMAGE),
    "splice the headers": (lambda a, b: b[: 2 * COPY] + a[2 * COPY :], DAMAGE),
    "splice the segments": (lambda a, b: a[:HEAD] + b[HEAD:], DAMAGE),
}
# Of files of three segments, the last of them short.
SEGMENT_ATTACKS: dict[str, tuple[Attack, Outcome]] = {
    "flip the second": (lambda a, b: flipped(a, HEAD + SEGMENT + 40), DAMAGE),
    "swap two": (lambda a, b: joined(a, 1, 0, 2), DAMAGE),
    "repeat one": (lambda a, b: joined(a, 0, 0, 2), DAMAGE),
    "drop one": (lambda a, b: joined(a, 0, 2), CUT),
    "drop the last": (lambda a, b: joined(a, 0, 1), CUT),
    "add one": (lambda a, b: joined(a, 0, 1, 1, 2), DAMAGE),
    "add one behind": (lambda a, b: a + segments(b)[1], DAMAGE),
    "splice one": (
        lambda a, b: a[: HEAD + SEGMENT] + segments(b)[1] + segments(a)[2],
        DAMAGE,
    ),
}


# The length of frames follows from that of the file, so added bytes can look like missing ones.
OF_FRAMES: dict[str, Outcome] = {
    "flip the length of a segment": CUT,
    "a byte behind it": CUT,
    "drop one": DAMAGE,
    "add one behind": CUT,
}


def outcome_of(inside: str, attack: str) -> Outcome:
    outcome = (ATTACKS | SEGMENT_ATTACKS)[attack][1]
    return OF_FRAMES.get(attack, outcome) if inside == "compressed" else outcome


def segments(data: bytes) -> list[bytes]:
    return [data[at : at + SEGMENT] for at in range(HEAD, len(data), SEGMENT)]


def joined(data: bytes, *order: int) -> bytes:
    parts = segments(data)
    return data[:HEAD] + b"".join(parts[index] for index in order)


def as_named(path: Path) -> Checkpoint:
    """Return a file as somebody names it who knows nothing but its path."""
    return Checkpoint(
        path=path,
        series="net",
        step=0,
        saved_at=datetime(2026, 3, 1, tzinfo=UTC),
        size_bytes=path.stat().st_size,
    )


def verdict(path: Path, *, options: api.ReadOptions = READING) -> api.Status:
    store = api.place(path.parent, trust=replace(options.trust, allow_unencrypted=True))
    return api.verify(store, as_named(path), options=options).status


def refusal(path: Path, *, options: api.ReadOptions = READING) -> type[Exception]:
    """Return the kind of error that decrypting ends with; there must be no file then."""
    target = path.with_name("decrypted")
    with pytest.raises(CkptmgrError) as caught:
        convert.decrypt_file(path, target, options=options)
    assert not target.exists()
    return caught.type


def check(pair: Pair, directory: Path, attack: Attack, outcome: Outcome) -> None:
    path, other = pair
    attacked = directory / path.name
    attacked.write_bytes(attack(path.read_bytes(), other.read_bytes()))
    described = api.manifest_of(path)
    assert (verdict(attacked), refusal(attacked)) == outcome
    if described.exists():
        attacked.with_name(described.name).write_bytes(described.read_bytes())
        assert verdict(attacked) is outcome[0]
        assert issubclass(refusal(attacked), (CorruptCheckpoint, UnsupportedCheckpoint))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("inside", INSIDE)
def test_attack_has_its_own_error_whatever_is_inside(
    made: Make, tmp_path: Path, inside: str, attack: str
) -> None:
    for mode in MODES:
        (tmp_path / mode).mkdir()
        pair = made(inside, mode, 20_000)
        check(pair, tmp_path / mode, ATTACKS[attack][0], outcome_of(inside, attack))


@pytest.mark.parametrize("attack", SEGMENT_ATTACKS)
@pytest.mark.parametrize("inside", INSIDE)
def test_attack_on_segments_has_its_own_error_whatever_is_inside(
    made: Make, tmp_path: Path, inside: str, attack: str
) -> None:
    pair = made(inside, "AES-GCM", 2 * SEGMENT + 20_000)
    check(pair, tmp_path, SEGMENT_ATTACKS[attack][0], outcome_of(inside, attack))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", INSIDE)
def test_one_header_copy_is_enough_and_no_other_key_will_do(
    made: Make, tmp_path: Path, inside: str, mode: str
) -> None:
    path, _ = made(inside, mode, 20_000)
    attacked = tmp_path / path.name
    for copy in (0, COPY):
        attacked.write_bytes(flipped(path.read_bytes(), *range(copy, copy + COPY)))
        # A checkpoint without a manifest is unproven; other files have none.
        expected = api.Status.OK if inside == "json" else api.Status.UNPROVEN
        assert verdict(attacked) is expected
        wrong = api.reading(keys=OTHER_KEY)
        assert verdict(attacked, options=wrong) is api.Status.WRONG_KEY
        assert refusal(attacked, options=wrong) is KeyProblem


@settings(max_examples=40)
@given(data=st.data())
def test_any_change_gives_the_same_bytes_or_no_file(
    made: Make, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path, _ = made(data.draw(st.sampled_from(INSIDE)), data.draw(st.sampled_from(MODES)), 20_000)
    directory = tmp_path_factory.mktemp("changed")
    attacked, target = directory / path.name, directory / "decrypted"
    attacked.write_bytes(path.read_bytes())
    convert.decrypt_file(attacked, directory / "as it was", options=READING)
    changed = bytearray(path.read_bytes())
    anywhere = st.integers(0, 200) | st.integers(COPY, COPY + 200) | st.integers(0, len(changed))
    for _ in range(data.draw(st.integers(1, 3))):
        at, removed = data.draw(anywhere), data.draw(st.sampled_from([0, 0, 1, 4, COPY]))
        new = data.draw(st.binary(max_size=8))
        changed[at : at + max(removed, len(new))] = new
    attacked.write_bytes(changed)
    try:
        convert.decrypt_file(attacked, target, options=READING)
    except CkptmgrError:
        assert not target.exists()
    else:
        assert target.read_bytes() == (directory / "as it was").read_bytes()
