# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr repair`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit
from ckptmgr.cli.render import Output
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.maintenance.repair_source import RepairResult


@options.command("repair", examples=("repair runs/net-40.shards", "repair 40 --dir runs"))
@click.argument("checkpoint")
@options.dir_option
@options.series_option
@key_options.trust_options(has_signing_key=True, has_allowing=False)
@options.output_options
@click.pass_context
def repair_command(
    ctx: click.Context,
    checkpoint: str,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Repair damaged files of many ranks from the copies in the others.

    CHECKPOINT is a path, a step, latest, best:METRIC:min, best:METRIC:max, @pinned or id:DIGITS. Plain files
    become exactly the bytes that were saved. Encrypted and compressed ones are rewritten, and the
    manifest names the new file: that needs the key (all of them, where several open it; a public
    key will do), and of a signed one the signing key. Copies are there if the run kept them
    (keep_redundancy). Not while a run writes the series. -q prints the paths that stay damaged.
    """
    from ckptmgr.cli.selectors import select_one
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.maintenance.repair import repair_checkpoint

    trust = given_trust.load()
    opener = partial(options.open_store, trust=trust)
    selected = select_one(checkpoint, directory, opener, series=series)
    done = repair_checkpoint(selected.store, selected.checkpoint, options=ReadOptions(trust=trust))
    root = selected.store.directory
    output = render.make_output(ctx, root)
    return _show(output, selected.checkpoint, done, root)


def _show(output: Output, checkpoint: Checkpoint, done: Sequence[RepairResult], root: Path) -> int:
    left = [one for one in done if one.problem is not None]
    if output.is_quiet:
        output.paths([root / one.name for one in left])
    elif output.is_text:
        for one in done:
            if one.problem is None:
                output.line(f"repaired {one.name} from {', '.join(one.sources)}")
            else:
                output.line(f"not repaired: {one.name}: {one.problem}")
        if not left:
            output.line(f"{checkpoint.name}: all files are as they were saved")
    if output.has_fields:
        output.result(
            [_item(one) for one in done], {"repaired": len(done) - len(left), "damaged": len(left)}
        )
    if not left:
        return Exit.DONE
    return Exit.NO if len(left) == len(done) else Exit.PARTLY


def _item(one: RepairResult) -> dict[str, Json]:
    return {
        "name": one.name,
        "repaired": one.problem is None,
        "bad_bytes": one.bad_bytes,
        "sources": list(one.sources),
        "problem": one.problem,
    }
