# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr copy`: checkpoints to an object store, or from one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, UsageProblem, code_of, report
from ckptmgr.cli.render import Output
from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError, UnsafeWrite
from ckptmgr.core.sizes import size_text
from ckptmgr.core.urls import is_url
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.cli.selectors import Selected
    from ckptmgr.core.trust import Trust


_SAID = {"copied": "", "updated": ", brought up to date", "present": ", was there already"}


class _Copied(NamedTuple):
    selected: Selected
    target: Path
    outcome: Literal["copied", "updated", "present"]


@options.command(
    "copy",
    examples=(
        "copy latest s3://bucket/run --dir runs/a",
        "copy runs/a s3://bucket/run",
        "copy s3://bucket/run runs/a",
        "copy latest runs/a --dir s3://bucket/run",
    ),
)
@click.argument("selector", metavar="SEL")
@click.argument("target", metavar="TARGET", type=options.PLACE)
@options.place_dir_option
@options.series_option
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def copy_command(
    ctx: click.Context,
    selector: str,
    target: Path,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Copy checkpoints to an object store, or from one.

    SEL is a path, a step, latest, best:METRIC:min, best:METRIC:max, @pinned, id:DIGITS or 1000..5000; a
    directory or a URL means all in it. Either SEL (or --dir) or TARGET is a URL: s3://bucket/run,
    gs://bucket/run or az://container/run. Every byte is compared with the digests; encrypted
    files stay encrypted, and need no key. A checkpoint is there whole or not at all. What is there
    already stays, so doing the same again finishes an interrupted copy; keys (to an object store
    only), pins, tags and metrics that were changed since are brought up to date. -q prints the
    copies.
    """
    from ckptmgr.cli.selectors import select

    trust = given_trust.load()
    is_download = is_url(selector) or is_url(directory)
    if is_download == is_url(target):
        raise UsageProblem(
            "copy goes from a directory to an object store, or back",
            hint="between two stores, copy by way of a directory; cp copies between directories"
            if is_download
            else "give a URL, such as s3://bucket/run; cp copies between directories",
        )
    if not target.is_dir():
        options.check_is_run(target)
    output = render.make_output(ctx, options.absolute(target))
    upload, download = (
        partial(_upload, target=target),
        partial(_download, target=target, trust=trust),
    )
    copy: Callable[[Selected], _Copied] = download if is_download else upload
    opener = partial(options.open_store, trust=trust)
    selected = select([selector], directory, opener, series=series, takes_urls=True)
    failures: list[Exception] = []
    started = time.perf_counter()
    done = [
        one for one in (_copied(output, copy, one, failures) for one in selected) if one is not None
    ]
    _show(output, done, failed=len(failures), elapsed_s=time.perf_counter() - started)
    if not failures:
        return Exit.DONE
    return Exit.PARTLY if done else code_of(failures[0])


def _copied(
    output: Output,
    copy: Callable[[Selected], _Copied],
    one: Selected,
    failures: list[Exception],
) -> _Copied | None:
    checkpoint = one.checkpoint
    try:
        with output.progress(checkpoint.name, checkpoint.size_bytes):
            done = copy(one)
    except (CkptmgrError, OSError) as error:
        failures.append(error)
        report(error, as_json=output.is_json)
        return None
    if output.is_text:
        arrow = "→" if output.has_unicode else "->"
        what = f"{checkpoint.path} {arrow} {done.target}  {size_text(checkpoint.size_bytes)}"
        output.line(what + _SAID[done.outcome])
    return done


def _upload(one: Selected, *, target: Path) -> _Copied:
    from ckptmgr.core.shard_names import is_checkpoint_name
    from ckptmgr.objects.directory import RemoteDirectory, Uploaded
    from ckptmgr.objects.requests import open_objects

    if one.checkpoint.is_bare:
        raise CheckpointNotFound(
            "has no manifest, without which an object store holds no checkpoint",
            path=one.checkpoint.path,
            hint="upload the file itself with the tool of the store",
        )
    if not is_checkpoint_name(one.checkpoint.name):
        raise UnsafeWrite(
            "no checkpoint of a directory or prefix has such a name, so no copy of it would be listed",
            path=one.checkpoint.path,
            hint="rename it before it is saved, or save it there: save_state(state, URL)",
        )
    directory = RemoteDirectory(open_objects(str(target)), clock=time.time)
    uploaded = directory.upload(one.store, one.checkpoint.name)
    outcome: Literal["copied", "updated", "present"] = "present"
    if uploaded is not Uploaded.PRESENT:
        outcome = "copied" if uploaded is Uploaded.NEW else "updated"
    return _Copied(one, target / one.checkpoint.name, outcome)


def _download(one: Selected, *, target: Path, trust: Trust) -> _Copied:
    from ckptmgr.objects.directory import RemoteDirectory
    from ckptmgr.objects.requests import open_objects
    from ckptmgr.remote.download import download

    there = RemoteDirectory(open_objects(str(one.store.directory)), clock=time.time)
    here = options.open_store(target, trust=trust)
    path = here.directory / one.checkpoint.name
    before = here.look(path.name)
    is_new = before is None and not path.exists()
    with here.lease(one.checkpoint.series):
        after = download(there, one.checkpoint.name, here)
    return _Copied(one, path, "copied" if is_new else "present" if before == after else "updated")


def _show(output: Output, done: Sequence[_Copied], *, failed: int, elapsed_s: float) -> None:
    if output.is_quiet:
        output.paths([one.target for one in done])
    if output.has_fields:
        items: list[dict[str, Json]] = [
            {
                **render.checkpoint_json(one.selected.checkpoint),
                "target": str(options.absolute(one.target)),
                "outcome": one.outcome,
            }
            for one in done
        ]
        new = [one.selected.checkpoint.size_bytes for one in done if one.outcome == "copied"]
        updated = sum(one.outcome == "updated" for one in done)
        summary: dict[str, Json] = {
            "copied": len(new),
            "updated": updated,
            "present": len(done) - len(new) - updated,
            "failed": failed,
            "size_bytes": sum(new),
            "elapsed_s": elapsed_s,
        }
        output.result(items, summary)
