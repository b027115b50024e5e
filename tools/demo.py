# SPDX-License-Identifier: Apache-2.0
"""The main job, end to end: train, checkpoint encrypted, be killed in the middle of a save, resume, compare, verify, prune.

Everything happens in `demo-run/`, which is made anew. Exits with an error if anything is not as promised.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ckptmgr import load_checkpoint

ROOT = Path("demo-run")  # below the working directory
JOB = Path(__file__).with_name("demo_train.py")
KILLED_SAVE = 9

console = Console(highlight=False)


def main() -> None:
    """Tell the story."""
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir()
    key = secrets.token_hex(32)
    environment = {**os.environ, "DEMO_KEY": key, "CKPTMGR_KEY": key}
    calm, killed = ROOT / "calm", ROOT / "killed"

    heading("1  A run that nothing disturbs")
    reference = job(calm, environment)
    say(
        f"{reference['steps']} steps, accuracy {reference['accuracy']:.1%}, loss {reference['loss']:.4f}"
    )

    heading(f"2  The same run, killed with SIGKILL half-way through save number {KILLED_SAVE}")
    kill_in_the_middle(killed, environment)
    ckptmgr("ls", str(killed), "--all", environment=environment)

    heading("3  Resume from the newest checkpoint that verifies")
    resumed = job(killed, environment, "--resume")
    say(
        f"resumed from {resumed['resumed_from']}, went on at step {resumed['first_step']} of {resumed['steps']}"
    )
    same = resumed["fingerprint"] == reference["fingerprint"]
    say(
        f"final weights and optimizer state: {'bit-identical to the calm run' if same else 'DIFFERENT'}"
    )
    if not same:
        sys.exit("the resumed run differs from the calm run")

    heading("4  Verify every byte: digests, seal, authentication tags")
    ckptmgr("verify", str(killed), environment=environment)

    heading("5  Decrypt the newest one for a reader without the key")
    newest = max(killed.glob("digits*.ckpt"), key=lambda path: path.stat().st_mtime)
    plain = ROOT / "plain.ckpt"
    ckptmgr("decrypt", str(newest), "-o", str(plain), environment=environment)
    values = load_checkpoint(str(plain))
    weight = values["hidden.weight"]
    assert isinstance(weight, np.ndarray)
    say(f"{plain} holds {len(values)} values, among them hidden.weight {weight.shape}")

    heading("6  Prune, with reasons")
    ckptmgr(
        "prune",
        str(killed),
        "--keep",
        "last(2) | best(1, loss, min)",
        "--yes",
        environment=environment,
    )
    ckptmgr("ls", str(killed), environment=environment)
    console.print(
        "\n[bold green]Done.[/] Nothing was lost, nothing was readable, nothing was believed unchecked."
    )


def heading(text: str) -> None:
    """Print the title of a part."""
    console.print(f"\n[bold cyan]{text}[/]")


def say(text: str) -> None:
    """Print a line of the account."""
    console.print(f"   {text}")


def job(directory: Path, environment: dict[str, str], *options: str) -> dict[str, Any]:
    """Run the training job to its end and return its account."""
    run = subprocess.run(
        [sys.executable, str(JOB), str(directory), *options],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    account: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return account


def kill_in_the_middle(directory: Path, environment: dict[str, str]) -> None:
    """Start the training job, wait until one save is half-written, and kill it."""
    command = [sys.executable, str(JOB), str(directory), "--stop-at-save", str(KILLED_SAVE)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        event = json.loads(run.stdout.readline())
        run.send_signal(signal.SIGKILL)
        run.wait()
    say(
        f"process {event['pid']} is gone ({signal.Signals(-run.returncode).name}); what it left behind:"
    )


def ckptmgr(*arguments: str, environment: dict[str, str]) -> None:
    """Run the command line tool, showing its line."""
    console.print(f"   [dim]$ ckptmgr {shlex.join(arguments)}[/]", soft_wrap=True)
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "ckptmgr", *arguments], env=environment, check=True)


if __name__ == "__main__":
    main()
