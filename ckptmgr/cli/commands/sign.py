# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr sign`."""

from __future__ import annotations

import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit
from ckptmgr.core.errors import CorruptCheckpoint, UnsafeWrite, UnsupportedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmgr.cli.selectors import Selected
    from ckptmgr.files.load.options import ReadOptions

_GOOD = ("ok", "unverified", "partial")


@options.command(
    "sign",
    examples=(
        "sign runs/resnet50 --private-key file:bundle.pem",
        "sign best:loss:min --dir runs --private-key file:bundle.pem",
    ),
)
@click.argument("checkpoint")
@click.option(
    "--private-key",
    "source",
    metavar="SOURCE",
    required=True,
    multiple=True,
    callback=options.only_one,
    help="Source of a private key on a NIST curve, in PEM: file:PATH, env:NAME, cmd:COMMAND or fd:N.",
)
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
@options.dir_option
@options.series_option
@key_options.trust_options()
@options.output_options
@click.pass_context
def sign_command(
    ctx: click.Context,
    checkpoint: str,
    source: str,
    force: bool,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Write an OpenSSF model-signing bundle, for tools that know those.

    CHECKPOINT is a directory, or names one checkpoint. It is verified first, and not signed if
    damaged. The bundle of a file is FILE.sig, that of a directory DIR/model.sig, and `model_signing
    verify key` accepts it. A run signs its manifests itself, with
    CheckpointConfig(signing_key=...). Needs ckptmgr[sign].
    """
    from ckptmgr.cli.selectors import select
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.integrations.openssf import bundle_path, sign_bundle
    from ckptmgr.io.permissions import note_mode
    from ckptmgr.parallel.mindspore.outputs import write_small_file

    key_options.check_source("--private-key", source)
    trust = given_trust.load()
    opener = partial(options.open_store, trust=trust)
    selected = select([checkpoint], directory, opener, series=series)
    path = _path(checkpoint, selected)
    target = bundle_path(path)
    if target.exists() and not force:
        raise UnsafeWrite("exists", path=target, hint="pass --force to replace it")
    root = options.absolute(path)
    output = render.make_output(ctx, root if root.is_dir() else root.parent)
    _check_whole(selected, ReadOptions(trust=trust))
    mode = stat.S_IMODE((target if target.exists() else path).stat().st_mode)
    mode = note_mode(mode & 0o666)
    write_small_file(target, sign_bundle(path, source), is_beside_checkpoint=True, mode=mode)
    if output.is_quiet:
        output.paths([target])
    elif output.is_text:
        output.line(f"{target}  signs {path.name}: {render.counted(len(selected), 'checkpoint')}")
    if output.has_fields:
        item = {"path": str(root), "bundle": str(options.absolute(target))}
        output.result([item], {"count": len(selected)})
    return Exit.DONE


def _path(text: str, selected: Sequence[Selected]) -> Path:
    """Return the file or directory to sign."""
    if Path(text).is_dir():
        return selected[0].store.directory
    checkpoint = selected[0].checkpoint
    if len(selected) > 1 or checkpoint.shards:
        raise UnsupportedCheckpoint(
            f"{text!r} is more than one file", hint="sign the directory that they lie in"
        )
    return checkpoint.path


def _check_whole(selected: Sequence[Selected], reading: ReadOptions) -> None:
    from ckptmgr.maintenance.verify import verify_checkpoint

    for one in selected:
        answer = verify_checkpoint(one.store, one.checkpoint, options=reading)
        if answer.status.value not in _GOOD:
            problem = "; ".join(answer.problems)
            raise CorruptCheckpoint(
                f"nothing was signed: this checkpoint is {answer.status.value}: {problem}",
                path=one.checkpoint.path,
                hint=answer.hint,
            )
