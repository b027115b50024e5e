# SPDX-License-Identifier: Apache-2.0
"""Commands, the options that several of them share, and their values: paths, output, clock, store."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckptmgr.cli.exits import EPILOG, UsageProblem, is_misplaced_key, to_stderr
from ckptmgr.cli.layout import wrapped_help
from ckptmgr.core import names as of_names
from ckptmgr.core.errors import UnsafePrune, UnsafeWrite
from ckptmgr.core.place import Capabilities, refusal_at
from ckptmgr.core.urls import is_url, refuse_unexpanded

if TYPE_CHECKING:
    from ckptmgr.core.trust import Trust
    from ckptmgr.store.store import Store

Command = TypeVar("Command", bound=Callable[..., object])

_NOT_CHANGED = "a manifest there is never changed: give the name in the directory of the run, before the upload"
_AT_ADDRESSES = {
    "doctor": "ckptmgr storage probe URL tries what a store guarantees",
    "pin": _NOT_CHANGED,
    "report": "ckptmgr ls URL lists what is there",
    "simulate": "ckptmgr prune URL --keep EXPR --dry-run shows what a policy keeps there",
    "stats": "ckptmgr ls URL lists what is there",
    "tag": _NOT_CHANGED,
    "unpin": _NOT_CHANGED,
    "untag": _NOT_CHANGED,
    "watch": "watch the directory of the run, with --mirror URL",
}
"""What does the work of a command at an address, where it takes paths only."""
COMPLETION_VARIABLE = "_CKPTMGR_COMPLETE"
"""Set by the script of a shell that asks for completions; click reads it."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def check_path(text: object) -> None:
    """Raise UsageProblem for an empty path, an address, or a key in place of a path, not shown.

    A shell makes an empty path of an unset variable, and it would mean the working directory.
    """
    check_place(text)
    if is_url(text):
        context = click.get_current_context(silent=True)
        instead = _AT_ADDRESSES.get("" if context is None else context.info_name or "")
        fetch = "fetch the checkpoint first: ckptmgr copy URL DIR"
        raise UsageProblem(
            "this command takes paths, and no address of an object store",
            hint=fetch if instead is None else f"{instead}; or {fetch}",
        )


def check_place(text: object) -> None:
    """Raise UsageProblem for text that is neither a path nor an address; see `check_path`."""
    if text == "":
        raise UsageProblem("a path is empty", hint="write . for this directory")
    if isinstance(text, str) and is_misplaced_key(text):
        raise UsageProblem(
            "a path looks like a key (not shown)",
            hint="a key comes by --key env:NAME or file:PATH, and one that was on a command line is no secret any more; "
            "write ./NAME for a file of such a name",
        )
    try:
        refuse_unexpanded(text)
    except ValueError as error:
        raise UsageProblem(
            str(error), hint="write the whole path, or let the shell expand it"
        ) from None


def check_is_run(place: Path) -> None:
    """Raise UsageProblem for the path or address of a checkpoint, where that of a run is wanted."""
    try:
        of_names.check_is_run(place)
    except ValueError as error:
        raise UsageProblem(str(error), hint="name the directory or address of the run") from None


class _Path(click.Path):
    """A path of the disk; with `takes_urls` also the address of an object store."""

    def __init__(self, *, takes_urls: bool = False, readable: bool = True) -> None:
        super().__init__(path_type=Path, readable=readable)
        self._takes_urls = takes_urls

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        if self._takes_urls:
            check_place(value)
        else:
            check_path(value)  # refuses addresses
        if not is_url(value):
            return super().convert(value, param, ctx)
        from ckptmgr.objects.paths import UrlPath

        return UrlPath(checked_address(os.fspath(value)))


def checked_address(text: str) -> str:
    """Return the address of an object store; raise UsageProblem for another one."""
    from ckptmgr.objects.requests import checked_url

    try:
        return checked_url(text)
    except ValueError as error:
        raise UsageProblem(str(error), hint="see docs/object-stores.md") from None


PATH = _Path()
ONE_OF_SEVERAL = _Path(readable=False)
"""A path that the command names if it cannot be read, and goes on."""
PLACE = _Path(takes_urls=True)
"""A path, or the address of an object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Surroundings of a command. With `is_debug` errors come with a traceback."""

    clock: Callable[[], float] = time.time
    is_debug: bool = False
    color: str = "auto"

    def now(self) -> datetime:
        """Return the present time, UTC."""
        return datetime.fromtimestamp(self.clock(), UTC)


class WrappedCommand(click.Command):
    """Command whose help fits the terminal: click does not break lines of examples."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help text."""
        return wrapped_help(super().get_help(ctx), ctx.make_formatter().width)


def command(
    name: str, *, examples: tuple[str, ...]
) -> Callable[[Callable[..., int]], click.Command]:
    """Return a decorator that makes a command whose help shows examples and exit codes."""

    def decorate(function: Callable[..., int]) -> click.Command:
        summary, _, rest = inspect.cleandoc(_docstring(function)).partition("\n")
        shown = "\n".join(f"  $ ckptmgr {example}" for example in examples)
        text = f"{summary}\n\n\b\nExamples:\n{shown}\n{rest}"
        return click.command(
            name, cls=WrappedCommand, help=text, epilog=EPILOG, context_settings=CONTEXT
        )(function)

    return decorate


def _docstring(function: Callable[..., int]) -> str:
    """Return the docstring of a function; from its source where Python runs with -OO."""
    if function.__doc__ is not None:
        return function.__doc__
    try:
        parsed = ast.parse(inspect.getsource(function)).body[0]
    except OSError:  # there is no source
        return ""
    return ast.get_docstring(cast(ast.FunctionDef, parsed)) or ""


def _output_option(*names: str, note: Mapping[str, object] | None = None, **attributes: Any) -> Any:
    """Return an option that is noted for `render.make_output` instead of passed to the command."""

    def keep(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            noted = {param.name: value} if note is None else note
            ctx.meta.update({f"ckptmgr.{name}": one for name, one in noted.items()})
            _check_verbose(ctx)

    return click.option(*names, expose_value=False, callback=keep, **attributes)


def _check_verbose(ctx: click.Context) -> None:
    """Raise UsageProblem for `-v` with `-q`, before the command has begun; JSON has every field."""
    if "ckptmgr.verbose" in ctx.meta and "ckptmgr.quiet" in ctx.meta:
        raise UsageProblem("-v adds detail, and -q leaves it out", hint="drop one of them")


def output_options(function: Command) -> Command:
    """Add `--json`, `-q`, `-0`, `-v`, `--color` and `--no-color`."""
    for option in (
        _output_option(
            "--no-color",
            is_flag=True,
            note={"color": "never"},
            help="The same as --color never.",
        ),
        _output_option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            help="When to use colour.  [default: auto]",
        ),
        _output_option(
            "-0",
            "--null",
            is_flag=True,
            note={"quiet": True, "null": True},
            help="Like -q, each one ended by a NUL byte.",
        ),
        _output_option("-v", "--verbose", is_flag=True, help="Add detail."),
        _output_option(
            "-q",
            "--quiet",
            is_flag=True,
            help="Print bare paths or names; quoted on a terminal.",
        ),
        _output_option("--json", is_flag=True, help="Print one JSON object."),
    ):
        function = option(function)
    return function


def no_output_options(reason: str) -> Callable[[Command], Command]:
    """Return a decorator that refuses `-q` and `-v` by name, for a command that has one output."""

    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            raise UsageProblem(f"{param.opts[0]} has no effect here: {reason}", hint="leave it out")

    def decorate(function: Command) -> Command:
        for names in (("-q", "--quiet"), ("-v", "--verbose")):
            function = click.option(
                *names, is_flag=True, expose_value=False, hidden=True, callback=refuse
            )(function)
        return function

    return decorate


def checked_path(_: click.Context, __: click.Parameter, value: str) -> str:
    """Return the value of an option that is a path, or - for a pipe; see `check_path`."""
    check_path(value)
    return value


def checked_output(
    ctx: click.Context, param: click.Parameter, value: str | Path | None
) -> str | Path | None:
    """Return the value of an option that names the output; see `check_path`.

    Raises:
        UsageProblem: It has the name of a manifest, a lease or another file that ckptmgr keeps.
    """
    from ckptmgr.store.reserved_names import is_reserved_name

    if value is None:
        return None
    check_path(value)
    if is_reserved_name(Path(value).name):
        raise UsageProblem(
            f"{param.opts[0]}: {Path(value).name!r} is the name of a manifest, a lease or another "
            "file of ckptmgr",
            hint="choose another name",
        )
    return value


def only_one(_: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the value of an option that may be given once; click keeps the last of several."""
    if len(values) > 1:
        raise UsageProblem(f"{param.opts[0]} is given {len(values)} times", hint="give it once")
    return next(iter(values), None)


def _dir_option(kind: click.Path, note: str = "") -> Callable[[Command], Command]:
    return click.option(
        "--dir",
        "directory",
        type=kind,
        default=Path(),
        help=f"Where steps, latest, best:... and @pinned are looked up{note}.  [default: .]",
    )


dir_option = _dir_option(PATH)
place_dir_option = _dir_option(PLACE, "; may be a URL")


def series_option(function: Command) -> Command:
    """Add `--series`."""
    return click.option("--series", metavar="NAME", help="Only checkpoints of this series.")(
        function
    )


def refuse_without_effect(option: str, can: Capabilities, capability: str, *, hint: str) -> None:
    """Raise UsageProblem for an option without effect at a place; see `core.place.refusal_at`."""
    refused = refusal_at(can, option, capability, hint=hint)
    if refused is not None:
        raise UsageProblem(refused.message, hint=refused.hint)


def check_said_now(can: Capabilities, *, at_once: bool, only_shows: bool) -> None:
    """Raise UsageProblem unless `--now` is said at a place without a trash."""
    if not (can.trash or only_shows or at_once):
        raise UsageProblem(
            f"{can.name} has no trash: what goes, goes for good",
            hint="look at the plan with --dry-run, then say --now",
        )


def open_store(directory: Path, *, trust: Trust, clock: Callable[[], float] = time.time) -> Store:
    """Return the store of a directory, or of an address; `clock` returns seconds since the epoch."""
    from ckptmgr.objects.places import open_place

    return open_place(absolute(directory), trust=trust, clock=clock)


def absolute(path: Path) -> Path:
    """Return an absolute path; `Path.resolve` would follow links."""
    return path if is_url(path) else Path(os.path.abspath(path))  # noqa: PTH100


def confirm(question: str, *, refusal: type[UnsafePrune | UnsafeWrite]) -> bool:
    """Ask at the terminal; see `check_can_ask`.

    `click.confirm` writes a part of the question to stdout, until version 8.4.

    Raises:
        click.Abort: The input ended.
    """
    check_can_ask(refusal)
    while True:
        to_stderr(f"{question} [y/N]: ")
        answer = sys.stdin.readline()
        if not answer:
            to_stderr("\n")  # the terminal has put none behind the question
            raise click.Abort
        if answer.strip().lower() in ("y", "yes"):
            return True
        if answer.strip().lower() in ("", "n", "no"):
            return False
        to_stderr("answer y or n\n")


def check_can_ask(refusal: type[UnsafePrune | UnsafeWrite]) -> None:
    """Raise `refusal` unless stdin is a terminal."""
    if not sys.stdin.isatty():
        raise refusal(
            "stdin is not a terminal, so nothing was changed",
            hint="look at the plan (--dry-run), then pass --yes",
        )
