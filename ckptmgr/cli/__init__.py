# SPDX-License-Identifier: Apache-2.0
"""Command line. Commands are imported when they are used, so that help and completion are quick."""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ckptmgr._version import __version__
from ckptmgr.cli.exits import (
    EPILOG,
    Exit,
    UsageProblem,
    escape,
    forget,
    help_text,
    misplaced_keys,
    report,
    report_interruption,
    to_stderr,
    without_keys,
)
from ckptmgr.cli.layout import columns_of, wrapped_help
from ckptmgr.cli.options import (
    COMPLETION_VARIABLE,
    CONTEXT,
    Session,
    WrappedCommand,
    no_output_options,
)
from ckptmgr.core.contexts import contextmanager
from ckptmgr.crypto.keys.source_names import looks_like_key

_COMMANDS = {
    "ls": ("ls", "List the checkpoints of a directory."),
    "stats": ("stats", "Show the bytes of a tree of runs, by run, kind and age."),
    "inspect": ("inspect", "Show the contents of a checkpoint."),
    "verify": ("verify", "Check checkpoints for damage and changes since they were saved."),
    "diff": ("diff", "Compare two checkpoints, or those of two directories."),
    "prove": ("prove", "Cut a program at random steps, and compare it with an uncut run."),
    "doctor": ("doctor", "Check whether a directory can be saved to and resumed from."),
    "decrypt": ("crypt", "Write the plaintext of an encrypted file."),
    "encrypt": ("crypt", "Encrypt and seal a plain checkpoint, or any other file."),
    "convert": ("convert", "Compress checkpoints in place, or expand them."),
    "export": ("export", "Write the weights in a checkpoint for other libraries."),
    "rekey": ("rekey", "Change the keys that open checkpoints."),
    "reencrypt": ("rekey", "Encrypt checkpoints again, under new data keys."),
    "keygen": ("keygen", "Make a key."),
    "prune": ("prune", "Remove the checkpoints that a policy does not keep."),
    "rm": ("rm", "Remove checkpoints by name, into the trash."),
    "simulate": ("simulate", "Show what a retention policy would have kept."),
    "report": ("report", "Write a page about what a run saved and kept, and at what cost."),
    "pin": ("pin", "Promise that a checkpoint is never pruned."),
    "unpin": ("pin", "Take that promise back."),
    "copy": ("copy", "Copy checkpoints to an object store, or from one."),
    "storage": ("storage", "Say what an object store guarantees."),
    "tag": ("tag", "Add tags to a checkpoint."),
    "untag": ("tag", "Remove tags from a checkpoint."),
    "watch": ("watch", "Follow directories: verify what appears, and raise alarms."),
    "repair": ("repair", "Repair files of many ranks from the copies in the others."),
    "sign": ("sign", "Write an OpenSSF model-signing bundle."),
    "config": ("config", "Show the settings that commands use, and where they come from."),
    "completion": ("completion", "Print the script that completes commands in a shell."),
    "transform": ("ranks", "Rewrite the checkpoints of many ranks for another strategy."),
    "unify": ("ranks", "Join the checkpoints of many ranks into whole tensors."),
    "merge": ("ranks", "Join the strategy files of pipeline stages."),
}
_NAME_OF_COMMAND = re.compile("[A-Za-z_-]{1,16}[0-9]{0,2}")
"""Texts that may be a mistyped command; a key is longer, and no plain word."""
_JSON = frozenset({"--json", "--jsonl"})
"""Options with which errors are JSON, too."""
_TOPICS = {"exit-codes": lambda: "Exit codes:\n" + help_text()}


class Commands(click.Group):
    """Group that imports a command when it is used and turns errors into exit codes."""

    command_class = WrappedCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names in display order."""
        return [*_COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command."""
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"ckptmgr.cli.commands.{_COMMANDS[cmd_name][0]}")
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name, or suggest one."""
        name = args[0]
        if self.get_command(ctx, name) is None:
            close = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f"did you mean {close[0]}?" if close else "see ckptmgr --help"
            is_shown = _NAME_OF_COMMAND.fullmatch(name) and not looks_like_key(name)
            shown = repr(name) if is_shown else "(not shown: it may be a key)"
            raise UsageProblem(f"no such command {shown}", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        rows = [(name, summary) for name, (_, summary) in _COMMANDS.items()]
        rows.append(("help", "Explain a command, or a topic: exit-codes."))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        with _output_errors():
            result: object = super().invoke(ctx)
            sys.stdout.flush()
        return result

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the arguments; --help and --version are answered here."""
        with _output_errors():
            return super().make_context(info_name, args, parent, **extra)

    def get_help(self, ctx: click.Context) -> str:
        """Return the help text."""
        return wrapped_help(super().get_help(ctx), ctx.make_formatter().width)

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **extra: object,
    ) -> None:
        """Run and leave the process with an exit code."""
        _open_closed_streams()
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(_Escaped())
        arguments = list(sys.argv[1:] if args is None else args)
        sys.exit(int(_run(self, arguments, extra.get("obj"))))


def _run(group: click.Group, arguments: list[str], session: object) -> int:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json, is_debug = not _JSON.isdisjoint(options), "--debug" in options
    if not (
        arguments or os.environ.get(COMPLETION_VARIABLE)
    ):  # by itself click shows the help as an error only from version 8.2 on
        to_stderr(f"{group.get_help(click.Context(group, info_name='ckptmgr'))}\n")
        return Exit.FAILED
    try:
        result = click.Group.main(
            group, arguments, prog_name="ckptmgr", standalone_mode=False, obj=session
        )
    except (click.Abort, KeyboardInterrupt):
        return report_interruption(as_json=as_json)
    except Exception as error:  # the top of the program: everything becomes a message and a code
        # The trace of a usage error is useless, and click's text repeats the arguments: one may be
        # a key.
        keys = misplaced_keys(arguments)
        if is_debug and not isinstance(error, click.UsageError):
            trace = without_keys(traceback.format_exc(), keys).splitlines()
            to_stderr("".join(f"{escape(line)}\n" for line in trace))
        return report(error, as_json=as_json, keys=keys)
    return result if isinstance(result, int) else Exit.DONE


class _Escaped(logging.Formatter):
    """Formatter of the library's warnings: they name files, and names could steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escape, super().format(record).splitlines()))


_HELP = """Checkpoints that survive: list, check, decrypt and prune them.

\b
Examples:
  $ ckptmgr ls runs/resnet50
  $ ckptmgr prune runs/resnet50 --keep 'last(3) | best(2, loss, min)' --dry-run
"""


def _open_closed_streams() -> None:
    """Open the null device for closed standard streams; else files would get their descriptors."""
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - stays open


@contextmanager
def _output_errors() -> Iterator[None]:
    """Turn errors of stdout into exit codes: click would give a closed pipe that of a real answer."""
    try:
        yield
    except BrokenPipeError:
        forget(1)
        raise click.exceptions.Exit(Exit.PIPE_CLOSED) from None
    except OSError as error:
        if error.filename is not None or _takes_output():
            raise
        forget(1)
        raise OSError(error.errno, error.strerror, "standard output") from error


def _takes_output() -> bool:
    """Return whether stdout takes the text that an error has left in its buffer."""
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


@click.group(
    cls=Commands, help=_HELP, context_settings=CONTEXT, epilog=EPILOG, no_args_is_help=False
)
@click.version_option(__version__, message="ckptmgr %(version)s")
@click.option("--debug", is_flag=True, help="Show where errors come from.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), help="When to use colour.")
@click.option("--no-color", is_flag=True, help="The same as --color never.")
@click.pass_context
def cli(ctx: click.Context, debug: bool, color: str | None, no_color: bool) -> None:
    """Checkpoints that survive: list, check, decrypt and prune them."""
    session = ctx.ensure_object(Session)
    chosen = "never" if no_color else color or session.color
    ctx.obj = replace(session, is_debug=debug, color=chosen)


@cli.command("help", context_settings=CONTEXT, epilog=EPILOG)
@click.argument("topic", required=False)
@no_output_options("help is printed as it is")
@click.pass_context
def help_command(ctx: click.Context, topic: str | None) -> int:
    """Explain a command, or a topic: exit-codes."""
    group = ctx.parent
    if group is None or topic is None:
        click.echo((group or ctx).get_help())
        return Exit.DONE
    if topic in _TOPICS:
        click.echo(wrapped_help(_TOPICS[topic](), columns_of(sys.stdout)))
        return Exit.DONE
    name, command, _ = cli.resolve_command(group, [topic])
    if command is not None:
        with click.Context(command, info_name=name, parent=group) as explained:
            click.echo(command.get_help(explained))
    return Exit.DONE


def main() -> None:
    """Run the command line of this process."""
    cli.main()
