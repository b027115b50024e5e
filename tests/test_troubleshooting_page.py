# SPDX-License-Identifier: Apache-2.0
"""The page about troubles shows the messages that users see, and commands that there are."""

from __future__ import annotations

import doctest
import logging
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.cli import cli
from ckptmgr.core.errors import CkptmgrError, StoreLocked
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.policy.forecast import Demand, Forecast, Pace
from tests.support.failingdisk import FailingDisk
from tests.support.forked import run_forked
from tests.support.runs import manager_on
from tests.support.saved import flip

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
STATE = {"w": np.zeros(1 << 17)}

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="needs the sources: the page is not installed"
)


def save(directory: Path, *steps: int, prefix: str = "net", fs: Any = None, **config: Any) -> None:
    """Save steps of a run that does not resume."""
    with manager_on(directory, CheckpointConfig(**config), prefix=prefix, fs=fs) as manager:
        for step in steps:
            manager.save(step, STATE)


def resume(directory: Path, *, prefix: str = "net", **config: Any) -> None:
    with CheckpointManager(directory, CheckpointConfig(**config), prefix=prefix) as manager:
        manager.resume({"w": np.zeros(1 << 17)})


def full_disk(directory: Path) -> None:
    save(directory, 1, fs=FailingDisk(OsFileSystem(), space_bytes=1 << 20))


def damaged_newest(directory: Path) -> None:
    save(directory, 1, 2, 3)
    flip(directory / "net-3.ckpt", -100)
    resume(directory)


def lease_held(directory: Path) -> None:
    def another_process() -> list[str | None]:
        with pytest.raises(StoreLocked) as caught:
            resume(directory)
        return [caught.value.message, caught.value.hint]

    with CheckpointManager(directory, prefix="net") as manager:
        manager.resume(STATE)
        (answer,) = run_forked([another_process])
    assert isinstance(answer, list)
    message, hint = answer
    raise StoreLocked(message, path=directory, hint=hint)


def no_key(directory: Path) -> None:
    save(directory, 1, enc_key=b"k" * 16)
    resume(directory)


def wrong_key(directory: Path) -> None:
    save(directory, 1, enc_key=b"k" * 16)
    resume(directory, enc_key=b"x" * 16)


def not_resumed(directory: Path) -> None:
    save(directory, 1000)
    save(directory, 100)


def other_prefix(directory: Path) -> None:
    save(directory, 1000)
    resume(directory, prefix="other")


def slow_saves(directory: Path) -> None:
    demand = Demand(save_bytes=1, keep=1, policy="last(1)", free_bytes=1 << 40)
    pace = Pace(saves=10, interval_s=100.0, blocked_s=30.0, durable_s=30.0)
    for concern in Forecast(demand=demand, pace=pace).concerns:
        logging.getLogger(__name__).warning("%s\nhint: %s", concern.text, concern.hint)


TROUBLES: dict[str, list[Callable[[Path], None]]] = {
    "The disk is full": [full_disk],
    "The newest checkpoint is damaged": [damaged_newest],
    "The lease is held": [lease_held],
    "The key is wrong, or missing": [no_key, wrong_key],
    "The run was not resumed": [not_resumed, other_prefix],
    "Saves are slow": [slow_saves],
}


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def said(trouble: Callable[[Path], None], directory: Path, log: pytest.LogCaptureFixture) -> str:
    """Return the message to a user: the error with its class, or the last warning."""
    log.clear()
    try:
        trouble(directory)
    except CkptmgrError as error:
        return f"{type(error).__name__}: {error}\n"
    return f"WARNING: {log.records[-1].getMessage()}\n"


@pytest.mark.parametrize("title", TROUBLES)
def test_message_of_the_page_is_what_a_user_sees(
    title: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = blocks(sections()[title], "text")
    assert len(shown) == len(TROUBLES[title])
    for number, (trouble, block) in enumerate(zip(TROUBLES[title], shown, strict=True)):
        text = said(trouble, tmp_path / str(number) / "runs" / "net", caplog)
        assert doctest.OutputChecker().check_output(block, text, doctest.ELLIPSIS), text


def test_every_section_is_tried() -> None:
    assert list(sections()) == list(TROUBLES)


def test_commands_of_the_page_are_there_with_their_options() -> None:
    lines = re.findall(r"^\$ ckptmgr (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) >= len(TROUBLES)
    for line in lines:
        name, *arguments = shlex.split(line)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        known = {option for one in command.params for option in one.opts}
        given = {one.split("=")[0] for one in arguments if one.startswith("-")}
        assert given <= known, line
