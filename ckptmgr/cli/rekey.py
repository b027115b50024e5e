# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr rekey` and `ckptmgr reencrypt`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit, UsageProblem, code_of, note, report
from ckptmgr.cli.render import Cell, Json, Output
from ckptmgr.errors import CkptmgrError, KeyProblem, UnsafeWrite

if TYPE_CHECKING:
    from ckptmgr.cli.select import OpenStore, Selected
    from ckptmgr.crypto.keyring import KeyRing
    from ckptmgr.model import Checkpoint
    from ckptmgr.rekey import Rekeying
    from ckptmgr.rekey_header import KeyChange
    from ckptmgr.store import Store

_KEY_ID = re.compile(r"[0-9a-f]{16}")
_Step = Callable[["Store", "Checkpoint", "KeyChange"], "Rekeying"]


def _plan_options(function: options.Command) -> options.Command:
    for option in (
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing."),
        options.signing_key_option,
        options.key_options,
        options.series_option,
        options.dir_option,
    ):
        function = option(function)
    return click.argument("selectors", nargs=-1, metavar="[SEL]...")(function)


@options.command(
    "rekey",
    examples=(
        "rekey runs/resnet50 --key file:old.key --add file:new.key --remove file:old.key",
        "rekey runs/resnet50 --key file:run.key --add file:alice.pem.pub --add passphrase:prompt:",
        "rekey latest --key file:run.key --remove 0011223344556677",
    ),
)
@_plan_options
@click.option(
    "--add",
    metavar="SOURCE",
    multiple=True,
    help="Who opens it from now on: a key, passphrase:SOURCE, or a file of a public key. May be repeated.",
)
@click.option(
    "--remove",
    metavar="KEYID|SOURCE",
    multiple=True,
    help="Who opens it no longer, by the id of a key or by source. May be repeated.",
)
@options.output_options
@click.pass_context
def rekey_command(
    ctx: click.Context,
    selectors: tuple[str, ...],
    directory: Path,
    series: str | None,
    key_sources: tuple[str, ...],
    allow_unsealed: bool,
    signing_source: str | None,
    dry_run: bool,
    yes: bool,
    add: tuple[str, ...],
    remove: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> int:
    """Change who may open checkpoints, without touching their data.

    Of containers (.ckpe) a few KiB are rewritten; an encrypted .ckpt, which has one key, is encrypted anew as a stream.
    Nothing is touched unless --key opens all of them. What is done already stays, so an interrupted run is finished by doing
    the same again; meanwhile each checkpoint opens with the old or the new key. Who is to be removed and opens none of them is
    named. Without --add and --remove, damaged header copies are mended. Whoever opened a file before may have kept its data
    key: reencrypt gives it a new one.
    """
    from ckptmgr.rekey import plan_rekeying, rekey_checkpoint
    from ckptmgr.rekey_header import KeyChange

    by_id = tuple(text for text in remove if _KEY_ID.fullmatch(text))
    change = KeyChange(
        keys=_old_keys(key_sources),
        add=_rings("--add", add, is_new=True),
        remove=_rings("--remove", [text for text in remove if text not in by_id]),
        remove_ids=by_id,
    )
    opener = _opener(change, signing_source, allow_unsealed=allow_unsealed)
    run = _Run(ctx, change, directory, opener, as_json=as_json, quiet=quiet)
    code = run.run(
        selectors, series, plan_rekeying, rekey_checkpoint, is_dry=dry_run, has_consent=yes
    )
    if remove and run.has_changed:
        note(
            "whoever opened them before may have kept a data key; ckptmgr reencrypt makes new ones"
        )
    return code


@options.command(
    "reencrypt",
    examples=(
        "reencrypt runs/resnet50 --key file:old.key --to file:new.key",
        "reencrypt latest --key file:old.key --to file:alice.pem.pub --to passphrase:prompt:",
    ),
)
@_plan_options
@click.option(
    "--to",
    metavar="SOURCE",
    multiple=True,
    required=True,
    help="Who opens it then, and nobody else: as --add of rekey. May be repeated.",
)
@options.output_options
@click.pass_context
def reencrypt_command(
    ctx: click.Context,
    selectors: tuple[str, ...],
    directory: Path,
    series: str | None,
    key_sources: tuple[str, ...],
    allow_unsealed: bool,
    signing_source: str | None,
    dry_run: bool,
    yes: bool,
    to: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> int:
    """Encrypt checkpoints anew, under new data keys.

    Each file is written once more, as a stream, without plaintext on the disk, and takes the place of the old one like a save;
    those of many ranks all at once. Old copies elsewhere still open with the old keys. Nothing is touched unless --key opens
    all of them, but for those that were encrypted for --to alone and never rekeyed: they are done.
    """
    from ckptmgr.rekey import plan_reencryption, reencrypt_checkpoint
    from ckptmgr.rekey_header import KeyChange

    change = KeyChange(
        keys=_old_keys(key_sources), add=_rings("--to", to, is_new=True), is_only=True
    )
    opener = _opener(change, signing_source, allow_unsealed=allow_unsealed)
    run = _Run(ctx, change, directory, opener, as_json=as_json, quiet=quiet)
    return run.run(
        selectors,
        series,
        plan_reencryption,
        reencrypt_checkpoint,
        is_dry=dry_run,
        has_consent=yes,
    )


def _old_keys(sources: Sequence[str]) -> KeyRing:
    from ckptmgr.crypto.keyring import ring_of

    keys = options.load_key(sources)
    if keys is None:
        raise KeyProblem("a key is needed", hint="pass --key env:NAME, file:PATH or cmd:COMMAND")
    ring = ring_of(keys)
    if not ring.can_open:
        raise KeyProblem(
            "--key names a public key, which opens nothing", hint="give the private key"
        )
    return ring


def _rings(option: str, sources: Sequence[str], *, is_new: bool = False) -> tuple[KeyRing, ...]:
    from ckptmgr.crypto.keyring import ring_of

    return tuple(ring_of(options.load_keys(option, [source], is_new=is_new)) for source in sources)


def _opener(change: KeyChange, signing_source: str | None, *, allow_unsealed: bool) -> OpenStore:
    from ckptmgr.rekey import open_for_rekeying

    signing_key = options.load_signing_key(signing_source)

    def opener(directory: Path) -> Store:
        absolute = Path(os.path.abspath(directory))  # noqa: PTH100 - resolve() would follow links
        return open_for_rekeying(
            absolute, change, signing_key=signing_key, allow_unsealed=allow_unsealed
        )

    return opener


@dataclass(frozen=True, slots=True)
class _Planned:
    one: Selected
    plan: Rekeying


class _Run:
    """Plan everything, show it, ask, and carry it out one by one."""

    def __init__(
        self,
        ctx: click.Context,
        change: KeyChange,
        directory: Path,
        opener: OpenStore,
        *,
        as_json: bool,
        quiet: bool,
    ) -> None:
        self._change = change
        self._opener = opener
        self._directory = directory
        root = Path(os.path.abspath(directory))  # noqa: PTH100 - resolve() would follow links
        self._output: Output = render.make_output(ctx, root, as_json=as_json, quiet=quiet)
        self._failures: list[Exception] = []
        self.has_changed = False

    def run(
        self,
        selectors: Sequence[str],
        series: str | None,
        plan: _Step,
        act: _Step,
        *,
        is_dry: bool,
        has_consent: bool,
    ) -> int:
        from ckptmgr.cli.select import select

        selected = select(selectors, self._directory, self._opener, series=series)
        planned = [found for one in selected if (found := self._planned(one, plan)) is not None]
        pending = [found for found in planned if found.plan.is_pending]
        if planned:
            self._check_removals(planned, is_begun=len(pending) < len(planned))
        if self._output.is_text:
            self._print(planned)
        if not pending or is_dry:
            self._report(planned, done=[])
            return self._code(done=0)
        if not (has_consent or _agreed(len(pending))):
            note("nothing was changed")
            return Exit.NO
        done = [found.plan for found in pending if self._acted(found, act)]
        self.has_changed = bool(done)
        self._report(planned, done=done)
        return self._code(done=len(done))

    def _planned(self, one: Selected, plan: _Step) -> _Planned | None:
        try:
            return _Planned(one, plan(one.store, one.checkpoint, self._change))
        except (KeyProblem, UnsafeWrite):
            raise  # before anything is touched
        except (CkptmgrError, OSError) as error:
            self._failed(error)
            return None

    def _check_removals(self, planned: Sequence[_Planned], *, is_begun: bool) -> None:
        """Say who is to be removed and was nowhere; a passphrase may have been mistyped.

        Raises:
            UsageProblem: It opens nothing, and nothing says that it was removed before.
        """
        found = {removal for one in planned for removal in one.plan.removals}
        for removal in self._change.removals:
            if removal in found:
                continue
            if isinstance(removal, str):
                note(f"--remove {removal}: none of them opens with this key")
            elif removal.key_ids or (is_begun and self._change.add):
                note(f"--remove ({', '.join(removal.labels)}): opens none of them")
            else:
                raise UsageProblem(
                    "the passphrase of --remove opens none of them; nothing was changed",
                    hint="try again; if it was removed before, nothing is left to do",
                )

    def _acted(self, found: _Planned, act: _Step) -> bool:
        one = found.one
        try:
            with self._output.progress(one.checkpoint.name, one.checkpoint.size_bytes):
                act(one.store, one.checkpoint, self._change)
        except (CkptmgrError, OSError) as error:
            self._failed(error)
            return False
        return True

    def _failed(self, error: Exception) -> None:
        self._failures.append(error)
        report(error, as_json=self._output.is_json)

    def _code(self, *, done: int) -> int:
        if not self._failures:
            return Exit.DONE
        return Exit.PARTLY if done else code_of(self._failures[0])

    def _print(self, planned: Sequence[_Planned]) -> None:
        output = self._output
        if planned:
            rows = [
                [
                    Cell(found.plan.checkpoint.name),
                    Cell(found.plan.action.value),
                    Cell(", ".join(found.plan.before) or "-"),
                    Cell(", ".join(found.plan.after) or "-"),
                ]
                for found in planned
            ]
            output.table(("NAME", "ACTION", "OPENS NOW", "OPENS THEN"), rows, right="")

    def _report(self, planned: Sequence[_Planned], *, done: Sequence[Rekeying]) -> None:
        output = self._output
        if output.is_json:
            summary: dict[str, Json] = {
                "planned": sum(found.plan.is_pending for found in planned),
                "done": len(done),
                "failed": len(self._failures),
            }
            output.result([_item(found.plan, found.plan in done) for found in planned], summary)
        elif output.is_quiet:
            output.paths([plan.checkpoint.path for plan in done])
        else:
            failed = f", {len(self._failures)} failed" if self._failures else ""
            output.line(f"{render.count(len(done), 'checkpoint')} changed{failed}")


def _item(plan: Rekeying, is_done: bool) -> dict[str, Json]:
    return {
        **render.checkpoint_json(plan.checkpoint),
        "action": plan.action.value,
        "before": list(plan.before),
        "after": list(plan.after),
        "is_done": is_done,
    }


def _agreed(count: int) -> bool:
    """Ask the person at the terminal.

    Raises:
        UnsafeWrite: There is none.
    """
    if not sys.stdin.isatty():
        raise UnsafeWrite(
            "nobody can be asked here, so nothing was changed",
            hint="look at the plan (--dry-run), then pass --yes",
        )
    return click.confirm(f"Change the keys of {render.count(count, 'checkpoint')}?", err=True)
