# SPDX-License-Identifier: Apache-2.0
"""`python -m ckptmgr.testing PROGRAM --steps-per-epoch N`: check a program, cut by cut."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence

from ckptmgr.testing.fork_server import NotConforming
from ckptmgr.testing.kit import Kit


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a program and print one line for each cut; return 1 if it failed one."""
    parser = argparse.ArgumentParser(prog="python -m ckptmgr.testing", description=__doc__)
    parser.add_argument("program", help="file.py:function or module:function")
    parser.add_argument("--steps-per-epoch", type=int, required=True)
    parser.add_argument("--keep", type=int, help="number of checkpoints that it keeps")
    parser.add_argument("--fork", action="store_true", help="import the program once")
    given = parser.parse_args(arguments)
    failed = 0
    with Kit(
        given.program, steps_per_epoch=given.steps_per_epoch, keep=given.keep, fork=given.fork
    ) as kit:
        for cut in kit.cuts:
            started = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="ckptmgr-kit-") as directory:
                try:
                    kit.check(cut, directory)
                    outcome = "ok"
                except NotConforming as error:
                    outcome, failed = f"FAILED: {error}", 1
            print(f"{cut}: {outcome} ({time.monotonic() - started:.1f} s)", flush=True)  # noqa: T201
    return failed


if __name__ == "__main__":  # pragma: no cover
    sys.exit(main())
