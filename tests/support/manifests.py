# SPDX-License-Identifier: Apache-2.0
"""Manifests to test with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckptmgr.core.model import Pin
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import digest_of
from ckptmgr.store.manifest.codec import FileEntry, Manifest, encode

PATH = Path("/runs/net-1.ckpt.manifest.json")
SAVED_AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def manifest(
    name: str = "net-1.ckpt",
    content: bytes = b"content",
    *,
    metrics: Mapping[str, float] | None = None,
    step: int = 1,
    replaces: Manifest | None = None,
) -> Manifest:
    """Return a manifest with every field set."""
    digest = digest_of(BytesSource(content))
    return Manifest(
        file=FileEntry(name=name, digest=digest, format="ckpt", cipher="AES-GCM", key_id="ab"),
        series="net",
        run_id="run",
        parent_run_ids=("before", "first"),
        step=step,
        attempt=2,
        sequence=7,
        saved_at=SAVED_AT,
        epoch=3,
        why="policy",
        metrics=metrics if metrics is not None else {"loss": 0.5},
        pins=(Pin(name="paper", reason="figure 2"),),
        stats={"write_s": 0.25},
        replaces=replaces,
    )


def changed(change: Callable[[dict[str, Any]], object], base: Manifest | None = None) -> bytes:
    """Return an encoded manifest after a change of its JSON."""
    document = json.loads(encode(base or manifest()))
    change(document)
    return json.dumps(document).encode()
