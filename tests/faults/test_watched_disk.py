# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr watch` beside a run on a disk that fills, and on one that is unmounted and comes back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.watching import training, watching
from tests.support.saved import save_run

pytestmark = [pytest.mark.root, pytest.mark.slow]

NUMBERS = 100_000  # 0.8 MB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty tmpfs of 3 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount(place)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)


def mount(place: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")


def test_disk_without_room_for_the_next_save_is_an_alarm_until_there_is_room(
    small_disk: Path,
) -> None:
    runs = small_disk / "runs"
    runs.mkdir()
    with watching(runs, "--poll", "1s") as watch, training(runs) as trainer:
        for step in (1, 2):
            assert trainer.save(step, numbers=NUMBERS) == "done"
        alarm = watch.until("alarm")
        assert alarm["alarm"] == "disk"
        assert alarm["message"].startswith("the next save of net does not fit the disk: 1.8 MiB")
        assert trainer.save(3, numbers=NUMBERS) == "StoreFull"
        for name in ("net-1.safetensors", "net-1.safetensors.manifest.json"):
            (runs / name).unlink()
        watch.until("cleared", alarm="disk")
        assert trainer.save(4, numbers=NUMBERS) == "done"
        watch.until("alarm", alarm="disk")
        trainer.close()
        watch.until("cleared", alarm="disk")
        assert watch.stop() == 0


def test_state_on_a_full_disk_is_given_up_and_the_watch_goes_on(
    small_disk: Path, tmp_path: Path
) -> None:
    (small_disk / "filler").write_bytes(bytes(3 << 20))
    runs = tmp_path / "runs"
    save_run(runs, [10])
    with watching(runs, "--state", small_disk / "state.json") as watch:
        assert "No space left" in watch.until("note")["message"]
        watch.until("verified", status="ok")
        assert watch.stop() == 0


def test_disk_that_is_unmounted_is_an_alarm_until_it_is_back(small_disk: Path) -> None:
    runs = small_disk / "runs"
    save_run(runs, [10])
    with watching(runs, "--poll", "1s") as watch:
        watch.until("verified")
        subprocess.run(["umount", "--lazy", str(small_disk)], check=True)
        assert "gone" in watch.until("alarm", alarm="directory")["message"]
        mount(small_disk)
        save_run(runs, [20])
        watch.until("cleared", alarm="directory")
        watch.until("verified", status="ok")
        assert watch.stop() == 0
