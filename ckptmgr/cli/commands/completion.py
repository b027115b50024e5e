# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr completion`: scripts that complete commands and options in a shell."""

from __future__ import annotations

import click

from ckptmgr.cli import options
from ckptmgr.cli.exits import Exit, UsageProblem
from ckptmgr.cli.options import COMPLETION_VARIABLE

_NAME = "ckptmgr"


@options.command(
    "completion",
    examples=(
        "completion bash > ~/.local/share/bash-completion/completions/ckptmgr",
        "completion zsh > ~/.zfunc/_ckptmgr",
        "completion fish > ~/.config/fish/completions/ckptmgr.fish",
    ),
)
@options.no_output_options("it prints a script and nothing else")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> int:
    """Print the script that completes commands and options in a shell.

    Put it where the shell looks for completions, as in the examples. zsh needs its folder in fpath
    before compinit; bash must be 4.4 or newer.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:  # pragma: no cover - click has these three
        raise UsageProblem(f"click cannot complete in {shell}", hint="use bash, zsh or fish")
    # `source` of bash would start the shell, for its version.
    made = kind(ctx.find_root().command, {}, _NAME, COMPLETION_VARIABLE)
    click.echo(made.source_template % made.source_vars())
    return Exit.DONE
