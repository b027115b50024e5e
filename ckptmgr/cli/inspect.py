# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr inspect`."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit
from ckptmgr.cli.options import Session
from ckptmgr.cli.render import Cell, Json, Output

if TYPE_CHECKING:
    from ckptmgr.cli.select import Selected
    from ckptmgr.crypto.key import Key
    from ckptmgr.loader import OpenCheckpoint
    from ckptmgr.manifest import Manifest

_SHOWN_TEXT = 60


@options.command(
    "inspect", examples=("inspect net-3_40.ckpt", "inspect latest --dir runs --stats --key file:k")
)
@click.argument("checkpoint")
@options.dir_option
@options.series_option
@click.option("--tensors", "pattern", metavar="PATTERN", help="Only these names, e.g. 'fc*'.")
@click.option("--stats", "has_stats", is_flag=True, help="Minimum, maximum, mean, NaN count.")
@options.key_options
@options.output_options
@click.pass_context
def inspect_command(
    ctx: click.Context,
    checkpoint: str,
    directory: Path,
    series: str | None,
    pattern: str | None,
    has_stats: bool,
    key_source: str | None,
    allow_unsealed: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Show what a checkpoint holds.

    CHECKPOINT is a path, a step, latest, best:METRIC:min, best:METRIC:max or @pinned. The envelope of an encrypted
    file is shown without a key; its tensors need one. -q prints tensor names.
    """
    from ckptmgr.cli.select import select_one

    key = options.load_key(key_source)
    opener = partial(options.open_store, key=key, allow_unsealed=allow_unsealed)
    selected = select_one(checkpoint, directory, opener, series=series)
    output = render.make_output(ctx, selected.store.directory, as_json=as_json, quiet=quiet)
    with _opened(selected, key, allow_unsealed) as (opened, manifest):
        envelope = _envelope(selected, opened, manifest)
        items = [] if opened is None else list(_items(opened, pattern or "*", has_stats=has_stats))
    if output.is_json:
        output.result(items, envelope)
    elif output.is_quiet:
        for item in items:
            click.echo(str(item["name"]).encode("utf-8", "surrogatepass"))
    else:
        _print(output, envelope, items, ctx.ensure_object(Session), has_stats=has_stats)
    return Exit.DONE


@contextlib.contextmanager
def _opened(
    selected: Selected, key: Key | None, allow_unsealed: bool
) -> Iterator[tuple[OpenCheckpoint | None, Manifest | None]]:
    """Open the file; None in place of its content when it is encrypted and there is no key."""
    from ckptmgr.formats.detect import Kind, detect
    from ckptmgr.loader import ReadOptions, open_source, translated_errors

    store, checkpoint = selected.store, selected.checkpoint
    with translated_errors(str(checkpoint.path)):
        manifest = store.read_manifest(checkpoint.name)
        with contextlib.closing(store.fs.open(checkpoint.path)) as raw:
            if key is None and detect(raw) is Kind.MINDSPORE_ENCRYPTED:
                yield None, manifest
                return
            reading = ReadOptions(key=key, allow_unsealed=allow_unsealed)
            yield (
                open_source(raw, path=str(checkpoint.path), options=reading, manifest=manifest),
                manifest,
            )


def _envelope(
    selected: Selected, opened: OpenCheckpoint | None, manifest: Manifest | None
) -> dict[str, Json]:
    from ckptmgr.crypto.records import sniff_mode
    from ckptmgr.formats.source import read_bytes

    store, checkpoint = selected.store, selected.checkpoint
    with contextlib.closing(store.fs.open(checkpoint.path)) as raw:
        cipher = sniff_mode(read_bytes(raw, 0, min(4, raw.size)))
        stored_bytes = raw.size
    is_known = opened is not None
    return {
        **render.checkpoint_json(checkpoint),
        "format": opened.format if opened is not None else checkpoint.format,
        "cipher": cipher,
        "stored_bytes": stored_bytes,
        "plaintext_bytes": opened.source.size if opened is not None else None,
        "has_manifest": manifest is not None,
        "digest": None if manifest is None else f"blake3:{manifest.file.digest.total.hex()}",
        "parents": [] if manifest is None else list(manifest.parent_run_ids),
        "stats": {} if manifest is None else dict(manifest.stats),
        "is_sealed": (opened.is_sealed if opened is not None else None) if cipher else False,
        "has_crc": opened.index.crc is not None if opened is not None else None,
        "crc": opened.index.crc if opened is not None else None,
        "metadata": opened.metadata if opened is not None else None,
        "is_content_shown": is_known,
    }


def _items(opened: OpenCheckpoint, pattern: str, *, has_stats: bool) -> Iterator[dict[str, Json]]:
    from ckptmgr.formats.mindspore_entries import TextEntry
    from ckptmgr.tensor_stats import stats_of
    from ckptmgr.verify import tensors_of

    for entry in opened.index.entries:
        if isinstance(entry, TextEntry) and fnmatch.fnmatchcase(entry.name, pattern):
            yield {"name": entry.name, "kind": "text", "text": entry.text}
    for name, tensor in tensors_of(opened):
        if not fnmatch.fnmatchcase(name, pattern):
            continue
        item: dict[str, Json] = {
            "name": name,
            "kind": "tensor",
            "dtype": tensor.spec.dtype.name,
            "shape": list(tensor.spec.shape),
            "size_bytes": tensor.spec.size_bytes,
        }
        if has_stats:
            stats = stats_of(opened.source, tensor)
            item["stats"] = {
                "min": stats.minimum,
                "max": stats.maximum,
                "mean": stats.mean,
                "nan_count": stats.nan_count,
                "inf_count": stats.inf_count,
            }
        yield item


def _print(
    output: Output,
    envelope: dict[str, Json],
    items: Sequence[dict[str, Json]],
    session: Session,
    *,
    has_stats: bool,
) -> None:
    for name, value in _facts(envelope):
        output.line(Cell(f"{name:<10}", "bold"), f" {value}")
    if not envelope["is_content_shown"]:
        output.line("tensors    not shown: the file is encrypted and no key was given")
        return
    tensors = [item for item in items if item["kind"] == "tensor"]
    if tensors:
        output.line()
        names = ("NAME", "DTYPE", "SHAPE", "SIZE")
        header = (*names, "MIN", "MAX", "MEAN", "NAN", "INF") if has_stats else names
        rows = [_row(item, has_stats=has_stats) for item in tensors]
        output.table(header, rows, right="SIZE MIN MAX MEAN NAN INF")
    for item in items:
        if item["kind"] == "text":
            text = str(item["text"])
            output.line(
                f"{item['name']} = {text[:_SHOWN_TEXT]!r}{'...' * (len(text) > _SHOWN_TEXT)}"
            )
    total = sum(item["size_bytes"] for item in tensors if isinstance(item["size_bytes"], int))
    output.line(f"{render.count(len(tensors), 'tensor')}, {render.size(total)}")


def _facts(envelope: dict[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the envelope."""
    yield "file", str(envelope["path"])
    yield (
        "state",
        " ".join(
            str(part)
            for part in (envelope["state"], envelope["problem"] and f"({envelope['problem']})")
            if part
        ),
    )
    yield (
        "step",
        f"{envelope['step']} of series {envelope['series']}, epoch {envelope['epoch'] or '-'}",
    )
    yield "saved", f"{envelope['saved_at']} ({envelope['why']})"
    yield "format", f"{envelope['format']}, {_crc(envelope)}"
    yield "size", _sizes(envelope)
    yield "cipher", _cipher(envelope)
    if envelope["digest"] is not None:
        yield "digest", str(envelope["digest"])
    if envelope["run"] is not None:
        yield "run", str(envelope["run"])
    metrics = envelope["metrics"]
    if isinstance(metrics, dict) and metrics:
        yield "metrics", " ".join(f"{k}={render.number(v)}" for k, v in sorted(metrics.items()))
    pins = envelope["pins"]
    if isinstance(pins, list):
        for pin in pins:
            yield "pinned", f"@{pin['name']} {pin['reason']}".rstrip()
    metadata = envelope["metadata"]
    if isinstance(metadata, dict):
        for name, value in metadata.items():
            yield "metadata", f"{name} = {value[:_SHOWN_TEXT]}"


def _crc(envelope: dict[str, Json]) -> str:
    if envelope["has_crc"] is None:
        return "CRC32 unknown without the key"
    return f"CRC32 {envelope['crc']:#010x} (not checked)" if envelope["has_crc"] else "no CRC32"


def _sizes(envelope: dict[str, Json]) -> str:
    stored, plain = envelope["stored_bytes"], envelope["plaintext_bytes"]
    text = f"{stored} bytes"
    return text if plain in (None, stored) else f"{text}, {plain} decrypted"


def _cipher(envelope: dict[str, Json]) -> str:
    if envelope["cipher"] is None:
        return "none"
    seal = {None: "seal unknown without the key", True: "sealed", False: "not sealed"}
    sealed = envelope["is_sealed"]
    key_id = f", key {envelope['key_id']}" if envelope["key_id"] is not None else ""
    return f"{envelope['cipher']}{key_id}, {seal[sealed if isinstance(sealed, bool) else None]}"


def _row(item: dict[str, Json], *, has_stats: bool) -> list[Cell]:
    shape, size_bytes, stats = item["shape"], item["size_bytes"], item.get("stats")
    dims = "x".join(map(str, shape)) if isinstance(shape, list) and shape else "scalar"
    size = render.size(size_bytes) if isinstance(size_bytes, int) else "-"
    row = [Cell(str(item["name"])), Cell(str(item["dtype"])), Cell(dims), Cell(size)]
    if has_stats and isinstance(stats, dict):
        row += [Cell(_figure(stats[name])) for name in ("min", "max", "mean")]
        row += [Cell(str(stats[name])) for name in ("nan_count", "inf_count")]
    return row


def _figure(value: Json) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "-"
