# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr config`: the settings that commands use, and where each comes from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import report_all
from ckptmgr.cli.render import Cell

_NOT_SHOWN = "(set, not shown)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A setting as a command would use it; `value` is None where nothing sets it."""

    name: str
    value: str | None
    origin: str


@options.command("config", examples=("config show runs/resnet50 --origin", "config show --json"))
@click.argument("action", type=click.Choice(["show"]), metavar="show")
@click.argument("directory", type=options.PATH, default=Path(), metavar="[DIR]")
@click.option("--origin", "has_origin", is_flag=True, help="Also where each value comes from.")
@options.output_options
@click.pass_context
def config_command(ctx: click.Context, action: str, directory: Path, has_origin: bool) -> int:
    """Show the settings that commands use for a directory, and with --origin where each is set.

    keep is the policy of prune and watch, from ckptmgr.toml in DIR, else the one that each run
    applied itself, which its newest checkpoint records; a flag such as --keep or --key comes before
    all of these. Keys are never shown, only where they are read from. -q prints the
    names of the settings that are set.
    """
    from ckptmgr.cli.foreign import check_directory

    del action  # the only one so far
    check_directory(directory)
    output = render.make_output(ctx, options.absolute(directory))
    keeps, refused = _keep(directory)
    found = [*keeps, *_others(os.environ)]
    if output.is_quiet:
        output.names([one.name.encode() for one in found if one.value is not None])
    elif output.is_text:
        header = ("SETTING", "VALUE", *(["ORIGIN"] * has_origin))
        rows = [
            [
                Cell(one.name),
                Cell(one.value or "-"),
                *([Cell(one.origin)] * has_origin),
            ]
            for one in found
        ]
        output.table(header, rows, right="")
    if output.has_fields:
        output.result([asdict(one) for one in found], {"count": len(found)})
    return report_all(refused, is_partial=True, as_json=output.is_json)


def _keep(directory: Path) -> tuple[list[_Setting], list[Exception]]:
    """Return the policies, and the errors of runs whose policy is refused."""
    from ckptmgr.cli.policy_file import policy_of, recorded_in

    written = policy_of(directory)
    found, refused = recorded_in(directory) if written is None else ([written], [])
    settings = [
        _Setting(name="keep", value=str(policy), origin=str(path)) for policy, path in found
    ]
    return settings or [_Setting(name="keep", value=None, origin="not set")], refused


def _others(environment: Mapping[str, str]) -> Iterator[_Setting]:
    yield _key(environment)
    for name, variable in (
        ("key_service", "CKPTMGR_KEY_SERVICE"),
        ("key_context", "CKPTMGR_KEY_CONTEXT"),
    ):
        yield _variable(name, variable, environment)
    yield _color(environment)


def _key(environment: Mapping[str, str]) -> _Setting:
    from ckptmgr.crypto.keys.trusted_files import shown_name

    path = environment.get("CKPTMGR_KEY_FILE")
    if path:
        value = f"file:{shown_name(path)}"
        return _Setting(name="key", value=value, origin="variable CKPTMGR_KEY_FILE")
    return _variable("key", "CKPTMGR_KEY", environment)


def _variable(name: str, variable: str, environment: Mapping[str, str]) -> _Setting:
    if not environment.get(variable):
        return _Setting(name=name, value=None, origin="not set")
    return _Setting(name=name, value=_NOT_SHOWN, origin=f"variable {variable}")


def _color(environment: Mapping[str, str]) -> _Setting:
    """Return when to colour, and the variable that decides, as `render.wants_color` does."""
    is_terminal = sys.stdout.isatty()
    decided = render.wants_color("auto", environment, is_terminal=is_terminal)
    origin = "default: on a terminal"
    if environment.get("NO_COLOR"):
        origin = "variable NO_COLOR"
    elif environment.get("FORCE_COLOR"):
        origin = "variable FORCE_COLOR"
    elif is_terminal and environment.get("TERM") == "dumb":
        origin = "variable TERM"
    return _Setting(name="color", value="yes" if decided else "no", origin=origin)
