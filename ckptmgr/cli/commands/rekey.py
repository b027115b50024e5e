# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr rekey` and `ckptmgr reencrypt`: plan everything, show it, ask, and change one by one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.exits import Exit, UsageProblem, code_of, note, report
from ckptmgr.cli.mirrors import note_mirrors
from ckptmgr.cli.render import Cell, Output
from ckptmgr.core.errors import CkptmgrError, KeyProblem, UnsafeWrite
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.cli.selectors import OpenStore, Selected
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.crypto.keys.ring import KeyRing
    from ckptmgr.maintenance.rekey import RekeyPlan
    from ckptmgr.maintenance.rekey_change import KeyChange
    from ckptmgr.store.store import Store

_TRASH_STAYS = (
    "is in the trash, and keeps its keys: give its key with --key, too, or empty the trash with "
    "ckptmgr prune --grace 0s"
)
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_Step = Callable[["Store", "Checkpoint", "KeyChange"], "RekeyPlan"]


class ChangeOptions(TypedDict):
    """Options that `rekey` and `reencrypt` share; the fields have the options' names."""

    selectors: tuple[str, ...]
    directory: Path
    series: str | None
    given_trust: key_options.GivenTrust
    dry_run: bool
    yes: bool


def plan_options(function: options.Command) -> options.Command:
    """Add the options of `ChangeOptions`, without those of the output."""
    for option in (
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing."),
        key_options.trust_options(has_signing_key=True),
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
@plan_options
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
    add: tuple[str, ...],
    remove: tuple[str, ...],
    **given: Unpack[ChangeOptions],
) -> int:
    """Change the keys that open checkpoints, without touching their data.

    Of containers (.ckpe) a few KiB are rewritten; an encrypted .ckpt, which has one key, is
    re-encrypted as a stream. Nothing is touched unless --key opens all of them. Doing the same
    again finishes an interrupted run; meanwhile each checkpoint opens with the old or the new key.
    Of a directory those in its trash are changed, too; its mirror is named, and not reached. A key
    to remove that opens none of them is named. Without --add and --remove, damaged header copies
    are mended. A reader with a removed key may have kept data keys of files: reencrypt makes new
    ones.
    """
    from ckptmgr.maintenance.rekey import plan_rekeying, rekey_checkpoint
    from ckptmgr.maintenance.rekey_change import KeyChange

    by_id = tuple(text for text in remove if _KEY_ID.fullmatch(text))
    change = KeyChange(
        keys=_old_keys(given["given_trust"].key_sources),
        add=_rings("--add", add, is_new=True),
        remove=_rings("--remove", [text for text in remove if text not in by_id]),
        remove_ids=by_id,
    )
    changes = KeyChanges(ctx, change, given)
    code = changes.run(plan_rekeying, rekey_checkpoint)
    if remove and changes.has_changed:
        note(
            "a reader with a removed key may have kept a data key; ckptmgr reencrypt makes new ones"
        )
    return code


@options.command(
    "reencrypt",
    examples=(
        "reencrypt runs/resnet50 --key file:old.key --to file:new.key",
        "reencrypt latest --key file:old.key --to file:alice.pem.pub --to passphrase:prompt:",
    ),
)
@plan_options
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
    ctx: click.Context, to: tuple[str, ...], **given: Unpack[ChangeOptions]
) -> int:
    """Encrypt checkpoints again, under new data keys.

    Each file is written once more, as a stream, without plaintext on the disk, and
    replaces the old one like a save; those of many ranks all at once. Old copies elsewhere still
    open with the old keys. Nothing is touched unless --key opens all of them, but for those that
    were encrypted for --to alone and never rekeyed: they are done.
    """
    from ckptmgr.maintenance.rekey import plan_reencryption, reencrypt_checkpoint
    from ckptmgr.maintenance.rekey_change import KeyChange

    change = KeyChange(
        keys=_old_keys(given["given_trust"].key_sources),
        add=_rings("--to", to, is_new=True),
        is_exclusive=True,
    )
    return KeyChanges(ctx, change, given).run(plan_reencryption, reencrypt_checkpoint)


def _old_keys(sources: Sequence[str]) -> KeyRing:
    from ckptmgr.crypto.keys.ring import ring_of

    keys = key_options.keys_of_command(sources)
    if keys is None:
        raise KeyProblem("a key is needed", hint="pass --key env:NAME, file:PATH or cmd:COMMAND")
    ring = ring_of(keys)
    if not ring.can_open:
        raise KeyProblem(
            "--key names a public key, which opens nothing", hint="give the private key"
        )
    return ring


def _rings(option: str, sources: Sequence[str], *, is_new: bool = False) -> tuple[KeyRing, ...]:
    from ckptmgr.crypto.keys.ring import ring_of

    return tuple(
        ring_of(key_options.keys_of_option(option, [source], is_new=is_new)) for source in sources
    )


def _opener(change: KeyChange, given: key_options.GivenTrust) -> OpenStore:
    from ckptmgr.maintenance.rekey import open_for_rekeying

    trust = given.with_keys(None)

    def opener(directory: Path) -> Store:
        return open_for_rekeying(options.absolute(directory), change, trust=trust)

    return opener


@dataclass(frozen=True, slots=True)
class _Planned:
    one: Selected
    plan: RekeyPlan


class KeyChanges:
    """Change of the keys of the selected checkpoints."""

    def __init__(self, ctx: click.Context, change: KeyChange, given: ChangeOptions) -> None:
        self._change = change
        self._given = given
        self._opener = _opener(change, given["given_trust"])
        root = options.absolute(given["directory"])
        self._output: Output = render.make_output(ctx, root)
        self._failures: list[Exception] = []
        self.has_changed = False

    def run(self, plan: _Step, act: _Step) -> int:
        """Show the plans, ask, and make the change; return the exit code.

        Raises:
            UsageProblem, CkptmgrError: It cannot be made; nothing was changed.
        """
        from ckptmgr.cli.selectors import root_of, select

        given = self._given
        selected = select(
            given["selectors"],
            given["directory"],
            self._opener,
            series=given["series"],
            with_trash=True,
        )
        self._output = replace(self._output, root=root_of(selected, given["directory"]))
        planned = [found for one in selected if (found := self._planned(one, plan)) is not None]
        pending = [found for found in planned if found.plan.is_pending]
        if planned:
            self._check_removals(planned, is_begun=len(pending) < len(planned))
        if self._output.is_text:
            self._print(planned)
        if not pending or given["dry_run"]:
            self._report(planned, done=[], is_dry_run=given["dry_run"])
            return self._code(done=0)
        if not (given["yes"] or self._agreed(len(pending))):
            note("nothing was changed")
            return Exit.NO
        done = [found.plan for found in pending if self._acted(found, act)]
        self.has_changed = bool(done)
        stores = (found.one.thrown_out_of or found.one.store for found in pending)
        note_mirrors(stores, are_keys=True)
        self._report(planned, done=done)
        return self._code(done=len(done))

    @staticmethod
    def _agreed(count: int) -> bool:
        question = f"Change the keys of {render.counted(count, 'checkpoint')}?"
        return options.confirm(question, refusal=UnsafeWrite)

    def _planned(self, one: Selected, plan: _Step) -> _Planned | None:
        try:
            with _held(one, is_changed=False):
                return _Planned(one, plan(one.store, one.checkpoint, self._change))
        except (KeyProblem, UnsafeWrite) as error:
            if one.thrown_out_of is None:
                raise  # before anything is touched
            self._failed(error)
            note(f"{one.checkpoint.name} {_TRASH_STAYS}")
            return None
        except (CkptmgrError, OSError) as error:
            self._failed(error)
            return None

    def _check_removals(self, planned: Sequence[_Planned], *, is_begun: bool) -> None:
        """Name the removed keys that had no slot; a passphrase may have been mistyped.

        Raises:
            UsageProblem: A passphrase opens no file, and no file was changed before.
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
            with (
                self._output.progress(one.checkpoint.name, one.checkpoint.size_bytes),
                _held(one, is_changed=True),
            ):
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
                    Cell(_name_of(found.one)),
                    Cell(found.plan.action.value),
                    Cell(", ".join(found.plan.before) or "-"),
                    Cell(", ".join(found.plan.after) or "-"),
                ]
                for found in planned
            ]
            output.table(("NAME", "ACTION", "OPENS NOW", "OPENS THEN"), rows, right="")

    def _report(
        self,
        planned: Sequence[_Planned],
        *,
        done: Sequence[RekeyPlan],
        is_dry_run: bool = False,
    ) -> None:
        output = self._output
        pending = sum(found.plan.is_pending for found in planned)
        if output.is_quiet:
            output.paths([plan.checkpoint.path for plan in done])
        elif output.is_text:
            failed = f", {len(self._failures)} failed" if self._failures else ""
            count, verb = (pending, "would change") if is_dry_run else (len(done), "changed")
            output.line(f"{render.counted(count, 'checkpoint')} {verb}{failed}")
        if output.has_fields:
            summary: dict[str, Json] = {
                "planned": pending,
                "done": len(done),
                "failed": len(self._failures),
            }
            output.result([_item(found.plan, found.plan in done) for found in planned], summary)


@contextlib.contextmanager
def _held(one: Selected, *, is_changed: bool) -> Iterator[None]:
    """Hold the folder of a checkpoint in the trash; no other process moves it during the change."""
    if one.thrown_out_of is None:
        yield
        return
    from ckptmgr.store.trash import held_listed
    from ckptmgr.store.trash_folder import TRASH_NAME

    with contextlib.ExitStack() as held:
        if is_changed:
            held.enter_context(one.thrown_out_of.lease(TRASH_NAME))
        held.enter_context(held_listed(one.store.fs, one.store.directory))
        yield


def _name_of(one: Selected) -> str:
    name = one.checkpoint.name
    return name if one.thrown_out_of is None else f"{name} (trash)"


def _item(plan: RekeyPlan, is_done: bool) -> dict[str, Json]:
    return {
        **render.checkpoint_json(plan.checkpoint),
        "action": plan.action.value,
        "before": list(plan.before),
        "after": list(plan.after),
        "is_done": is_done,
    }
