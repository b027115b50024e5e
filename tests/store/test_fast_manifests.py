# SPDX-License-Identifier: Apache-2.0
"""Listings that read plain manifests without parsing them: as strict, and with the same values."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import Checkpoint, CkptmgrError
from ckptmgr.core.model import Link
from ckptmgr.io.digest import FileDigest
from ckptmgr.store.manifest.codec import PLACEHOLDER
from ckptmgr.store.manifest.fast_reader import checkpoint_in
from tests.support import api
from tests.support.manifests import manifest

PLAIN = replace(
    manifest(),
    pins=(),
    starts_anew=True,
    metrics={"loss": -0.5e-7, "top 5": 3.0},
    stats={"write_s": 0.25, "bytes": 4194304.0},
    previous=Link(name="net-0.ckpt", sequence=6, run_id="before", id="ab" * 32),
)
PLAIN_MANIFESTS = {
    "all fields": PLAIN,
    "least": replace(
        PLAIN,
        epoch=None,
        metrics={},
        stats={},
        previous=None,
        parent_run_ids=(),
        starts_anew=False,
        saved_at=PLAIN.saved_at.replace(microsecond=70),
        file=replace(PLAIN.file, cipher=None, key_id=None),
    ),
    "policy": replace(PLAIN, keep="last(3) | every(1000)"),
    "policy of an address": replace(PLAIN, keep="last(3)", keep_at="0f" * 16),
    "not finite": replace(PLAIN, health="not finite", stats={"not_finite": 3.0}),
    "named tensor that is not finite": replace(
        PLAIN, health="not finite: model/w", file=replace(PLAIN.file, cipher=None, key_id=None)
    ),
    "policy with a quoted metric": replace(PLAIN, keep='best(2, "val \\"x\\" loss", min)'),
    "empty file": replace(
        PLAIN, file=replace(PLAIN.file, digest=FileDigest(size_bytes=0, ranges=()))
    ),
    "many ranges": replace(
        PLAIN,
        file=replace(
            PLAIN.file,
            digest=FileDigest(size_bytes=40, range_bytes=16, ranges=(b"a" * 32,) * 3),
        ),
    ),
}
OTHER_MANIFESTS = {
    "pinned": manifest(),
    "name beyond ASCII": replace(PLAIN, series="größe"),
    "policy beyond ASCII": replace(PLAIN, keep='best(2, "größe", min)'),
    "overwriting": replace(PLAIN, replaces=manifest()),
    "metric that is no number": replace(PLAIN, metrics={"loss": float("nan")}),
    "placeholder": replace(PLAIN, why=PLACEHOLDER, sequence=0),
    "parts of a file left out": replace(
        PLAIN, file=replace(PLAIN.file, digest=replace(PLAIN.file.digest, blank_bytes=1))
    ),
}
DIRECTORY = Path("/runs")
DATA = DIRECTORY / "net-1.ckpt"


def values(checkpoint: Checkpoint) -> dict[str, object]:
    """Return all values of a checkpoint, also those that a comparison ignores."""
    return {one.name: getattr(checkpoint, one.name) for one in dataclasses.fields(checkpoint)}


def strictly(data: bytes) -> Checkpoint | None:
    """Return the fields that the parser finds in a manifest, or None if it refuses it."""
    try:
        return api.decode_manifest(
            data, path=DIRECTORY / api.manifest_name(DATA.name)
        ).to_checkpoint(DIRECTORY)
    except CkptmgrError:
        return None


@pytest.mark.parametrize("kind", PLAIN_MANIFESTS)
def test_plain_manifest_has_the_values_that_the_parser_finds(kind: str) -> None:
    data = api.encode_manifest(PLAIN_MANIFESTS[kind])
    found, expected = checkpoint_in(data, DATA), strictly(data)
    assert found is not None
    assert expected is not None
    assert values(found) == values(expected)


@pytest.mark.parametrize("kind", OTHER_MANIFESTS)
def test_manifest_of_another_kind_is_left_to_the_parser(kind: str) -> None:
    assert checkpoint_in(api.encode_manifest(OTHER_MANIFESTS[kind]), DATA) is None


@given(st.data())
def test_changed_manifest_is_left_to_the_parser_or_has_its_values(drawn: st.DataObject) -> None:
    data = bytearray(api.encode_manifest(drawn.draw(st.sampled_from([*PLAIN_MANIFESTS.values()]))))
    for _ in range(drawn.draw(st.integers(1, 3))):
        place = drawn.draw(st.integers(0, len(data) - 1))
        length = drawn.draw(st.integers(0, 3))
        data[place : place + length] = drawn.draw(
            st.sampled_from(
                [b"", b"0", b"1", b"9" * 20, b"-", b'"', b"\\", b"/", b"\n", b"\xff", b"e"]
            )
        )
    found, expected = checkpoint_in(bytes(data), DATA), strictly(bytes(data))
    assert found is None or (expected is not None and values(found) == values(expected))


CHANGES = {
    "name twice": (b'"top 5"', b'"loss"'),
    "figure of the save twice": (b'"bytes"', b'"write_s"'),
    "another total": (PLAIN.file.digest.total.hex().encode(), b"00" * 32),
    "no digest for the bytes": (b'"size_bytes": 7', b'"size_bytes": 0'),
    "range of nothing": (b'"range_bytes": 16777216', b'"range_bytes": 0'),
    "day that is none": (b"2026-03-01", b"2026-02-30"),
    "name of many files": (b'"name": "net-1.ckpt"', b'"name": "net-1.shards"'),
    "name of another file": (b'"name": "net-1.ckpt"', b'"name": "net-2.ckpt"'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_manifest_that_the_parser_refuses_is_left_to_it(change: str) -> None:
    old, new = CHANGES[change]
    data = api.encode_manifest(PLAIN).replace(old, new)
    assert strictly(data) is None
    assert checkpoint_in(data, DATA) is None


def test_manifest_of_more_bytes_than_a_listing_matches_is_left_to_the_parser() -> None:
    large = replace(PLAIN, stats={f"{number:0100}": 1.0 for number in range(10_000)})
    assert checkpoint_in(api.encode_manifest(large), DATA) is None


@pytest.mark.parametrize("content", [b"content", b"short"])
def test_listing_compares_the_size_in_a_plain_manifest_with_that_of_the_file(
    tmp_path: Path, content: bytes
) -> None:
    written: api.Manifest = replace(PLAIN, file=replace(PLAIN.file, cipher=None, key_id=None))
    (tmp_path / "net-1.ckpt").write_bytes(content)
    (tmp_path / api.manifest_name("net-1.ckpt")).write_bytes(api.encode_manifest(written))
    (found,) = api.listed(tmp_path)
    is_whole = content == b"content"
    assert found.state is (api.State.OK if is_whole else api.State.CORRUPT)
    assert (found.problem is None) is is_whole
