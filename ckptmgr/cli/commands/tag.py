# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr tag` and `ckptmgr untag`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, UsageProblem
from ckptmgr.cli.mirrors import note_mirrors
from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.crypto.keys.source_names import looks_like_key

Change = Callable[[tuple[str, ...]], tuple[str, ...]]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+=-]{0,63}")


@options.command(
    "tag", examples=("tag 4000 release-1 paper --dir runs", "tag best:loss:min --dir runs best")
)
@click.argument("checkpoint")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@options.dir_option
@options.series_option
@key_options.trust_options(has_signing_key=True)
@options.output_options
@click.pass_context
def tag_command(
    ctx: click.Context,
    checkpoint: str,
    names: tuple[str, ...],
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Add tags to a checkpoint, which ls shows and @tag:NAME finds.

    CHECKPOINT is a path, a step, latest, best:METRIC:min or best:METRIC:max. A tag keeps nothing by
    itself: pin does, or a policy with tagged(NAME). Tags are kept in the manifest, so an
    authenticated or signed one needs its key. Not while a run writes the series.
    """
    for name in names:
        _check_name(name)

    def change(tags: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*tags, *names)))

    return _tag(ctx, checkpoint, directory, series, given_trust, change)


@options.command("untag", examples=("untag 4000 paper --dir runs", "untag 4000 --all --dir runs"))
@click.argument("checkpoint")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "is_all", is_flag=True, help="Remove all tags.")
@options.dir_option
@options.series_option
@key_options.trust_options(has_signing_key=True)
@options.output_options
@click.pass_context
def untag_command(
    ctx: click.Context,
    checkpoint: str,
    names: tuple[str, ...],
    is_all: bool,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Remove tags from a checkpoint.

    CHECKPOINT is as for tag. A tag that it does not have is an error, and then nothing changes.
    """
    if bool(names) is is_all:
        raise UsageProblem("untag takes names, or --all", hint="ckptmgr ls shows the tags")
    for name in names:
        _check_name(name)

    def change(tags: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in tags:
                shown = ", ".join(tags) or "none"
                raise CheckpointNotFound(f"it has no tag {name!r}; its tags: {shown}")
        return () if is_all else tuple(tag for tag in tags if tag not in names)

    return _tag(ctx, checkpoint, directory, series, given_trust, change)


def _check_name(name: str) -> None:
    """Raise UsageProblem unless a tag may have this name; a key is not shown."""
    if looks_like_key(name):
        raise UsageProblem(
            "the name of a tag looks like a key (not shown)", hint="choose a short name"
        )
    if not _NAME.fullmatch(name):
        raise UsageProblem(
            f"{name[:40]!r} is no name of a tag",
            hint="use up to 64 letters, digits and . _ - / + =, the first a letter or digit",
        )


def _tag(
    ctx: click.Context,
    text: str,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
    change: Change,
) -> int:
    """Change the tags under the leases: another process must not overwrite the file meanwhile."""
    from ckptmgr.cli.selectors import select_one
    from ckptmgr.store.change_leases import lease_of_checkpoint
    from ckptmgr.store.manifest.codec import files_of

    opener = partial(options.open_store, trust=given_trust.load())
    selected = select_one(text, directory, opener, series=series)
    store, checkpoint = selected.store, selected.checkpoint
    with lease_of_checkpoint(store, checkpoint):
        if not (store.directory / files_of(checkpoint)[0]).exists():
            raise CheckpointNotFound("was removed meanwhile", path=checkpoint.path)
        manifest = store.change_manifest(
            checkpoint, lambda one: replace(one, tags=change(one.tags))
        )
    note_mirrors([store])
    changed = manifest.to_checkpoint(store.directory)
    output = render.make_output(ctx, store.directory)
    if output.is_quiet:
        output.paths([changed.path])
    elif output.is_text:
        output.line(
            f"{changed.name}  step {changed.step}  {' '.join(changed.tags) or 'not tagged'}"
        )
    if output.has_fields:
        output.result([render.checkpoint_json(changed)], {"tags": list(changed.tags)})
    return Exit.DONE
