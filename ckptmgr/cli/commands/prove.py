# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr prove`: whether a program goes on bit for bit where it is cut."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit, Trouble, UsageProblem
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.training.prove import Prover, Run

_OF_THE_RUN = ("ckptmgr.data", "ckptmgr.seen")
"""Texts beside the state: the places of loaders, and the facts that a resumption compares."""
_MOST_SHOWN = 5


@options.command(
    "prove",
    examples=(
        "prove -- python train.py --out {}",
        "prove --cuts 20 --seed 7 -- python train.py --out {} --steps 300",
    ),
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--cuts", type=click.IntRange(min=1), default=8, show_default=True, help="How often it is cut."
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Chooses the steps.  [default: random, and printed]"
)
@click.option(
    "--dir",
    "directory",
    type=options.PATH,
    help="A new directory for the runs, which stays.  [default: a temporary one]",
)
@options.output_options
@click.pass_context
def prove_command(
    ctx: click.Context,
    program: tuple[str, ...],
    cuts: int,
    seed: int | None,
    directory: Path | None,
) -> int:
    """Prove that a program goes on bit for bit where it is cut: exit 0 if it does, 1 if not.

    PROGRAM is a command and its arguments, in which {} stands for the directory of the run; write -- before it.
    It runs once to its end. Then, for each cut, it runs in another directory, is killed after a random
    step, and runs again to the end. The steps that the runs have recorded are compared with those of
    the uncut one, and the newest checkpoints by names and bytes. What differs is named, with the first
    step. -q prints the steps of the cuts after which something differs.
    """
    from ckptmgr.training.prove import PLACEHOLDER, ProgramFailed, Prover, cuts_of

    if not any(PLACEHOLDER in one for one in program):
        raise UsageProblem(
            "the program is not given its directory", hint="write {} for it: -- python train.py {}"
        )
    if directory is not None and directory.exists():
        raise UsageProblem(f"{directory} exists", hint="name a directory that does not")
    chosen = secrets.randbelow(1 << 32) if seed is None else seed
    prover = Prover(program)
    with _folder(directory) as folder:
        output = render.make_output(ctx, folder)
        try:
            uncut = prover.uncut(folder / "uncut")
            if output.is_text:
                steps = render.counted(len(uncut.recorded.records), "recorded step")
                output.line(f"uncut    {uncut.newest.name}, {steps}; --seed {chosen}")
            items = []
            for step in cuts_of(uncut, cuts, chosen):
                items.append(_proven(prover, uncut, folder / f"cut-{step}", step))
                _show(output, items[-1])
        except ProgramFailed as error:
            raise Trouble(error) from error
    differing = [one for one in items if not one["is_equal"]]
    if output.is_quiet:
        output.names([str(one["step"]).encode() for one in differing])
    if output.has_fields:
        summary: dict[str, Json] = {
            "program": list(program),
            "seed": chosen,
            "cuts": len(items),
            "different": len(differing),
        }
        output.result(items, summary)
    return Exit.NO if differing else Exit.DONE


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True)
        yield given.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="ckptmgr-prove-") as name:
        yield Path(name)


def _proven(prover: Prover, uncut: Run, directory: Path, step: int) -> dict[str, Json]:
    """Return the result of a cut after a step."""
    from ckptmgr.training.prove import compared

    prover.cut(directory, step)
    resumed = prover.resumed(directory)
    if isinstance(resumed, str):
        found: tuple[int, str | None, list[str]] = 0, f"the resumed run failed: {resumed}", []
    else:
        steps = compared(uncut, resumed)
        found = steps.equal, steps.difference, _other_names(uncut, resumed)
    equal, difference, state = found
    return {
        "step": step,
        "is_equal": difference is None and not state,
        "equal_steps": equal,
        "difference": difference,
        "state": list[Json](state),
    }


def _other_names(uncut: Run, resumed: Run) -> list[str]:
    """Return the names of the tensors and values that differ in the newest checkpoints."""
    from ckptmgr.core.trust import DEFAULT_TRUST
    from ckptmgr.files.load.options import ReadOptions
    from ckptmgr.maintenance.diff import Change, Input, compare
    from ckptmgr.maintenance.diff_elements import Tolerance

    one, other = (
        Input(store=run.store, checkpoint=run.newest, options=ReadOptions(trust=DEFAULT_TRUST))
        for run in (uncut, resumed)
    )
    if uncut.newest.step != resumed.newest.step:
        return [f"step {resumed.newest.step} in place of {uncut.newest.step}"]
    try:
        found = compare(one, other, Tolerance(atol=0.0, rtol=0.0))
    except CkptmgrError as error:
        raise Trouble(error) from error
    tensors = [tensor.name for tensor in found.tensors if tensor.change is not Change.SAME]
    return tensors + [value.name for value in found.values if value.name not in _OF_THE_RUN]


def _show(output: render.Output, item: dict[str, Json]) -> None:
    if not output.is_text:
        return
    state = item["state"]
    assert isinstance(state, list)  # noqa: S101
    if item["is_equal"]:
        steps = render.counted(int(str(item["equal_steps"])), "step")
        output.line(f"equal    cut after step {item['step']}: {steps} and the state at the end")
        return
    more = f" and {len(state) - _MOST_SHOWN} more" if len(state) > _MOST_SHOWN else ""
    at_end = f"at the end: {', '.join(map(str, state[:_MOST_SHOWN]))}{more}" if state else None
    what = "; ".join(str(one) for one in (item["difference"], at_end) if one is not None)
    output.line(render.Cell("differs", "red"), f"  cut after step {item['step']}: {what}")
