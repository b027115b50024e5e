# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: the pages that are made of other files of the repository, and their links."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Source file at the top of the repository: page of the site. The README is its first page.
TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def page_of(target: str) -> str | None:
    """Return the page of a path of the repository; None for a file that is no page."""
    if target in TOP:
        return TOP[target]
    inside = target.removeprefix("docs/")
    is_page = inside != target and (inside in MADE or (ROOT / target).exists())
    return inside if is_page else None


def relink(text: str, source: str, page: str) -> str:
    """Return the text of `source` (a path of the repository) with its links seen from `page`.

    A link to a file that is no page becomes plain text.

    Raises:
        FileNotFoundError: A link leads nowhere.
    """

    def replaced(match: re.Match[str]) -> str:
        shown, link, anchor = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        linked = page_of(target)
        if linked is not None:
            path = posixpath.relpath(linked, posixpath.dirname(page) or ".")
            return f"[{shown}]({path}{anchor})"
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{source} links to {link}, which does not exist")
        return shown

    return _LINK.sub(replaced, text)


def commands_page() -> str:
    """Return the help of every command, as the command prints it at 100 columns."""
    import click

    from ckptmgr.cli import cli

    parts = ["# Commands\n", "What `ckptmgr COMMAND --help` prints.\n"]
    with click.Context(cli, info_name="ckptmgr") as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            if command is None or name == "help":
                continue
            with click.Context(command, info_name=name, parent=context, terminal_width=100) as own:
                parts.append(f"## {name}\n\n```text\n{command.get_help(own)}\n```\n")
    return "\n".join(parts)


def exit_codes_page() -> str:
    """Return the exit codes, and the errors of the library that lead to them."""
    from ckptmgr.cli.exits import CODES, MEANINGS, Exit

    rows = ["| code | meaning | errors |", "|---|---|---|"]
    for code in Exit:
        names = ", ".join(f"`{error.__name__}`" for error, of in CODES.items() if of is code)
        rows.append(f"| {int(code)} | {MEANINGS[code]} | {names} |")
    text = "All commands share these; the same table is the end of every `--help`.\n"
    return "\n".join(["# Exit codes\n", text, *rows, ""])


MADE = {"reference/commands.md": commands_page, "reference/exit-codes.md": exit_codes_page}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files below `docs/`."""
    from mkdocs.structure.files import File

    for source, page in TOP.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relink(content, source, page)))
    for page, make in MADE.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page that is a file below `docs/`."""
    uri = page.file.src_uri
    if uri in TOP.values() or uri in MADE:
        return markdown
    return relink(markdown, f"docs/{uri}", uri)
