# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr pin` and `ckptmgr unpin`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit
from ckptmgr.cli.mirrors import note_mirrors
from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.core.model import Pin

if TYPE_CHECKING:
    from ckptmgr.cli.selectors import OpenStore, Selected
    from ckptmgr.store.manifest.codec import Manifest

Change = Callable[[tuple[Pin, ...]], tuple[Pin, ...]]


@options.command(
    "pin", examples=("pin 40 --dir runs --reason 'paper, table 2'", "pin best:loss:min --name best")
)
@click.argument("checkpoint")
@click.option("--name", default="pinned", show_default=True, help="Name of the pin.")
@click.option("--reason", default="", help="Why; shown by prune.")
@options.dir_option
@options.series_option
@key_options.trust_options(has_signing_key=True)
@options.output_options
@click.pass_context
def pin_command(
    ctx: click.Context,
    checkpoint: str,
    name: str,
    reason: str,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Promise that a checkpoint is never pruned.

    CHECKPOINT is a path, a step, latest, best:METRIC:min, best:METRIC:max or id:DIGITS. A pin of the same name
    is replaced. An authenticated or signed manifest needs its key, which must have made the
    manifest. Not while a run writes the series.
    """

    def change(pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
        others = tuple(pin for pin in pins if pin.name != name)
        return (*others, Pin(name=name, reason=reason))

    opener = partial(options.open_store, trust=given_trust.load())
    selected = _selected(checkpoint, directory, series, opener)
    return _show(ctx, selected, _change(selected, change))


@options.command("unpin", examples=("unpin 40 --dir runs", "unpin @pinned --name best"))
@click.argument("checkpoint")
@click.option("--name", help="Only the pin of this name.  [default: all]")
@options.dir_option
@options.series_option
@key_options.trust_options(has_signing_key=True)
@options.output_options
@click.pass_context
def unpin_command(
    ctx: click.Context,
    checkpoint: str,
    name: str | None,
    directory: Path,
    series: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Take back the promise that a checkpoint is never pruned.

    CHECKPOINT is a path, a step, latest, best:METRIC:min, best:METRIC:max, @pinned or id:DIGITS.
    """

    def change(pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
        return () if name is None else tuple(pin for pin in pins if pin.name != name)

    opener = partial(options.open_store, trust=given_trust.load())
    selected = _selected(checkpoint, directory, series, opener)
    return _show(ctx, selected, _change(selected, change))


def _selected(text: str, directory: Path, series: str | None, opener: OpenStore) -> Selected:
    from ckptmgr.cli.selectors import select_one

    return select_one(text, directory, opener, series=series)


def _change(selected: Selected, change: Change) -> Manifest:
    """Change the pins under the leases: another process must not overwrite the file meanwhile."""
    from ckptmgr.store.change_leases import lease_of_checkpoint
    from ckptmgr.store.manifest.codec import files_of

    store, checkpoint = selected.store, selected.checkpoint
    with lease_of_checkpoint(store, checkpoint):
        if not (store.directory / files_of(checkpoint)[0]).exists():
            raise CheckpointNotFound("was removed meanwhile", path=checkpoint.path)
        return store.change_pins(checkpoint, change)


def _show(ctx: click.Context, selected: Selected, manifest: Manifest) -> int:
    note_mirrors([selected.store])
    checkpoint = manifest.to_checkpoint(selected.store.directory)
    output = render.make_output(ctx, selected.store.directory)
    if output.is_quiet:
        output.paths([checkpoint.path])
    elif output.is_text:
        pins = "; ".join(f"@{pin.name} {pin.reason}".rstrip() for pin in checkpoint.pins)
        output.line(f"{checkpoint.name}  step {checkpoint.step}  {pins or 'not pinned'}")
    if output.has_fields:
        output.result([render.checkpoint_json(checkpoint)], {"pins": len(checkpoint.pins)})
    return Exit.DONE
