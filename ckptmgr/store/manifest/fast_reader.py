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
_HEALTH = rf'(?:\n "health": "(?P<health>{_TEXT})",)?'
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
 "stats": (?P<stats>{_FIGURES}),{_HEALTH}
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
    found = match.groups()
    series, step, attempt, epoch, sequence, saved_at, why = found[:7]
    run_id, parents, start, world, metrics, stats, health, name = found[7:15]
    size, kind, cipher, key_id, range_bytes, total, ranges = found[15:22]
    previous_name, previous_sequence, previous_run, previous_id = found[22:]
    is_plain = (
        name == path.name
        and not is_set_name(name)
        and (why, sequence) != (PLACEHOLDER, "0")
        and _is_covered(int(size), int(range_bytes), ranges, total)
        and not _has_doubles(stats)
    )
    figures = _figures(metrics) if is_plain else None
    if figures is None:
        return None
    try:
        saved = datetime.fromisoformat(saved_at)
    except ValueError:
        return None
    # Quoted texts that the layout allows, and its numbers, are their own JSON.
    named = [] if parents == "[]" else _TEXT_IN_LIST.findall(parents)
    identity = checkpoint_id(
        series=f'"{series}"',
        step=step,
        attempt=attempt,
        epoch=epoch,
        sequence=sequence,
        saved_at=f'"{saved_at}"',
        why=f'"{why}"',
        run_id=f'"{run_id}"',
        parents=",".join([f'"{parent}"' for parent in named]) if named else "",
        world_size=world,
        files=f'["{name}",{size},"{total}"]',
        previous="null" if previous_id is None else f'"{previous_id}"',
    )
    previous = None
    if previous_id is not None:
        previous = Link(
            name=previous_name,
            sequence=int(previous_sequence),
            run_id=previous_run,
            id=previous_id,
        )
    return Checkpoint(
        path=path,
        series=series,
        step=int(step),
        saved_at=saved,
        size_bytes=int(size),
        run_id=run_id,
        attempt=int(attempt),
        sequence=int(sequence),
        epoch=None if epoch == "null" else int(epoch),
        why=why,
        metrics=figures,
        health=health,
        format=kind,
        cipher=cipher,
        key_id=key_id,
        id=identity,
        previous=previous,
        parent_run_ids=tuple(named),
        starts_anew=start is not None,
    )


def _is_covered(size_bytes: int, range_bytes: int, digests: str, total: str) -> bool:
    """Return whether the digests of its ranges cover a file, and make its total one."""
    ranges = bytes.fromhex("".join(_HEX.findall(digests)))
    return (
        1 <= range_bytes <= MAX_RANGE_BYTES
        and len(ranges) == -(-size_bytes // range_bytes) * DIGEST_BYTES
        and total_digest(size_bytes, range_bytes, ranges).hex() == total
    )


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
