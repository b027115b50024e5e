# SPDX-License-Identifier: Apache-2.0
"""Write a man page for `ckptmgr` and for each of its commands, from what `--help` says.

```
python -m tools.man build/man
man build/man/ckptmgr-prune.1
```

The pages have no date, so the same version gives the same bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from ckptmgr._version import __version__
from ckptmgr.cli import cli
from ckptmgr.cli.exits import MEANINGS, Exit

_EXAMPLE = "  $ "


def pages() -> dict[str, str]:
    """Return the file name and the text of each page."""
    with click.Context(cli, info_name="ckptmgr") as context:
        commands = {
            name: command
            for name in cli.list_commands(context)
            if (command := cli.get_command(context, name)) is not None
        }
        made = {"ckptmgr.1": "".join(_lines("ckptmgr", cli, context, commands))}
        for name, command in commands.items():
            with click.Context(command, info_name=name, parent=context) as own:
                text = "".join(_lines(f"ckptmgr-{name}", command, own, {}))
                made[f"ckptmgr-{name}.1"] = text
    return made


def _lines(
    title: str, command: click.Command, context: click.Context, commands: dict[str, click.Command]
) -> Iterator[str]:
    summary, examples, paragraphs = _parts(command.help or "")
    yield f'.TH {_escaped(title.upper())} 1 "" "ckptmgr {_escaped(__version__)}" "ckptmgr"\n'
    yield f".SH NAME\n{_escaped(title)} \\- {_escaped(summary.removesuffix('.'))}\n"
    usage = command.collect_usage_pieces(context)
    yield f".SH SYNOPSIS\n.B {_escaped(context.command_path)}\n{_escaped(' '.join(usage))}\n"
    yield ".SH DESCRIPTION\n" + "".join(
        f".PP\n{_escaped(text)}\n" for text in [summary, *paragraphs]
    )
    records = [
        record for one in command.get_params(context) if (record := one.get_help_record(context))
    ]
    yield ".SH OPTIONS\n" + "".join(map(_entry, records))
    if commands:
        yield ".SH COMMANDS\n"
        yield from (
            _entry((f"ckptmgr-{name}(1)", one.get_short_help_str(200)))
            for name, one in commands.items()
        )
    if examples:
        yield ".SH EXAMPLES\n.nf\n" + "".join(f"{_escaped(one)}\n" for one in examples) + ".fi\n"
    yield ".SH EXIT STATUS\n" + "".join(_entry((str(int(code)), MEANINGS[code])) for code in Exit)
    others = [name for name in ("ckptmgr", *commands) if name != title]
    if not commands:
        yield ".SH SEE ALSO\n" + ", ".join(f"\\fB{_escaped(name)}\\fR(1)" for name in others) + "\n"


def _entry(record: Sequence[str]) -> str:
    return f".TP\n\\fB{_escaped(record[0])}\\fR\n{_escaped(record[1])}\n" if record[1] else ""


def _parts(text: str) -> tuple[str, list[str], list[str]]:
    """Return the first sentence, the examples and the other paragraphs of a help text."""
    blocks = [block.replace("\b\n", "") for block in re.split(r"\n\s*\n", text.strip())]
    examples = [
        line.strip() for block in blocks for line in block.splitlines() if line.startswith(_EXAMPLE)
    ]
    others = [" ".join(block.split()) for block in blocks[1:] if _EXAMPLE not in block]
    return " ".join(blocks[0].split()), examples, [one for one in others if one]


def _escaped(text: str) -> str:
    """Return a text as roff reads it: no line of it is a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def main() -> None:
    """Write the pages into the folder of the first argument."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/man")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(pages())} pages in {folder}\n")


if __name__ == "__main__":
    main()
