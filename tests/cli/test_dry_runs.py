# SPDX-License-Identifier: Apache-2.0
"""A dry run, and every command that only shows, leave names, bytes, modes and times as they were."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import run
from tests.cli.world import World, commands, make_world
from tests.support.foreign import TOOLS, any_run

KEY = "--key file:{w}/run.key"
DRY_RUNS = {
    "prune": (
        "{w}/runs --keep last(1) --dry-run",
        "{w}/runs --keep last(1) --dry-run --verbose --json",
        "{w}/runs --keep last(1) --dry-run --now --yes",
        "{w}/damaged --keep last(1) --dry-run",
        "{w}/hf --keep last(1) --dry-run",
        "{w}/pruned --undo --dry-run",
        "{w}/pruned --keep last(1) --grace 0s --dry-run",
        "{w}/pruned-hf --undo --dry-run",
        f"{{w}}/sealed --keep last(1) --dry-run {KEY}",
    ),
    "rm": ("1 --dir {w}/runs --dry-run", "1 --dir {w}/runs --dry-run --now --yes --force"),
    "rekey": (
        f"{{w}}/sealed {KEY} --add file:{{w}}/new.key --dry-run",
        f"{{w}}/sealed {KEY} --add file:{{w}}/new.key --dry-run --yes --json",
    ),
    "reencrypt": (f"{{w}}/sealed {KEY} --to file:{{w}}/new.key --dry-run --yes",),
}
READERS = (
    "ls {w}/runs",
    "ls {w}/damaged --all --json",
    "ls -r {w}",
    "ls {w}/hf",
    "ls {w}/set",
    "ls {w}/empty",
    f"ls {{w}}/sealed {KEY}",
    "inspect 2 --dir {w}/runs --stats",
    f"inspect {{w}}/sealed/net-1_1.safetensors.ckpe {KEY}",
    "inspect {w}/set/{set}",
    "diff {w}/runs {w}/tensors",
    "diff 1 2 --dir {w}/runs",
    "stats {w}",
    "simulate last(1) {w}/runs",
    "report {w}/runs --terminal",
    "report {w}/runs --csv",
    "report {w}/runs --markdown",
    "report {w}/runs --json",
    "report {w}/runs -o -",
    "config show {w}/runs --origin",
    "prune {w}/runs --keep last(1) --check",
    "prune {w}/hf --keep last(1) --check",
    "verify {w}/hf",
    "help exit-codes",
    "completion bash",
)
REFUSED = (
    "rm latest --dir {w}/runs --yes",
    "prune {w}/runs --yes",
    "prune {w}/runs --keep last(1)",
    "export 99 --dir {w}/runs --hf -o {w}/out",
    "transform {w}/empty -o {w}/out",
    "encrypt {w}/runs/net-1_1.ckpt -o {w}/out.ckpt",
    f"decrypt {{w}}/damaged/net-1_1.ckpt -o {{w}}/out.ckpt {KEY}",
)

Entry = tuple[bytes, int, int, int]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Directories of every kind that commands meet."""
    return make_world(tmp_path_factory.mktemp("world"))


def snapshot(directory: Path) -> dict[str, Entry]:
    """Return content, mode, time of change and inode of a directory and everything in it, hidden or not."""
    return {str(path): _entry(path) for path in _below(directory)}


def _below(directory: Path) -> Iterator[Path]:
    yield directory
    for folder, folders, files in os.walk(directory):
        yield from (Path(folder, name) for name in (*folders, *files))


def _entry(path: Path) -> Entry:
    status = path.lstat()
    content = b""
    if path.is_symlink():
        content = os.fsencode(path.readlink())
    elif path.is_file():
        content = path.read_bytes()
    return content, status.st_mode, status.st_mtime_ns, status.st_ino


def changes(line: str, root: Path, set_name: str = "") -> tuple[int, set[str]]:
    """Run a command below `root/work`; return its exit code and the paths that it changed."""
    parts = [part.format(w=root / "work", set=set_name) for part in line.split(" ")]
    before = snapshot(root)
    result = run(*parts, now_s=4_000_000_000.0)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    after = snapshot(root)
    found = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return result.exit_code, {str(Path(path).relative_to(root)) for path in found}


def test_every_command_with_a_dry_run_is_tried() -> None:
    names = {
        name for name, one in commands() if any("--dry-run" in param.opts for param in one.params)
    }
    assert names == set(DRY_RUNS)


def test_dry_runs_readers_and_refusals_change_nothing(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.directory, tmp_path / "work", copy_function=shutil.copy2)
    dry_runs = [f"{name} {rest}" for name, lines in DRY_RUNS.items() for rest in lines]
    for lines, codes in ((dry_runs, (0,)), (READERS, (0, 1)), (REFUSED, (1, 2, 10, 12, 13))):
        for line in lines:
            code, changed = changes(line, tmp_path, world.set_name)
            assert code in codes, line
            assert changed == set(), line


def test_doctor_leaves_only_the_time_of_the_directory_that_it_tried(
    world: World, tmp_path: Path
) -> None:
    shutil.copytree(world.directory / "runs", tmp_path / "work", copy_function=shutil.copy2)
    before = snapshot(tmp_path)
    assert changes("doctor {w} --deep", tmp_path) == (0, {"work"})
    after = snapshot(tmp_path)
    directory = str(tmp_path / "work")
    assert {**after, directory: None} == {**before, directory: None}
    assert after[directory][1] == before[directory][1]
    assert "Writes a small file" in run("doctor", "--help").stdout


@pytest.mark.parametrize("tool", TOOLS)
def test_dry_runs_and_readers_change_nothing_of_another_tool(tool: str, tmp_path: Path) -> None:
    any_run(tool, tmp_path / "work")
    for line in (
        "prune {w} --keep last(1) --dry-run",
        "prune {w} --keep last(1) --check",
        "ls {w}",
        "ls -r {w}",
        "stats {w}",
        "verify {w} --deep",
        "inspect {w}",
        "diff {w} {w}",
        "report {w} --terminal",
        "simulate last(1) {w}",
        "config show {w}",
        "export {w} --hf -o {w}/out",
        "repair {w}",
        "rm latest --dir {w} --dry-run",
    ):
        assert changes(line, tmp_path)[1] == set(), line


def test_commands_that_only_show_make_no_folder_of_an_address(world: World, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "work").mkdir()
    assert (
        run("copy", world.directory / "runs", f"file://{tmp_path / 'work' / 'bucket'}").exit_code
        == 0
    )
    for place, code in (("bucket", 0), ("nothing", 10)):
        for line in (
            "ls file://{w}/" + place,
            "ls file://{w}/" + place + " --json",
            "verify file://{w}/" + place,
            "prune file://{w}/" + place + " --keep last(1) --dry-run",
        ):
            got, changed = changes(line, tmp_path)
            assert changed == set(), line
            assert got in (0, code), line
