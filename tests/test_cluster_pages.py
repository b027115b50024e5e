# SPDX-License-Identifier: Apache-2.0
"""The pages about Slurm and Kubernetes: the script of the job runs, and the manifests are well-formed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from ckptmgr import CheckpointManager
from ckptmgr.cli import cli
from tests.cli.running import process_env

PAGES = Path(__file__).parents[1] / "docs/how-to"

pytestmark = pytest.mark.skipif(
    not PAGES.exists(), reason="needs the sources: the pages are not installed"
)
_ASKED = """
import os, signal
heard, tell = os.pipe()
signal.signal(signal.SIGUSR1, lambda *_: os.write(tell, b"x"))
def wait_for_the_signal():
    print("ready", flush=True)
    os.read(heard, 1)
"""


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def job(directory: Path) -> subprocess.Popen[str]:
    """Start the script of the page."""
    path = f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", blocks("slurm", "bash")[0]],
        cwd=directory,
        env=process_env(PATH=path, SLURM_JOB_ID="77"),
        stdout=subprocess.PIPE,
        text=True,
    )


def test_job_of_slurm_saves_its_last_step_asks_for_another_turn_and_goes_on(tmp_path: Path) -> None:
    (program,) = blocks("slurm", "python")
    line = "    step += 1\n"
    assert line in program
    program = program.replace(line, f"{line}        step == 3 and wait_for_the_signal()\n")
    (tmp_path / "train.py").write_text(_ASKED + program.replace("1000", "20"))
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" >> asked\n')
    scontrol.chmod(0o700)
    with job(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        first.send_signal(signal.SIGUSR1)
        first.communicate()
    assert first.returncode == 0
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    stopped = CheckpointManager(tmp_path / "runs/net").latest()
    assert stopped is not None
    assert 3 <= stopped.step < 20
    with job(tmp_path) as second:
        second.communicate()
    assert second.returncode == 0
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    ended = CheckpointManager(tmp_path / "runs/net").latest()
    assert ended is not None
    assert ended.step == 20


def test_pages_train_with_the_same_program() -> None:
    assert blocks("slurm", "python") == blocks("kubernetes", "python")


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [yaml.safe_load(block) for block in blocks("kubernetes", "yaml")]


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    found: dict[str, Any] = spec.get("jobTemplate", manifest)["spec"]["template"]["spec"]
    return found


def test_manifests_of_kubernetes_mount_the_volumes_that_they_name() -> None:
    found = manifests()
    assert [one["kind"] for one in found] == ["Job", "Job", "CronJob"]
    for manifest in found:
        pod = pod_of(manifest)
        containers = pod.get("initContainers", []) + pod["containers"]
        mounts = {mount["name"] for one in containers for mount in one["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_pod_has_more_time_than_the_grace_of_the_program() -> None:
    pod = pod_of(manifests()[0])
    (program,) = blocks("kubernetes", "python")
    (grace_s,) = re.findall(r"grace=(\d+)", program)
    assert pod["terminationGracePeriodSeconds"] > int(grace_s)
    assert pod_of(manifests()[1])["initContainers"][0]["restartPolicy"] == "Always"


def test_command_of_the_cron_job_parses() -> None:
    (container,) = pod_of(manifests()[2])["containers"]
    program, name, *arguments = container["command"]
    assert program == "ckptmgr"
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    command.make_context(name, arguments)
