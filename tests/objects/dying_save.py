# SPDX-License-Identifier: Apache-2.0
"""A run that saves to an address, a mirror or a prune of it, that ends at one of its requests.

`python -m tests.objects.dying_save save|mirror|rekeyed|watch|prune URL REQUEST [in-flight]`: each line of the output
of a run is the step of a save that was acknowledged, each JSON line of a watch an event; the output of an
uncut program ends with its requests.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager, Mirror
from ckptmgr.cli import main as run_command
from ckptmgr.objects import requests
from ckptmgr.remote import mirror as mirrors
from ckptmgr.remote import upload as writers
from ckptmgr.remote import watch_mirror as watch_mirrors
from tests.cli.running import run
from tests.objects.dying_run import Dying
from tests.support import rekeying
from tests.support.saved import save_run

STEPS = 2
WATCHED_STEPS = 3
WATCH_KEEP = "last(2)"


def train(url: str, until: int = STEPS) -> None:
    """Save up to a step, and keep the last one."""
    with CheckpointManager(url, CheckpointConfig(keep_checkpoint_max=1)) as manager:
        start = manager.resume({"w": np.zeros(9)}).next_step
        for step in range(max(1, start), until + 1):
            manager.save(step, {"w": np.full(9, float(step))})
            print(step, flush=True)  # noqa: T201


def train_mirrored(folder: Path, url: str) -> None:
    """Save up to the last step, each after the upload of the one before."""
    with CheckpointManager(folder, mirror=Mirror(url, keep="last(1)", retry_s=0)) as manager:
        start = manager.resume({"w": np.zeros(9)}).next_step
        for step in range(max(1, start), STEPS + 1):
            handle = manager.save(step, {"w": np.full(9, float(step))})
            assert handle is not None
            assert handle.mirrored is not None
            handle.mirrored.result(60)
            print(step, flush=True)  # noqa: T201


def save_and_mirror_first(folder: Path, url: str) -> None:
    """Save in a folder; mirror the oldest checkpoint, as an earlier watch did."""
    save_run(folder, range(1, WATCHED_STEPS + 1))
    assert run("copy", "1", url, "--dir", folder).exit_code == 0


def watch(folder: Path, url: str) -> None:
    """Mirror a folder until all is done: two uploads, and the removal of the oldest checkpoint."""
    command = ["ckptmgr", "watch", str(folder), "--once", "--json", "--mirror", url]
    sys.argv = [*command, "--mirror-keep", WATCH_KEEP]
    with contextlib.suppress(SystemExit):
        run_command()


def upload_and_rekey(folder: Path, url: str) -> None:
    """Save an encrypted checkpoint in a folder, copy it, and give it another key in the folder."""
    rekeying.save_run(directory=folder, steps=1)
    assert run("copy", folder, url).exit_code == 0
    rekeying.rekey(rekeying.ROTATION, directory=folder)


def main(kind: str, url: str, last: int, *, is_in_flight: bool) -> None:
    """Run the program with a store that ends the process."""
    folder = Path(tempfile.gettempdir()) / "run"
    if kind == "watch":
        save_and_mirror_first(folder, url)
    elif kind == "rekeyed":
        upload_and_rekey(folder, url)
    objects = Dying(requests.open_objects(url), last, is_in_flight=is_in_flight)
    for place in (writers, mirrors, watch_mirrors, requests):
        place.open_objects = lambda url: objects  # type: ignore[attr-defined]
    if kind == "save":
        train(url)
    elif kind == "mirror":
        train_mirrored(folder, url)
    elif kind == "watch":
        watch(folder, url)
    elif kind == "rekeyed":
        assert run("copy", folder, url).exit_code == 0
    else:
        assert run("prune", url, "--keep", "last(1)", "--now", "--yes").exit_code == 0
    for one in objects.requests:
        print(one.split()[0])  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), is_in_flight="in-flight" in sys.argv[4:])
