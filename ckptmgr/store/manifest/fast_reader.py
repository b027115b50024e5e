# SPDX-License-Identifier: Apache-2.0
"""Read the facts of a plain manifest without parsing its JSON, for listings of many checkpoints.

A manifest of one file in exactly the layout that `codec.encode` writes, without proofs, pins and
`replaces`, and in printable ASCII, is matched by one expression. Everything else is left to
`codec.decode`, which alone finds errors. So the result here equals that of `decode`.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from ckptmgr.core.model import Checkpoint, Figures, Link
from ckptmgr.core.shard_names import is_set_name
from ckptmgr.io.digest import ALGORITHM, DIGEST_BYTES, MAX_RANGE_BYTES, total_digest
from ckptmgr.store.manifest.model import PLACEHOLDER, checkpoint_id

_MAX_BYTES = 1 << 20  # in so few the strict parser finds no more values than it allows
_TEXT = r"[ !#-\[\]-~]*+"  # printable ASCII that JSON does not escape
_NAME = r"(?!\.{1,2}\")[ !#-.0-\[\]-~]++"  # of a file: neither empty nor with a `/`
_COUNT = r"(?:0|[1-9][0-9]{0,18}+)"  # fits 64 bits
_NUMBER = rf"-?{_COUNT}(?:\.[0-9]{{1,40}}+)?(?:e[-+][0-9]{{1,2}}+)?"  # neither NaN nor infinite
_FIGURES = rf'\{{(?:(?:\n  "{_TEXT}": {_NUMBER},)*+\n  "{_TEXT}": {_NUMBER}\n )?\}}'
_TEXTS = rf'\[(?:(?:\n   "{_TEXT}",)*+\n   "{_TEXT}"\n  )?\]'
_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.(?!0{6})[0-9]{6})?\+00:00"
_DIGEST = "[0-9a-f]{64}"
_DIGESTS = rf'\[(?:(?:\n     "{_DIGEST}",)*+\n     "{_DIGEST}"\n    )?\]'
_KEEP = r'(?:\n "keep": "(?:[ !#-\[\]-~]|\\["\\])*+",)?'  # names of metrics may be quoted
_KEEP_AT = r'(?:\n "keep_at": "[0-9a-f]{32}",)?'
_LAYOUT = re.compile(
    rf"""\{{
 "schema": "ckptmgr\.manifest/1",
 "series": "(?P<series>[ !#-.0-\[\]-~]*+)",
 "step": (?P<step>{_COUNT}),
 "attempt": (?P<attempt>{_COUNT}),
 "epoch": (?P<epoch>null|{_COUNT}),
 "sequence": (?P<sequence>{_COUNT}),
 "saved_at": "(?P<saved_at>{_TIME})",
 "why": "(?P<why>{_TEXT})",
 "run": \{{
  "id": "(?P<run_id>{_TEXT})",
  "parents": (?P<parents>{_TEXTS})(?P<start>,\n  "start": "new")?
 \}},
 "world": \{{
  "size": (?P<world>{_COUNT})
 \}},
 "metrics": (?P<metrics>{_FIGURES}),
 "pins": \[\],{_KEEP}{_KEEP_AT}
 "stats": (?P<stats>{_FIGURES}),
 "files": \[
  \{{
   "name": "(?P<name>{_NAME})",
   "size_bytes": (?P<size>{_COUNT}),
   "format": "(?P<format>{_TEXT})",
   "cipher": (?:null|"(?P<cipher>{_TEXT})"),
   "key_id": (?:null|"(?P<key_id>{_TEXT})"),
   "digest": \{{
    "algorithm": "{ALGORITHM}",
    "range_bytes": (?P<range>{_COUNT}),
    "total": "(?P<total>{_DIGEST})",
    "ranges": (?P<ranges>{_DIGESTS})
   \}}
  \}}
 \](?:,
 "previous": \{{
  "name": "(?P<previous_name>{_NAME})",
  "sequence": (?P<previous_sequence>{_COUNT}),
  "run_id": "(?P<previous_run>{_TEXT})",
  "id": "(?P<previous_id>{_DIGEST})"
 \}})?
\}}
"""
)
_TEXT_IN_LIST = re.compile(r'"([^"]*)"')
_FIGURE = re.compile(r'"([^"]*)": ([^,\n]*)')
_NAME_OF_FIGURE = re.compile(r'"[^"]*"')
_HEX = re.compile(_DIGEST)


def checkpoint_in(data: bytes, path: Path) -> Checkpoint | None:
    """Return the checkpoint at `path` whose manifest has these bytes; None where `decode` must look.

    Its state is OK: the caller compares its size with that of the file.
    """
    # The layout matches no byte beyond ASCII.
    match = None if len(data) > _MAX_BYTES else _LAYOUT.fullmatch(data.decode("latin-1"))
    if match is None:
        return None
    name, why, sequence = match["name"], match["why"], int(match["sequence"])
    is_plain = name == path.name and not is_set_name(name) and (why, sequence) != (PLACEHOLDER, 0)
    size_bytes, metrics = _size(match), _figures(match["metrics"])
    if not is_plain or size_bytes is None or metrics is None or _has_doubles(match["stats"]):
        return None
    try:
        saved_at = datetime.fromisoformat(match["saved_at"])
    except ValueError:
        return None
    step, attempt = int(match["step"]), int(match["attempt"])
    epoch = None if match["epoch"] == "null" else int(match["epoch"])
    parents = tuple(_TEXT_IN_LIST.findall(match["parents"]))
    series, run_id = match["series"], match["run_id"]
    identity = checkpoint_id(
        series=series,
        step=step,
        attempt=attempt,
        epoch=epoch,
        sequence=sequence,
        saved_at=match["saved_at"],
        why=why,
        run_id=run_id,
        parents=parents,
        world_size=int(match["world"]),
        files=[(name, size_bytes, match["total"])],
        previous_id=match["previous_id"],
    )
    return Checkpoint(
        path=path,
        series=series,
        step=step,
        saved_at=saved_at,
        size_bytes=size_bytes,
        run_id=run_id,
        attempt=attempt,
        sequence=sequence,
        epoch=epoch,
        why=why,
        metrics=metrics,
        format=match["format"],
        cipher=match["cipher"],
        key_id=match["key_id"],
        id=identity,
        previous=_link(match),
        parent_run_ids=parents,
        starts_anew=match["start"] is not None,
    )


def _size(match: re.Match[str]) -> int | None:
    """Return the size of the file if the digests cover it and belong together."""
    size_bytes, range_bytes = int(match["size"]), int(match["range"])
    ranges = bytes.fromhex("".join(_HEX.findall(match["ranges"])))
    if not 1 <= range_bytes <= MAX_RANGE_BYTES:
        return None
    if len(ranges) != -(-size_bytes // range_bytes) * DIGEST_BYTES:
        return None
    total = total_digest(size_bytes, range_bytes, ranges)
    return size_bytes if total.hex() == match["total"] else None


def _figures(text: str) -> Figures | None:
    """Return names and numbers, or None if a name appears twice."""
    if text == "{}":
        return Figures()
    found = _FIGURE.findall(text)
    figures = Figures({name: float(number) for name, number in found})
    return figures if len(figures) == len(found) else None


def _has_doubles(figures: str) -> bool:
    names = _NAME_OF_FIGURE.findall(figures)
    return len(set(names)) < len(names)


def _link(match: re.Match[str]) -> Link | None:
    name = match["previous_name"]
    if name is None:
        return None
    return Link(
        name=name,
        sequence=int(match["previous_sequence"]),
        run_id=match["previous_run"],
        id=match["previous_id"],
    )
