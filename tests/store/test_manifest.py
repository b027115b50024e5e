# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import CorruptCheckpoint, KeyProblem, TamperedCheckpoint, Trust, UnsupportedCheckpoint
from ckptmgr.core.model import Pin, State
from ckptmgr.crypto.keys.key import Key
from ckptmgr.store.manifest.codec import SUFFIX, decode, encode, manifest_name
from tests.support.manifests import PATH, SAVED_AT, changed, manifest

KEY, OTHER_KEY = Key(bytes(32)), Key(bytes([1] * 32))
Change = Callable[[dict[str, Any]], object]


def test_manifest_reads_back_as_it_was_written() -> None:
    assert decode(encode(manifest()), path=PATH) == manifest()


def test_manifest_of_an_overwrite_reads_back_with_the_old_one() -> None:
    both = manifest(replaces=manifest(content=b"old", step=0))
    assert decode(encode(both), path=PATH) == both


def test_manifest_after_the_swap_knows_nothing_of_the_old_one() -> None:
    both = manifest(replaces=manifest(content=b"old"))
    assert both.without_replaced() == manifest()


def test_old_manifest_inside_a_manifest_does_not_nest() -> None:
    older = manifest(replaces=manifest(content=b"oldest"))
    read = decode(encode(manifest(replaces=older)), path=PATH)
    assert read.replaces is not None
    assert read.replaces.replaces is None


def test_time_is_stored_and_read_as_utc() -> None:
    there = SAVED_AT.astimezone(timezone(timedelta(hours=9)))
    read = decode(encode(replace(manifest(), saved_at=there)), path=PATH)
    assert read.saved_at == SAVED_AT
    assert read.saved_at.utcoffset() == timedelta(0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e-300, -0.0, 3])
def test_metric_of_any_number_reads_back(value: float) -> None:
    read = decode(encode(manifest(metrics={"loss": value})), path=PATH)
    assert read.metrics["loss"] == value


def test_metric_that_is_not_a_number_stays_one() -> None:
    data = encode(manifest(metrics={"loss": math.nan}))
    assert b"NaN" not in data
    assert math.isnan(decode(data, path=PATH).metrics["loss"])


def test_names_that_are_no_utf8_read_back() -> None:
    name = b"n\xffet-1.ckpt".decode(errors="surrogateescape")
    odd = manifest(name)
    assert decode(encode(odd), path=Path("/runs") / manifest_name(name)) == odd


def test_checkpoint_of_a_manifest_has_its_facts() -> None:
    checkpoint = manifest().to_checkpoint(Path("/runs"), state=State.CORRUPT, problem="why")
    assert checkpoint.path == Path("/runs/net-1.ckpt")
    assert checkpoint.order == (7, 1, 2)
    assert (checkpoint.state, checkpoint.problem) == (State.CORRUPT, "why")
    assert checkpoint.metrics == {"loss": 0.5}
    assert [pin.name for pin in checkpoint.pins] == ["paper"]


def test_manifest_beside_another_file_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"is the manifest of 'net-1\.ckpt'"):
        decode(encode(manifest()), path=Path("/runs/net-2.ckpt.manifest.json"))


def set_in(*path: str | int, to: object) -> Change:
    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for part in path[:-1]:
            target = target[part]
        target[path[-1]] = to

    return change


DAMAGES: dict[str, Change] = {
    "schema": set_in("schema", to="ckptmgr.manifest/2"),
    "no step": lambda document: document.pop("step"),
    "negative step": set_in("step", to=-1),
    "step as text": set_in("step", to="1"),
    "step as bool": set_in("step", to=True),
    "step of more than 64 bits": set_in("step", to=1 << 64),
    "sequence that cannot be printed": set_in("sequence", to=10**4299),
    "huge size": set_in("files", 0, "size_bytes", to=10**30),
    "huge size and range": set_in("files", 0, "digest", "range_bytes", to=1 << 40),
    "range of nothing": set_in("files", 0, "digest", "range_bytes", to=0),
    "series as number": set_in("series", to=1),
    "series whose lease lies elsewhere": set_in("series", to="/../../net"),
    "NUL in a series": set_in("series", to="a\0b"),
    "series that no file name can hold": set_in("series", to="\ud800"),
    "no files": set_in("files", to=[]),
    "files as object": set_in("files", to={}),
    "file as list": set_in("files", to=[[]]),
    "path for a name": set_in("files", 0, "name", to="../net-1.ckpt"),
    "absolute path for a name": set_in("files", 0, "name", to="/etc/net-1.ckpt"),
    "path that goes up inside": set_in("files", 0, "name", to="a/../../net-1.ckpt"),
    "dots for a name": set_in("files", 0, "name", to=".."),
    "no name": set_in("files", 0, "name", to=""),
    "NUL in a name": set_in("files", 0, "name", to="a\0b"),
    "algorithm": set_in("files", 0, "digest", "algorithm", to="md5"),
    "no hex": set_in("files", 0, "digest", "ranges", to=["zz"]),
    "short digest": set_in("files", 0, "digest", "ranges", to=["ab"]),
    "too few digests": set_in("files", 0, "digest", "ranges", to=[]),
    "ranges as number": set_in("files", 0, "digest", "ranges", to=5),
    "wrong total": set_in("files", 0, "digest", "total", to="00"),
    "metrics as list": set_in("metrics", to=[]),
    "metric as list": set_in("metrics", to={"loss": []}),
    "metric as bool": set_in("metrics", to={"loss": True}),
    "metric as word": set_in("metrics", to={"loss": "low"}),
    "stats as text": set_in("stats", to="x"),
    "pins as number": set_in("pins", to=3),
    "pin without reason": set_in("pins", to=[{"name": "x"}]),
    "policy as list": set_in("keep", to=["last(3)"]),
    "tags as text": set_in("tags", to="x"),
    "tag as number": set_in("tags", to=[3]),
    "run as text": set_in("run", to="x"),
    "parents as number": set_in("run", "parents", to=3),
    "world as list": set_in("world", to=[]),
    "no time zone": set_in("saved_at", to="2026-03-01T12:00:00"),
    "no time": set_in("saved_at", to="yesterday"),
    "time before time": set_in("saved_at", to="0001-01-01T00:00:00+14:00"),
    "replaces another file": set_in("replaces", to=json.loads(encode(manifest("net-2.ckpt")))),
    "replaces a list": set_in("replaces", to=[1]),
    "replaces a text": set_in("replaces", to="x"),
    "replaces nothing known": set_in("replaces", to={}),
    "cipher as number": set_in("files", 0, "cipher", to=1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_manifest_is_refused(damage: str) -> None:
    with pytest.raises(
        CorruptCheckpoint, match=r"^/runs/net-1\.ckpt\.manifest\.json: not |replaces 'net-2"
    ):
        decode(changed(DAMAGES[damage]), path=PATH)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"schema": NaN}',
        b'{"schema": "a", "schema": "b"}',
        b"[" * 100_000,
        b'{"x": ' * 100_000,
        b"1" * 5000,
        encode(manifest()).decode().encode("utf-16"),
    ],
    ids=lambda data: f"{data[:16]!r}, {len(data)} bytes",
)
def test_file_that_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="not "):
        decode(data, path=PATH)


def test_manifest_of_endless_values_is_refused_before_they_are_made() -> None:
    data = b'{"schema": "ckptmgr.manifest/1", "x": [' + b"[]," * ((1 << 21) + 1) + b"[]]}"
    with pytest.raises(CorruptCheckpoint, match="more than 2097152 values"):
        decode(data, path=PATH)


def test_manifest_of_a_newer_version_is_unsupported_not_damaged() -> None:
    newer = changed(set_in("schema", to="ckptmgr.manifest/3"))
    with pytest.raises(UnsupportedCheckpoint, match=r"manifest/3(.|\n)*upgrade"):
        decode(newer, path=PATH)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(field=st.sampled_from(sorted(json.loads(encode(manifest())))), value=JSON)
def test_any_value_in_any_field_is_read_or_refused(field: str, value: object) -> None:
    try:
        read = decode(
            changed(set_in(field, to=value)),
            path=PATH,
            trust=Trust(keys=KEY, allow_unencrypted=True),
        )
    except (CorruptCheckpoint, KeyProblem):
        return
    assert decode(encode(read), path=PATH) == read or field in ("metrics", "stats")


@given(data=st.data())
def test_any_flipped_bit_of_an_authenticated_manifest_is_noticed(data: st.DataObject) -> None:
    encoded = bytearray(encode(manifest(), trust=Trust(keys=KEY)))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = decode(bytes(encoded), path=PATH, trust=Trust(keys=KEY))
    except (CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint):
        return
    assert read == manifest()  # white space, or the case of a hexadecimal digit


def test_authenticated_manifest_is_read_with_its_key() -> None:
    data = encode(manifest(), trust=Trust(keys=KEY))
    assert decode(data, path=PATH, trust=Trust(keys=KEY)) == manifest()
    assert decode(data, path=PATH) == manifest()


def test_authenticated_manifest_cut_anywhere_is_refused() -> None:
    data = encode(manifest(), trust=Trust(keys=KEY))
    for end in range(len(data) - 1):  # the last byte is a line feed
        with pytest.raises(CorruptCheckpoint):
            decode(data[:end], path=PATH, trust=Trust(keys=KEY))


def test_manifest_under_another_key_is_a_key_problem_that_names_both() -> None:
    with pytest.raises(KeyProblem, match=f"{OTHER_KEY.key_id}.*{KEY.key_id}"):
        decode(
            encode(manifest(), trust=Trust(keys=OTHER_KEY)),
            path=PATH,
            trust=Trust(keys=KEY, allow_unencrypted=True),
        )


def test_manifest_without_authentication_is_refused_only_when_it_must_have_one() -> None:
    data = encode(manifest())
    assert decode(data, path=PATH, trust=Trust(keys=KEY, allow_unencrypted=True)) == manifest()
    with pytest.raises(KeyProblem, match="allow_unsealed"):
        decode(data, path=PATH, trust=Trust(keys=KEY))


def authenticated(change: Change) -> bytes:
    document = json.loads(encode(manifest(), trust=Trust(keys=KEY)))
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "change",
    [
        set_in("step", to=2),
        set_in("metrics", "loss", to=0.1),
        set_in("unknown", to=1),
        set_in("auth", "mac", to="00"),
        set_in("auth", "mac", to="no hex"),
        set_in("auth", "mac", to=None),
    ],
)
def test_changed_manifest_is_tampered(change: Change) -> None:
    with pytest.raises(TamperedCheckpoint, match="was changed"):
        decode(authenticated(change), path=PATH, trust=Trust(keys=KEY, allow_unencrypted=True))


@pytest.mark.parametrize("auth", [[], "x", {"algorithm": "none"}])
def test_unknown_authentication_is_refused(auth: object) -> None:
    with pytest.raises(CorruptCheckpoint, match="unknown authentication"):
        decode(
            authenticated(set_in("auth", to=auth)),
            path=PATH,
            trust=Trust(keys=KEY, allow_unencrypted=True),
        )


@pytest.mark.parametrize("key", [None, KEY])
def test_number_beyond_all_floats_is_refused(key: Key | None) -> None:
    data = encode(manifest(), trust=Trust(keys=key)).replace(b'"loss": 0.5', b'"loss": 1e999')
    with pytest.raises(CorruptCheckpoint, match="1e999 is too large"):
        decode(data, path=PATH, trust=Trust(keys=key, allow_unencrypted=True))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"epoch": -1}, "the epoch is -1"),
        ({"epoch": 1.5}, r"the epoch is 1\.5"),
        ({"step": 1 << 64}, "the step is too large"),
        ({"why": 5}, "5 is not a str"),
        ({"pins": (Pin(name=5),)}, "5 is not a str"),  # type: ignore[arg-type]
    ],
)
def test_manifest_that_nobody_could_read_is_not_written(
    change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=problem):
        encode(replace(manifest(), **change))


def test_manifest_nested_to_the_limit_is_refused() -> None:
    for depth in range(100, 1100, 3):
        nested = b"[" * depth + b"]" * depth
        data = encode(manifest(), trust=Trust(keys=KEY)).replace(
            b'"schema"', b'"x": ' + nested + b', "schema"'
        )
        with pytest.raises(CorruptCheckpoint):
            decode(data, path=PATH, trust=Trust(keys=KEY, allow_unencrypted=True))


def test_manifest_is_named_after_its_file() -> None:
    assert manifest_name("net-1.ckpt") == "net-1.ckpt" + SUFFIX == "net-1.ckpt.manifest.json"


def test_key_is_not_in_the_manifest() -> None:
    assert bytes(32).hex().encode() not in encode(manifest(), trust=Trust(keys=KEY))
