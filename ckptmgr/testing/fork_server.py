# SPDX-License-Identifier: Apache-2.0
"""`ForkServer`: a process that imports programs once, and forks for each of their runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Self

from ckptmgr.testing.child import NOT_IMPORTED, ChildRun

_SERVE = "from ckptmgr.testing.child import serve_standard_input; serve_standard_input()"


class NotConforming(AssertionError):
    """Report a program that does not go on as if it had not been cut; says how to see it."""


class ForkServer:
    """Process that imports programs once, and forks for each run; several kits may share one.

    A framework is then imported once for all programs. After the first run of a program the server
    also imports what that run imported.

    Args:
        python: The interpreter.
        environment: Variables for the runs, besides those of this process; `OMP_NUM_THREADS` is 1.
        timeout_s: How long its end may take.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._command = [python, "-c", _SERVE]
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; the next run starts another one."""
        if self._process is not None:
            self._process.communicate(timeout=self._timeout_s)
            self._process = None

    def run(self, program: str, run: ChildRun) -> int:
        """Run a program in a process of its own; return the exit code of that.

        Raises:
            NotConforming: It cannot be imported.
        """
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603 - the program that the user names
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        server = self._process
        assert server.stdin is not None  # noqa: S101
        assert server.stdout is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer shows
            server.stdin.write(run.order(program) + "\n")
            server.stdin.flush()
        answer = server.stdout.readline().strip()
        if not answer:
            self._process = None
            with contextlib.suppress(BrokenPipeError):
                server.stdin.close()
            server.stdout.close()
            raise NotConforming(
                f"{program} ended the process that should import it (exit code {server.wait()}); its output is above"
            )
        if answer == NOT_IMPORTED:
            raise NotConforming(f"{program} cannot be imported; its output is above")
        return int(answer)
