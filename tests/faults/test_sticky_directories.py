# SPDX-License-Identifier: Apache-2.0
"""Rights of a user who can add files to a sticky directory, but not remove those of others."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import CheckpointConfig, CheckpointManager, Resumption, load_state
from ckptmgr.io.temp_names import temp_name
from ckptmgr.parallel import SharedDirectory
from tests.cli.running import run
from tests.remote.buckets import new_url
from tests.support import api
from tests.support.planted import dead_token, describing, plant, plant_temp
from tests.support.saved import KEY
from tests.support.users import GROUP, USER, as_user

STRANGER = 12399
STATE = {"w": np.zeros(8, np.float32)}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a sticky directory of USER, in one that everybody can reach."""
    above = Path(tempfile.mkdtemp())
    try:
        above.chmod(0o755)
        directory = above / "shared"
        directory.mkdir()
        os.chown(directory, USER, GROUP)
        directory.chmod(0o1777)
        train(above / "imports", 1)
        run("prune", above / "imports", "--keep", "last(1)", "--yes")
        yield directory
    finally:
        shutil.rmtree(above)


def train(runs: Path, *steps: int, enc_key: bytes | None = None) -> Resumption:
    config = CheckpointConfig(keep="last(3)", enc_key=enc_key)
    with CheckpointManager(runs, config, prefix="net") as manager:
        found = manager.resume(dict(STATE))
        for step in steps:
            manager.save(step, STATE)
    return found


def user_trains(runs: Path, *steps: int) -> None:
    as_user(lambda: str(train(runs, *steps)))


def own_steps(runs: Path) -> list[int]:
    return sorted(one.step for one in api.listed(runs) if one.state is api.State.OK)


def content_of(runs: Path, step: int) -> bytes:
    return (runs / f"net-{step}.ckpt").read_bytes()


def plant_copies(runs: Path, *steps: int, by: int = STRANGER) -> None:
    """Add copies of a checkpoint as later steps of its run."""
    content = (runs / "net-1.ckpt").read_bytes()
    for step in steps:
        plant(runs, f"net-{step}.ckpt", content, step=step, by=by)


def test_checkpoints_of_a_stranger_take_no_place_under_the_policy_of_a_run(shared: Path) -> None:
    user_trains(shared, 1, 2, 3)
    plant_copies(shared, 100, 101, 102)
    user_trains(shared, 200)
    assert own_steps(shared) == [2, 3, 200]


@pytest.mark.parametrize("who", ["owner", "root"])
def test_checkpoints_of_a_stranger_take_no_place_in_a_prune(shared: Path, who: str) -> None:
    user_trains(shared, 1, 2, 3)
    plant_copies(shared, 100, 101, 102)

    def prune() -> object:
        done = run("prune", shared, "--keep", "last(2)", "--yes", "--now")
        return [done.exit_code, done.stdout]

    answer: Any = as_user(prune) if who == "owner" else prune()
    code, printed = answer
    assert code == 0, printed
    assert own_steps(shared) == [2, 3]
    assert "3 checkpoints other-owner: no rule counts it" in printed
    assert {f"net-{step}.ckpt" for step in (100, 101, 102)} <= {p.name for p in shared.iterdir()}


def test_resume_passes_over_the_checkpoint_of_a_stranger_and_names_it(shared: Path) -> None:
    user_trains(shared, 1, 2)
    plant_copies(shared, 100)
    found = train(shared)
    assert found.step == 2
    assert [one.checkpoint.step for one in found.skipped] == [100]
    assert f"belongs to uid {STRANGER}" in found.skipped[0].reason
    assert found.doubt is None


def test_resume_takes_the_checkpoint_of_a_stranger_with_doubt_where_there_is_no_other(
    shared: Path,
) -> None:
    train(shared, 1)
    for path in shared.iterdir():
        os.chown(path, STRANGER, -1)
    found = train(shared)
    assert (found.step, found.skipped) == (1, ())
    assert found.doubt is not None
    assert f"belongs to uid {STRANGER}" in found.doubt


def test_listing_names_the_checkpoint_of_a_stranger(shared: Path) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    listed = run("ls", shared)
    assert "other-owner" in listed.stdout
    assert f"belongs to uid {STRANGER}" in listed.stdout


def test_latest_and_best_mean_no_checkpoint_of_a_stranger(shared: Path) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    assert "net-1.ckpt" in run("inspect", "latest", "--dir", shared).stdout
    with CheckpointManager(shared, CheckpointConfig(), prefix="net") as manager:
        newest = manager.latest()
        assert newest is not None
        assert newest.step == 1


def test_bare_file_of_a_stranger_decides_nothing(shared: Path) -> None:
    user_trains(shared, 1)
    content = content_of(shared, 1)
    bare = shared / "net-9_1.ckpt"
    bare.write_bytes(content)
    os.chown(bare, STRANGER, -1)
    (found,) = [one for one in api.listed(shared) if one.name == bare.name]
    assert (found.state, found.is_countable) == (api.State.OTHER_OWNER, False)


def test_manifest_of_a_stranger_that_nobody_may_read_keeps_no_run_from_its_own(
    shared: Path,
) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    (shared / api.manifest_name("net-100.ckpt")).chmod(0o000)
    assert as_user(lambda: [train(shared).step]) == [1]


def test_temporary_manifest_of_a_stranger_removes_no_file_without_a_manifest(shared: Path) -> None:
    user_trains(shared, 1)
    content = content_of(shared, 1)
    bare = shared / "lenet-1_1.ckpt"
    bare.write_bytes(content)
    os.chown(bare, USER, GROUP)
    os.chown(plant_temp(shared, bare.name, content), STRANGER, -1)
    user_trains(shared, 2)
    train(shared, 3)
    assert bare.read_bytes() == content


def test_checkpoint_under_the_key_counts_whoever_brought_it(shared: Path) -> None:
    train(shared, 1, 2, enc_key=KEY.raw)
    for path in shared.glob("net-2.*"):
        os.chown(path, STRANGER, -1)
    found = train(shared, enc_key=KEY.raw)
    assert (found.step, found.skipped, found.doubt) == (2, (), None)


@pytest.mark.parametrize("mode", [0o777, 0o2775, 0o1755, 0o700])
def test_other_user_counts_where_the_directory_is_not_sticky_and_shared(
    shared: Path, mode: int
) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    shared.chmod(mode)
    assert own_steps(shared) == [1, 100]


@pytest.mark.parametrize("owner", [0, USER])
def test_checkpoints_of_root_and_of_the_owner_of_a_sticky_directory_count(
    shared: Path, owner: int
) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100, by=owner)
    assert as_user(lambda: own_steps(shared)) == [1, 100]


def test_number_of_a_stranger_does_not_end_the_saves_of_a_run(shared: Path) -> None:
    user_trains(shared, 1)
    content = content_of(shared, 1)
    huge = replace(describing(shared, "net-100.ckpt", content), sequence=(1 << 64) - 1)
    path = shared / api.manifest_name("net-100.ckpt")
    path.write_bytes(api.encode_manifest(huge))
    (shared / "net-100.ckpt").write_bytes(content)
    for one in (path, shared / "net-100.ckpt"):
        os.chown(one, STRANGER, -1)
    user_trains(shared, 2)
    assert own_steps(shared) == [1, 2]


@pytest.mark.slow
def test_what_a_stranger_adds_removes_nothing_of_others(shared: Path) -> None:
    model = shared.parent / "model"
    model.mkdir()
    shutil.copystat(shared, model)
    os.chown(model, USER, GROUP)
    user_trains(model, 1, 2, 3)

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["net-{}.ckpt", "net-{}_1.ckpt", "lenet-{}.safetensors"]),
                st.sampled_from([0, 2, 3, 4, 99, 1 << 40]),
                st.sampled_from(["whole", "manifest alone", "data alone", "temporary"]),
            ),
            min_size=1,
            max_size=5,
        ),
        st.sampled_from(["run", "prune", "rm", "verify"]),
    )
    def holds(planted: list[tuple[str, int, str]], act: str) -> None:
        runs = Path(tempfile.mkdtemp(dir=shared.parent)) / "runs"
        runs.parent.chmod(0o755)
        shutil.copytree(model, runs)
        os.chown(runs, USER, GROUP)
        for path in runs.iterdir():
            os.chown(path, USER, GROUP)
        content = content_of(runs, 1)
        for pattern, step, part in planted:
            name = pattern.format(step)
            if (runs / name).exists() or (runs / api.manifest_name(name)).exists():
                continue
            if part == "temporary":
                os.chown(plant_temp(runs, name, content), STRANGER, -1)
                continue
            data, described = plant(runs, name, content, step=step, by=STRANGER)
            if part == "manifest alone":
                data.unlink()
            elif part == "data alone":
                described.unlink()
        if act == "run":
            user_trains(runs, 50)
        else:
            arguments: dict[str, list[str]] = {
                "prune": ["prune", str(runs), "--keep", "last(3)", "--yes", "--now"],
                "rm": ["rm", "99", "--dir", str(runs), "--yes", "--now", "--force"],
                "verify": ["verify", str(runs), "--quarantine", "--yes"],
            }
            as_user(lambda: run(*arguments[act]).exit_code)
        left = [1, 2, 3] if act != "run" else [2, 3, 50]
        owned = [path.name for path in runs.glob("net-*.ckpt") if path.stat().st_uid == USER]
        assert sorted(owned) == [f"net-{step}.ckpt" for step in left]
        assert own_steps(runs) == left

    holds()


def test_manifest_of_a_stranger_beside_a_file_of_its_owner_is_passed_over(shared: Path) -> None:
    user_trains(shared, 1)
    bare = shared / "lenet-1_1.ckpt"
    bare.write_bytes(content_of(shared, 1))
    os.chown(bare, USER, GROUP)
    os.chmod(bare, 0o400)
    _, described = plant(shared, "lenet-1_1.ckpt", b"another content" * 20, by=STRANGER)
    bare.unlink()
    bare.write_bytes(content_of(shared, 1))
    os.chown(bare, USER, GROUP)
    for act in ("verify", "watch"):
        arguments = ["--once"] if act == "watch" else ["--yes"]
        run(act, shared, "--quarantine", *arguments)
        assert bare.read_bytes() == content_of(shared, 1)
    assert load_state(bare)["w"].shape == (8,)  # type: ignore[index]
    assert described.exists()


def test_checkpoint_of_a_stranger_is_not_rewritten_as_ones_own(shared: Path) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    path = shared / "net-100.ckpt"
    for command in (
        ("tag", path, "best"),
        ("pin", path),
        ("convert", shared, "--compression", "zstd"),
    ):
        done = run(*command)
        assert done.exit_code != 0, done.output
        assert "written again it would be yours" in done.stderr
    assert path.stat().st_uid == STRANGER
    assert train(shared).step == 1


def test_temporary_file_of_a_stranger_ends_no_manifest_whose_data_is_missing(shared: Path) -> None:
    user_trains(shared, 1, 2)
    content = content_of(shared, 2)
    (shared / "net-2.ckpt").unlink()
    temp = shared / temp_name("net-2.ckpt", token=dead_token(), series="net")
    temp.write_bytes(content)
    os.chown(temp, STRANGER, -1)
    found: Any = as_user(lambda: [train(shared).doubt])
    assert "net-2.ckpt" in found[0]
    assert (shared / api.manifest_name("net-2.ckpt")).exists()


def test_trash_of_a_stranger_hides_no_missing_data(shared: Path) -> None:
    user_trains(shared, 1, 2)
    (shared / "net-2.ckpt").unlink()
    trash = shared / ".ckptmgr-trash"
    trash.mkdir()
    os.chown(trash, STRANGER, -1)
    states = {one.step: one.state for one in api.listed(shared)}
    assert states == {1: api.State.OK, 2: api.State.MISSING}


def test_checkpoints_of_other_tools_of_a_stranger_take_no_place(shared: Path) -> None:
    def make(*steps: int, by: int) -> None:
        for step in steps:
            folder = shared / f"checkpoint-{step}"
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
            (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
            for path in (folder, *folder.iterdir()):
                os.chown(path, by, -1)

    make(10, 20, 30, by=USER)
    make(98, 99, by=STRANGER)
    done = run("prune", shared, "--keep", "last(2)", "--yes")
    assert done.exit_code == 0, done.stderr
    left = {path.name for path in shared.glob("checkpoint-*")}
    assert left == {f"checkpoint-{step}" for step in (20, 30, 98, 99)}


def test_folder_of_a_session_that_a_stranger_made_is_refused(shared: Path) -> None:
    folder = shared / "job-1"
    folder.mkdir()
    os.chown(folder, STRANGER, -1)
    with pytest.raises(PermissionError, match=f"belongs to uid {STRANGER}"):
        SharedDirectory(shared, rank=0, world=2, session="job-1")
    (shared / "job-2").symlink_to(folder)
    with pytest.raises(NotADirectoryError, match="is a link"):
        SharedDirectory(shared, rank=0, world=2, session="job-2")


def test_bare_file_of_a_stranger_stops_no_fresh_run(shared: Path) -> None:
    train(shared.parent / "elsewhere", 1)
    bare = shared / "net-1_1.ckpt"
    bare.write_bytes((shared.parent / "elsewhere/net-1.ckpt").read_bytes())
    os.chown(bare, STRANGER, -1)
    assert train(shared, 1).step == 0


def test_doctor_names_the_checkpoint_that_a_resume_takes(shared: Path) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    assert "net-1.ckpt (step 1) loads" in run("doctor", shared).stdout


def test_undo_passes_over_a_name_that_a_stranger_took(shared: Path) -> None:
    user_trains(shared, 1, 2, 3)
    assert run("prune", shared, "--keep", "last(1)", "--yes").exit_code == 0
    taken = shared / api.manifest_name("net-2.ckpt")
    taken.write_text("{}")
    os.chown(taken, STRANGER, -1)
    run("prune", shared, "--undo")
    assert own_steps(shared) == [1, 3]


def test_beginning_of_a_download_that_a_stranger_put_there_is_refused(shared: Path) -> None:
    elsewhere = shared.parent / "elsewhere"
    train(elsewhere, 1)
    url = new_url()
    assert run("copy", elsewhere, url).exit_code == 0
    manifest = api.place(elsewhere).read_manifest("net-1.ckpt")
    assert manifest is not None
    part = shared / f".{manifest.id[:32]}.{manifest.file.digest.total.hex()[:8]}.part"
    part.write_bytes((elsewhere / "net-1.ckpt").read_bytes())
    os.chown(part, STRANGER, -1)
    done = run("copy", url, shared)
    assert done.exit_code != 0
    assert f"belongs to uid {STRANGER}" in done.stderr
    assert not (shared / "net-1.ckpt").exists()
