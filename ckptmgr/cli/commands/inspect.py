# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr inspect`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, UsageProblem
from ckptmgr.cli.render import Cell, Output
from ckptmgr.core.names import OPAQUE
from ckptmgr.core.sizes import rate_text, size_text
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.files.load.inspection import FileSummary, PlaintextSummary, StoredTensor

_SHOWN_CHARACTERS = 60
_SHOWN_RANKS = 4
_FACT_WIDTH = 10
_OTHER = f"{OPAQUE}: no checkpoint, but any bytes; ckptmgr decrypt gives them back"
_FIGURES = ("MIN", "MAX", "MEAN", "NAN", "INF")


@options.command(
    "inspect",
    examples=(
        "inspect net-3_40.ckpt",
        "inspect latest --dir runs --stats --key file:k",
        "inspect s3://bucket/run/ckpt-1.ckpt",
    ),
)
@click.argument("checkpoint")
@options.place_dir_option
@options.series_option
@click.option(
    "--tensors", "pattern", metavar="PATTERN", default="*", help="Only these, e.g. 'fc*'."
)
@click.option(
    "--left-out", is_flag=True, help="Arrays that the objects of the state did not store."
)
@click.option("--stats", "has_stats", is_flag=True, help="Minimum, maximum, mean, NaN count.")
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def inspect_command(
    ctx: click.Context,
    checkpoint: str,
    directory: Path,
    series: str | None,
    pattern: str,
    left_out: bool,
    has_stats: bool,
    given_trust: key_options.GivenTrust,
) -> int:
    """Show the contents of a checkpoint.

    CHECKPOINT is a path, a URL, a step, latest, best:METRIC:min, best:METRIC:max, @pinned or id:DIGITS. The
    envelope of an encrypted file is shown without a key; its tensors need one. Only a key or --public-key
    proves the writer of the file. -q prints the names of the tensors.
    """
    from ckptmgr.cli.plain import as_plain, is_shown_as_plain, showing_opener
    from ckptmgr.cli.selectors import select_one
    from ckptmgr.files.load.inspection import inspect_file
    from ckptmgr.files.load.options import ReadOptions

    selected = select_one(
        checkpoint, directory, showing_opener(given_trust), series=series, takes_urls=True
    )
    contents = inspect_file(
        selected.store,
        selected.checkpoint,
        options=ReadOptions(trust=selected.store.trust),
        choose=lambda name: fnmatch.fnmatchcase(name, pattern),
        has_stats=has_stats,
    )
    if is_shown_as_plain(given_trust, selected.store):
        contents = replace(contents, checkpoint=as_plain(contents.checkpoint))
    output = render.make_output(ctx, selected.store.directory)
    if left_out:
        _show_left_out(output, contents)
    else:
        _show(output, contents, has_stats=has_stats)
    return Exit.DONE


def _show_left_out(output: Output, contents: FileSummary) -> None:
    """Show what objects of the state held, and the checkpoint has not."""
    from ckptmgr.files.load.state import SEEN, surroundings_in

    if contents.plain is None:
        raise UsageProblem(
            "--left-out: the file is encrypted, and no key was given",
            hint="pass --key: the list is encrypted as the state is",
        )
    seen = surroundings_in(contents.plain.metadata.get(SEEN))
    found = () if seen is None else seen.left_out
    if output.is_quiet:
        output.names([one.encode("utf-8", "surrogatepass") for one in found])
    elif output.is_text:
        for one in found:
            output.line(one)
        output.line(f"{render.counted(len(found), 'array')} of objects of the state not stored")
    if output.has_fields:
        output.result([], {**_summary(contents), "left_out": list(found)})


def _show(output: Output, contents: FileSummary, *, has_stats: bool) -> None:
    plain = contents.plain
    if output.is_quiet:
        tensors = () if plain is None else plain.tensors
        output.names([one.spec.name.encode("utf-8", "surrogatepass") for one in tensors])
    elif output.is_text:
        for name, value in _facts(contents):
            output.line(Cell(name.ljust(_FACT_WIDTH), "bold"), f" {value}")
        if plain is not None and plain.format != OPAQUE:
            _print_plain(output, plain, has_stats=has_stats)
    if output.has_fields:
        output.result([] if plain is None else _items(plain), _summary(contents))


def _summary(contents: FileSummary) -> dict[str, Json]:
    manifest, plain, cipher = contents.manifest, contents.plain, contents.cipher
    summary = {
        **render.checkpoint_json(contents.checkpoint),
        "cipher": cipher,
        "stored_bytes": contents.stored_bytes,
        "has_manifest": manifest is not None,
        "digest": None
        if manifest is None or manifest.shards
        else f"blake3:{manifest.file.digest.total.hex()}",
        "signed_by": None if manifest is None else manifest.signed_by,
        "policy": None if manifest is None else manifest.keep,
        "parents": [] if manifest is None else list(manifest.parent_run_ids),
        "stats": {} if manifest is None else dict(manifest.stats),
        "is_content_shown": plain is not None,
        "left_out": None,
        "plaintext_bytes": None if plain is None else plain.size_bytes,
        "compressed_bytes": None if plain is None else plain.compressed_bytes,
        "is_sealed": None if plain is None else plain.is_sealed,
        "crc": None if plain is None else plain.crc,
        "metadata": None if plain is None else dict(plain.metadata),
    }
    if plain is not None:
        summary["format"] = plain.format
    return summary


def _items(plain: PlaintextSummary) -> list[dict[str, Json]]:
    nothing: dict[str, Json] = dict.fromkeys(("dtype", "shape", "size_bytes", "ranks", "stats"))
    tensors: list[dict[str, Json]] = [_tensor_item(tensor) for tensor in plain.tensors]
    return tensors + [
        {"name": name, "kind": "text", **nothing, "text": text}
        for name, text in plain.texts.items()
    ]


def _tensor_item(tensor: StoredTensor) -> dict[str, Json]:
    stats = tensor.stats
    return {
        "name": tensor.spec.name,
        "kind": "tensor",
        "dtype": tensor.spec.dtype.name,
        "shape": tensor.spec.stated_shape,
        "size_bytes": tensor.spec.size_bytes,
        "ranks": None if tensor.ranks is None else list(tensor.ranks),
        "stats": None
        if stats is None
        else {
            "min": stats.minimum,
            "max": stats.maximum,
            "mean": stats.mean,
            "nan_count": stats.nan_count,
            "inf_count": stats.inf_count,
        },
        "text": None,
    }


def _print_plain(output: Output, plain: PlaintextSummary, *, has_stats: bool) -> None:
    output.line()
    if plain.tensors:
        figures = _FIGURES if has_stats else ()
        header = ("NAME", "DTYPE", "SHAPE", "SIZE", *figures)
        rows = [_row(tensor) for tensor in plain.tensors]
        output.table(header, rows, right=" ".join(("SIZE", *_FIGURES)))
    for name, text in plain.texts.items():
        output.line(f"{name} = {_cut(text)!r}")
    total = sum(tensor.spec.size_bytes for tensor in plain.tensors)
    output.line(f"{render.counted(len(plain.tensors), 'tensor')}, {size_text(total)}")


def _row(tensor: StoredTensor) -> list[Cell]:
    spec, stats = tensor.spec, tensor.stats
    texts = [
        spec.name + _whose(tensor.ranks),
        spec.dtype.name,
        "x".join(map(str, spec.stated_shape)) or "scalar",
        size_text(spec.size_bytes),
    ]
    if stats is not None:
        figures = (stats.minimum, stats.maximum, stats.mean)
        texts += ["-" if figure is None else f"{figure:.6g}" for figure in figures]
        texts += [str(stats.nan_count), str(stats.inf_count)]
    return [Cell(text) for text in texts]


def _whose(ranks: tuple[int, ...] | None) -> str:
    if ranks is None:
        return ""
    more = ", ..." if len(ranks) > _SHOWN_RANKS else ""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f" ({word} {', '.join(map(str, ranks[:_SHOWN_RANKS]))}{more})"


def _facts(contents: FileSummary) -> Iterator[tuple[str, str]]:
    """Yield the lines of the envelope."""
    checkpoint, manifest, plain = contents.checkpoint, contents.manifest, contents.plain
    problem = "" if checkpoint.problem is None else f" ({checkpoint.problem})"
    epoch = "-" if checkpoint.epoch is None else checkpoint.epoch
    yield "file", str(checkpoint.path)
    format = checkpoint.format if plain is None else plain.format
    is_checkpoint = format != OPAQUE
    if is_checkpoint:
        yield "state", f"{checkpoint.state.value}{problem}"
        yield "step", f"{render.step(checkpoint)} of series {checkpoint.series}, epoch {epoch}"
    yield "saved", f"{render.timestamp(checkpoint.saved_at)} ({checkpoint.why})"
    yield "format", f"{format}, {_crc(plain)}" if is_checkpoint else _OTHER
    decrypted = (
        "" if plain is None or contents.cipher is None else f", {plain.size_bytes} decrypted"
    )
    yield "size", f"{contents.stored_bytes} bytes{decrypted}"
    if plain is not None and plain.compressed_bytes is not None:
        yield "compressed", f"zstd, to {plain.compressed_bytes / plain.size_bytes:.1%}"
    yield "cipher", _cipher(contents)
    if len(checkpoint.opened_by) > 1 or (checkpoint.key_id is None and checkpoint.opened_by):
        yield "opens with", ", ".join(checkpoint.opened_by)
    if manifest is not None:
        if manifest.shards:
            yield "ranks", f"{len(manifest.shards)}, from {manifest.shards[0].name} on"
        else:
            yield "digest", f"blake3:{manifest.file.digest.total.hex()}"
        if manifest.signed_by is not None:
            yield "signed", f"by {manifest.signed_by}"
        yield "run", manifest.run_id or "-"
        if manifest.keep is not None:
            yield "policy", manifest.keep
        if manifest.stats.get("write_s"):
            yield "cost", ", ".join(_costs(manifest.stats, contents.stored_bytes))
    if checkpoint.health is not None:
        counted = 0 if manifest is None else int(manifest.stats.get("not_finite", 0))
        yield "health", f"{checkpoint.health} ({render.counted(counted, 'element')})"
    if checkpoint.metrics:
        metrics = sorted(checkpoint.metrics.items())
        yield "metrics", " ".join(f"{name}={render.number(value)}" for name, value in metrics)
    for pin in checkpoint.pins:
        yield "pinned", f"@{pin.name} {pin.reason}".rstrip()
    if checkpoint.tags:
        yield "tags", " ".join(checkpoint.tags)
    for name, value in ({} if plain is None else plain.metadata).items():
        yield "metadata", f"{name} = {_cut(value)!r}"
    if plain is None and is_checkpoint:
        yield "tensors", "not shown: the file is encrypted and no key was given"


def _costs(stats: Mapping[str, float], size_bytes: int) -> Iterator[str]:
    """Yield the cost of the save, as far as it was known when its manifest was written."""
    write_s = stats["write_s"]
    synced_s = max(write_s, stats.get("until_synced_s", write_s))
    yield f"written in {write_s:.3g} s"
    yield f"synced in {synced_s - write_s:.3g} s"
    yield rate_text(size_bytes / synced_s)
    if "stage_s" in stats:
        yield f"copied in {stats['stage_s']:.3g} s"
        yield f"training held up for {stats.get('blocked_s', 0.0):.3g} s"
        yield f"queued for {stats.get('queue_s', 0.0):.3g} s"
    memory_bytes = stats.get("buffer_bytes", 0.0) + stats.get("staging_bytes", 0.0)
    if memory_bytes:
        yield f"{size_text(int(memory_bytes))} of memory"


def _crc(plain: PlaintextSummary | None) -> str:
    if plain is None:
        return "CRC32 unknown without the key"
    return "no CRC32" if plain.crc is None else f"CRC32 {plain.crc:#010x} (see verify)"


def _cipher(contents: FileSummary) -> str:
    if contents.cipher is None:
        return "none"
    key_id = contents.checkpoint.key_id
    seal = "seal unknown without the key"
    if contents.plain is not None:
        seal = "sealed" if contents.plain.is_sealed else "not sealed"
    return f"{contents.cipher}, {seal}{'' if key_id is None else f', key {key_id}'}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
