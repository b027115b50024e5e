# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr storage probe`: guarantees of an object store."""

from __future__ import annotations

from pathlib import Path

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit, UsageProblem
from ckptmgr.cli.render import Cell


@options.command("storage", examples=("storage probe s3://bucket/run",))
@click.argument("action", type=click.Choice(["probe"]))
@click.argument("place", metavar="URL", type=options.PLACE)
@options.output_options
@click.pass_context
def storage_command(ctx: click.Context, action: str, place: Path) -> int:
    """Say what an object store guarantees, by trying it.

    Writes about 35 MiB below URL, in a folder of its own that is removed again. NEEDED is what
    uploads and removals rely on; without all of it the exit code is 1. Credentials, region and
    endpoint come from the environment (AWS_..., GOOGLE_..., AZURE_...). -q prints the names of the
    checks that failed.
    """
    del action  # the only one so far
    from ckptmgr.core.urls import is_url
    from ckptmgr.objects.requests import open_objects
    from ckptmgr.remote.probe import probe

    if not is_url(place):
        raise UsageProblem(
            "URL is no address of an object store", hint="write s3://bucket/run, gs:// or az://"
        )
    findings = probe(open_objects(str(place)))
    failed = [one for one in findings if one.is_ok is False]
    output = render.make_output(ctx, place)
    if output.is_quiet:
        output.names([one.check.encode() for one in failed])
    elif output.is_text:
        words = {True: "ok", False: "missing", None: "-"}
        rows = [[Cell(f.check), Cell(words[f.is_ok]), Cell(f.detail)] for f in findings]
        output.table(("CHECK", "NEEDED", "SEEN"), rows, right="")
    if output.has_fields:
        output.result(
            [{"check": f.check, "is_ok": f.is_ok, "detail": f.detail} for f in findings],
            {"is_ok": not failed, "failed": [one.check for one in failed]},
        )
    return Exit.NO if failed else Exit.DONE
