# SPDX-License-Identifier: Apache-2.0
"""Exit codes, the code of each error, and error messages that do not repeat keys.

A key that was typed in a wrong place is left out of messages, which logs keep.
"""

from __future__ import annotations

import enum
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import click

from ckptmgr.cli.layout import columns_of, wrapped
from ckptmgr.core import errors
from ckptmgr.core.printable import MOST_CHARACTERS, error_text, printable
from ckptmgr.crypto.keys.source_names import spells_key

_LONG_NAME = re.compile(r"[^\s/]{256,}")  # the names of files have at most 255 bytes
_START, _END = 60, 20
_MOST_LINE = 8192  # a path has at most 4096 bytes
_LEAST_PIECE = 12
_NOT_SHOWN = "(not shown: it looks like a key)"


def is_misplaced_key(text: str) -> bool:
    """Return whether a text is a key, and not the name of an existing file."""
    return spells_key(text) and not os.path.lexists(text)


def misplaced_keys(arguments: Iterable[str]) -> list[str]:
    """Return the keys among the arguments of a command line, in options too, the longest first."""
    values = [text for one in arguments for text in (one, *_values_of_option(one))]
    return sorted({text for text in values if is_misplaced_key(text)}, key=len, reverse=True)


def _values_of_option(argument: str) -> tuple[str, ...]:
    """Return the values of `--option=VALUE` and `-oVALUE`."""
    return (argument.partition("=")[2], argument[2:]) if argument.startswith("-") else ()


def without_keys(text: str, keys: Sequence[str]) -> str:
    """Return a text without keys, and without the pieces that parsers cut out of them."""
    for key in keys:
        text = _without(text, key, least=min(_LEAST_PIECE, len(key)))
    return text


def _without(text: str, key: str, *, least: int) -> str:
    parts, start, position = [], 0, 0
    while position <= len(text) - least:
        end = position + least
        if text[position:end] not in key:
            position += 1
            continue
        while end < len(text) and text[position : end + 1] in key:
            end += 1
        parts += [text[start:position], _NOT_SHOWN]
        start = position = end
    return "".join((*parts, text[start:]))


class Exit(enum.IntEnum):
    """Exit codes; any other code means failure."""

    DONE = 0
    NO = 1
    FAILED = 2
    PARTLY = 3
    NOT_FOUND = 10
    LOCKED = 11
    KEY = 12
    REFUSED = 13
    INTERRUPTED = 130
    PIPE_CLOSED = 141


MEANINGS: Mapping[Exit, str] = {
    Exit.DONE: "done",
    Exit.NO: "ran, and the answer is no (damage found, differences, alarm of watch, prune --check, prompt declined)",
    Exit.FAILED: "usage or general error",
    Exit.PARTLY: "partly done (the rest is named)",
    Exit.NOT_FOUND: "no such run or checkpoint",
    Exit.LOCKED: "locked by another process",
    Exit.KEY: "key missing or wrong",
    Exit.REFUSED: "refused for safety",
    Exit.INTERRUPTED: "interrupted",
    Exit.PIPE_CLOSED: "the reader of the output closed the pipe",
}

CODES: Mapping[type[errors.CkptmgrError], Exit] = {
    errors.CkptmgrError: Exit.FAILED,
    errors.CheckpointNotFound: Exit.NOT_FOUND,
    errors.CheckpointFileNotFound: Exit.NOT_FOUND,
    errors.CorruptCheckpoint: Exit.NO,
    errors.TruncatedCheckpoint: Exit.NO,
    errors.ChecksumMismatch: Exit.NO,
    errors.TamperedCheckpoint: Exit.NO,
    errors.UnsupportedCheckpoint: Exit.FAILED,
    errors.KeyProblem: Exit.KEY,
    errors.UnsealedCheckpoint: Exit.REFUSED,
    errors.UnprovenCheckpoint: Exit.REFUSED,
    errors.UnsupportedState: Exit.FAILED,
    errors.StoreLocked: Exit.LOCKED,
    errors.StoreFull: Exit.FAILED,
    errors.StagingExhausted: Exit.FAILED,
    errors.UnsafePrune: Exit.REFUSED,
    errors.UnsafeWrite: Exit.REFUSED,
    errors.SaveFailed: Exit.FAILED,
    errors.SaveSuperseded: Exit.FAILED,
}

_EXTRA = re.compile(r"(Got unexpected extra arguments?) \(.*\)", re.DOTALL)
_CHOICES = re.compile(r"\.? Choose from:(.*)", re.DOTALL)
# `--keySOURCE`, without a space.
_FOR_KEYS = ("--key", "--add", "--remove", "--to", "--signing-key", "--private-key", "--other-key")


class UsageProblem(click.UsageError):
    """Wrong use of the command line; the message never shows the value of a key."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Trouble(Exception):
    """An error of a command whose answer "no" has the code 1 of a damaged checkpoint: exit 2."""

    def __init__(self, error: errors.CkptmgrError) -> None:
        super().__init__(error.message)
        self.error = error


def code_of(error: BaseException) -> Exit:
    """Return the exit code of an error: that of its nearest base class in `CODES`."""
    for kind in type(error).__mro__:
        if issubclass(kind, errors.CkptmgrError) and kind in CODES:
            return CODES[kind]
    return Exit.FAILED


def report(error: BaseException, *, as_json: bool, keys: Sequence[str] = ()) -> Exit:
    """Write an error to stderr without misplaced keys, and return its exit code."""
    code = code_of(error)
    if isinstance(error, Trouble):
        error = error.error
    message, hint, path = (
        None if part is None else without_keys(part, keys) for part in _parts(error)
    )
    if as_json:
        _write_json(code, type(error).__name__, message, hint, path)
        return code
    place = "" if path is None else f"{escape(path)}: "
    _say("error", f"{place}{message}")
    if hint is not None:
        _say("hint", hint)
    return code


def report_all(failures: Sequence[Exception], *, is_partial: bool, as_json: bool) -> Exit:
    """Report failures; return 0 without any, else the code of the first.

    With `is_partial`, where a part was done, a general error becomes 3.
    """
    codes = [report(error, as_json=as_json) for error in failures]
    if not codes:
        return Exit.DONE
    return Exit.PARTLY if is_partial and codes[0] is Exit.FAILED else codes[0]


def report_interruption(*, as_json: bool) -> Exit:
    """Write to stderr that the command was interrupted, and return the exit code."""
    if as_json:
        _write_json(Exit.INTERRUPTED, "Interrupted", "interrupted", None, None)
    else:
        to_stderr("ckptmgr: interrupted\n")
    return Exit.INTERRUPTED


def _write_json(
    code: Exit, error: str, message: str | None, hint: str | None, path: str | None
) -> None:
    """Write the object of `docs/schemas/error.json` to stderr."""
    fields = {"code": int(code), "error": error, "message": message, "hint": hint, "path": path}
    to_stderr(f"{json.dumps(fields)}\n")


def note(text: str) -> None:
    """Write a note to stderr."""
    _say("note", text)


def _say(kind: str, text: str) -> None:
    """Write a text; a further line that could pass for another message is indented."""
    first, *others = (escape(cut(line)) for line in text.splitlines() or [""])
    others = [f"  {line}" if line.startswith("ckptmgr:") else line for line in others]
    columns = columns_of(sys.stderr)
    lines = chain(*(wrapped(line, columns) for line in (f"ckptmgr: {kind}: {first}", *others)))
    to_stderr("".join(f"{line}\n" for line in lines))


def to_stderr(text: str) -> None:
    """Write to stderr, whose reader may be gone: that changes no answer and no exit code."""
    shown = text.encode(sys.stderr.encoding or "utf-8", "backslashreplace")
    try:
        click.echo(shown, err=True, nl=False)
    except OSError:
        forget(2)


def forget(descriptor: int) -> None:
    """Keep the interpreter from failing at exit, when it flushes a stream that cannot be written."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def cut(text: str) -> str:
    """Return text for people: without the middle of names that no file could have, and of long lines.

    A header may name a tensor by megabytes. JSON has all of it.
    """
    text = _LONG_NAME.sub(lambda found: f"{found[0][:_START]}...{found[0][-_END:]}", text)
    return text if len(text) <= _MOST_LINE else f"{text[: _MOST_LINE - 3]}..."


def escape(text: str) -> str:
    """Return text that cannot steer a terminal: unprintable characters are spelled out."""
    return printable(text)


def _parts(error: BaseException) -> tuple[str, str | None, str | None]:
    """Return message, hint and path."""
    if isinstance(error, errors.CkptmgrError):
        return error.message, error.hint, error.path
    if isinstance(error, UsageProblem):
        return error.message, error.hint, None
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx is not None else "ckptmgr"
        message = _EXTRA.sub(r"\1 (not shown: it may be a key)", error.format_message())
        if isinstance(error, click.NoSuchOption) and error.option_name.startswith(_FOR_KEYS):
            message = "no such option (not shown: a key may be part of it)"
        return _as_sentence(_CHOICES.sub(_listed, message)), f"see {command} --help", None
    if isinstance(error, click.ClickException):
        return _as_sentence(error.format_message()), None, None
    if isinstance(error, OSError):
        path = None if error.filename is None else str(error.filename)
        return printable(error.strerror or str(error), MOST_CHARACTERS), None, path
    hint = "this is a bug in ckptmgr; run it again with ckptmgr --debug and report what it prints"
    return f"internal error: {type(error).__name__}: {error_text(error)}", hint, None


def _listed(found: re.Match[str]) -> str:
    """Return the choices that click puts one a line, behind tabs."""
    return f"; choose from {' '.join(found[1].split())}"


def _as_sentence(text: str) -> str:
    return text[:1].lower() + text[1:].removesuffix(".")


def help_text() -> str:
    """Return the table of exit codes."""
    return "\n".join(f"  {code:>3}  {MEANINGS[code]}" for code in Exit)


EPILOG = "\b\nExit codes:\n" + help_text()
