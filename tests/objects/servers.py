# SPDX-License-Identifier: Apache-2.0
"""Run a program beside servers of object stores: `python -m tests.objects.servers FOLDER PROGRAM...`.

The servers are installed into the folder the first time. The program finds the address of each in
`variable_of(NAME)`, or why there is none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from tests.objects import azurite, ceph
from tests.objects.processes import Unavailable

_Steps = tuple[Callable[[Path], Path], Callable[[Path], AbstractContextManager[str]]]
_SERVERS: dict[str, _Steps] = {
    "ceph": (ceph.install, ceph.started),
    "azurite": (azurite.install, azurite.started),
}
NO_SERVER = "none: "


def variable_of(name: str) -> str:
    """Return the environment variable with the address of a server."""
    return f"CKPTMGR_TEST_{name.upper()}"


def main(folder: str, *program: str) -> int:
    """Run the program; return its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as up:
        with ThreadPoolExecutor(len(_SERVERS)) as pool:
            installed = {name: pool.submit(one[0], place) for name, one in _SERVERS.items()}
        for name, (_, started) in _SERVERS.items():
            try:
                answer = up.enter_context(started(installed[name].result()))
            except Unavailable as error:
                answer = f"{NO_SERVER}{error}"
            os.environ[variable_of(name)] = answer
        return subprocess.run(program, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
