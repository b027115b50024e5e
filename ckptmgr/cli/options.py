# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and their values: keys, trust, clock, store."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckptmgr.cli.exits import EPILOG, UsageProblem, is_misplaced_key, to_stderr
from ckptmgr.cli.layout import wrapped_help
from ckptmgr.core.errors import KeyProblem, UnsafePrune, UnsafeWrite
from ckptmgr.core.urls import is_url

if TYPE_CHECKING:
    from ckptmgr.core.trust import Trust
    from ckptmgr.crypto.keys.ring import Keys
    from ckptmgr.crypto.keys.signing import PublicKey, SigningKey
    from ckptmgr.store.store import Store

Command = TypeVar("Command", bound=Callable[..., object])

_SCHEMES = ("env:", "file:", "cmd:", "fd:", "prompt:", "wrapped:", "passphrase:")
_SOURCES = "env:NAME, file:PATH, cmd:COMMAND, fd:N, prompt:, wrapped:FILE or passphrase:SOURCE"
_NOT_CHANGED = "a manifest there is never changed: give the name in the directory of the run, before the upload"
_AT_ADDRESSES = {
    "doctor": "ckptmgr storage probe URL tries what a store guarantees",
    "pin": _NOT_CHANGED,
    "report": "ckptmgr ls URL lists what is there",
    "rm": "ckptmgr prune URL --keep EXPR --now removes what a policy does not keep",
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


class _Path(click.Path):
    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        check_path(value)
        return super().convert(value, param, ctx)


class _Place(click.Path):
    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        check_place(value)
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


PATH = _Path(path_type=Path)
PLACE = _Place(path_type=Path)
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
            help="Like -q, each path ended by a NUL byte.",
        ),
        _output_option("-v", "--verbose", is_flag=True, help="Add detail."),
        _output_option(
            "-q", "--quiet", is_flag=True, help="Print paths only; quoted on a terminal."
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


def key_option(function: Command) -> Command:
    """Add `--key`."""
    return click.option(
        "--key",
        "key_sources",
        metavar="SOURCE",
        multiple=True,
        help=f"{_SOURCES}; a file of a private key opens, too. May be repeated: any of them opens.  "
        "[default: the file $CKPTMGR_KEY_FILE, then the variable CKPTMGR_KEY]",
    )(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTrust:
    """Options about keys and proof, before any key is loaded."""

    key_sources: tuple[str, ...] = ()
    public_keys: tuple[str, ...] = ()
    signing_source: str | None = None
    allow_unsealed: bool = False
    allow_unencrypted: bool = False

    def load(self, *, is_new: bool = False) -> Trust:
        """Load the keys; `is_new` as for `keys_of_command`.

        A signing key trusts only its own signatures, unless public keys are named.

        Raises:
            UsageProblem, KeyProblem: A source gives no key.
        """
        return self.with_keys(keys_of_command(self.key_sources, is_new=is_new))

    def has_environment_key(self) -> bool:
        """Return whether the environment names a key."""
        return bool(sources_in_environment(os.environ))

    def with_keys(self, keys: Keys | None) -> Trust:
        """Return the trust in keys that were loaded elsewhere; see `load`."""
        from ckptmgr.core.trust import Trust

        signing_key = signing_key_of_option(self.signing_source)
        trusted = load_public_keys(self.public_keys)
        if signing_key is not None and not trusted:
            trusted = (signing_key.public_key,)
        return Trust(
            keys=keys,
            trusted_keys=trusted,
            signing_key=signing_key,
            allow_unsealed=self.allow_unsealed,
            allow_unencrypted=self.allow_unencrypted,
        )


def trust_options(
    *, has_public_key: bool = False, has_signing_key: bool = False, has_allowing: bool = True
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options about keys and proof, passed on as `given_trust`."""
    allowing = (
        click.option(
            "--allow-unencrypted",
            is_flag=True,
            help="With a key: accept plain files, too.",
        ),
        click.option(
            "--allow-unsealed",
            is_flag=True,
            help="With a key: accept encrypted files that are not proven as a whole (MindSpore's own).",
        ),
    )

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(*args: object, **options: object) -> object:
            names = [name for name in GivenTrust.__dataclass_fields__ if name in options]
            given = {name: options.pop(name) for name in names}
            return function(*args, given_trust=GivenTrust(**cast(Any, given)), **options)

        decorated = cast(Command, command)
        for option in (
            *([signing_key_option] if has_signing_key else []),
            *(allowing if has_allowing else ()),
            key_option,
            *([public_key_option] if has_public_key else []),
        ):
            decorated = option(decorated)
        return decorated

    return decorate


def public_key_option(function: Command) -> Command:
    """Add `--public-key`."""
    return click.option(
        "--public-key",
        "public_keys",
        metavar="FILE",
        multiple=True,
        help="Whose signatures count; what none of them signed is refused. May be repeated.",
    )(function)


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


def signing_key_option(function: Command) -> Command:
    """Add `--signing-key`."""
    return click.option(
        "--signing-key",
        "signing_source",
        metavar="SOURCE",
        multiple=True,
        callback=only_one,
        help="Source of the private key that signs what is changed: file:PATH, env:NAME, cmd:COMMAND or fd:N.",
    )(function)


def place_dir_option(function: Command) -> Command:
    """Add `--dir`, which may also be the address of an object store."""
    return click.option(
        "--dir",
        "directory",
        type=PLACE,
        default=Path(),
        help="Where steps, latest, best:... and @pinned are looked up; may be a URL.  [default: .]",
    )(function)


def dir_option(function: Command) -> Command:
    """Add `--dir`."""
    return click.option(
        "--dir",
        "directory",
        type=PATH,
        default=Path(),
        help="Where steps, latest, best:... and @pinned are looked up.  [default: .]",
    )(function)


def series_option(function: Command) -> Command:
    """Add `--series`."""
    return click.option("--series", metavar="NAME", help="Only checkpoints of this series.")(
        function
    )


def keys_of_command(
    sources: Sequence[str], environment: Mapping[str, str] = os.environ, *, is_new: bool = False
) -> Keys | None:
    """Return the keys that `--key` or the environment names, or None.

    `is_new`: the key encrypts something new; a passphrase is then asked for twice.

    Raises:
        UsageProblem: A literal key, or no known kind of source. It is not shown.
        KeyProblem: A source gives no key.
    """
    sources = sources or sources_in_environment(environment)
    return keys_of_option("--key", sources, is_new=is_new) if sources else None


def keys_of_option(option: str, sources: Sequence[str], *, is_new: bool = False) -> Keys:
    """Return the keys, passphrases, private and public keys that an option names; as `keys_of_command`."""
    if not all(source.startswith(_SCHEMES) for source in sources):
        raise UsageProblem(
            f"{option} takes the source of a key, never the key itself (not shown)",
            hint=f"use {_SOURCES}; every user of the machine can read a command line",
        )
    from ckptmgr.crypto import errors
    from ckptmgr.crypto.keys import material as key_sources

    try:
        return key_sources.load_keys(sources, asked_for=option, is_new=is_new)
    except errors.CryptoError as error:
        raise KeyProblem(error.message, hint=error.hint) from error


def signing_key_of_option(source: str | None) -> SigningKey | None:
    """Return the key that `--signing-key` names, or None.

    Raises:
        UsageProblem: No known kind of source. It is not shown.
        KeyProblem: The source gives no key.
    """
    if source is None:
        return None
    check_source("--signing-key", source)
    from ckptmgr.config.checks import check_signing_key

    return check_signing_key(source)


def check_source(option: str, source: str) -> None:
    """Raise UsageProblem unless an option names the source of a private key, which is not shown."""
    if not source.startswith(_SCHEMES):
        raise UsageProblem(
            f"{option} takes the source of a key, never the key itself (not shown)",
            hint="use file:PATH, env:NAME, cmd:COMMAND or fd:N",
        )


def load_public_keys(files: Sequence[str]) -> tuple[PublicKey, ...]:
    """Return the keys that `--public-key` names.

    Raises:
        KeyProblem: A file is no public key.
    """
    if not files:
        return ()
    from ckptmgr.config.checks import check_trusted_keys

    return check_trusted_keys(files)


def sources_in_environment(environment: Mapping[str, str] = os.environ) -> Sequence[str]:
    """Return the sources that the environment names: those without `--key`."""
    if environment.get("CKPTMGR_KEY_FILE"):
        return [f"file:{environment['CKPTMGR_KEY_FILE']}"]
    return ["env:CKPTMGR_KEY"] if environment.get("CKPTMGR_KEY") else []


def open_store(directory: Path, *, trust: Trust) -> Store:
    """Return the store of a directory, or of an address."""
    from ckptmgr.store.store import Store

    if is_url(directory):
        from ckptmgr.objects.filesystem import remote_store
        from ckptmgr.objects.requests import open_objects

        return remote_store(open_objects(str(directory)), trust=trust)
    return Store(absolute(directory), trust=trust)


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
