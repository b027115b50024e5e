# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr tag` and `untag`, and where tags count."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import Checkpoint, CheckpointConfig, CheckpointManager, PolicyTextError, parse_policy
from ckptmgr.policy.tag_rules import Tagged
from ckptmgr.store import change_leases
from tests.cli.running import key_file, run, run_json
from tests.cli.schemas import run_with_schema
from tests.support import api
from tests.support.saved import GOLDEN_FILES, KEY, save_run, tree_of


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three checkpoints, of which the first is tagged."""
    save_run(tmp_path, [10, 20, 30])
    answer = run("tag", "10", "release-1", "paper", "--dir", tmp_path)
    assert (answer.exit_code, answer.stdout) == (0, "net-1_10.ckpt  step 10  release-1 paper\n")
    return tmp_path


def tags(directory: Path) -> dict[int, list[str]]:
    return {item["step"]: item["tags"] for item in run_json("ls", directory)["items"]}


def test_tags_are_listed_inspected_and_selected(runs: Path) -> None:
    assert tags(runs) == {10: ["release-1", "paper"], 20: [], 30: []}
    assert run("ls", runs).stdout.splitlines()[1].endswith("release-1 paper")
    assert "tags       release-1 paper" in run("inspect", "10", "--dir", runs).stdout
    assert run("verify", "@tag:paper", "--dir", runs, "--json").exit_code == 0
    assert run("verify", "@tag:rel*", "--dir", runs).stdout.startswith("ok          net-1_10.ckpt")
    missing = run("verify", "@tag:other", "--dir", runs)
    assert (missing.exit_code, "no checkpoint is '@tag:other'" in missing.stderr) == (10, True)
    assert run("ls", runs, "--filter", "tag=paper").stdout.count(".ckpt") == 0
    assert [item["step"] for item in run_json("ls", runs, "--filter", "tag=pap*")["items"]] == [10]


def test_tag_twice_is_one_and_untag_removes(runs: Path) -> None:
    assert run("tag", "10", "paper", "best", "--dir", runs).exit_code == 0
    assert tags(runs)[10] == ["release-1", "paper", "best"]
    assert run("untag", "@tag:best", "paper", "--dir", runs).stdout.endswith("release-1 best\n")
    answer = run("untag", "10", "--all", "--dir", runs)
    assert answer.stdout == "net-1_10.ckpt  step 10  not tagged\n"
    assert tags(runs) == {10: [], 20: [], 30: []}


def test_json_and_quiet_have_the_changed_checkpoint(runs: Path) -> None:
    document = run_with_schema("tag", "20", "best", "--dir", runs)
    assert (document["schema"], document["summary"]) == ("ckptmgr.tag/1", {"tags": ["best"]})
    assert document["items"][0]["tags"] == ["best"]
    assert run_with_schema("untag", "20", "best", "--dir", runs)["summary"] == {"tags": []}
    run("tag", "20", "paper", "--dir", runs)
    assert run("untag", "20", "paper", "--dir", runs, "-q").stdout == f"{runs}/net-2_10.ckpt\n"


def test_tag_changes_neither_the_id_nor_what_a_run_resumes(runs: Path) -> None:
    before = [item["id"] for item in run_json("ls", runs)["items"]]
    run("tag", "30", "best", "--dir", runs)
    assert [item["id"] for item in run_json("ls", runs)["items"]] == before
    assert run("verify", runs).exit_code == 0
    with CheckpointManager(runs, CheckpointConfig(), prefix="net") as manager:
        found = manager.latest()
        assert found is not None
        assert (found.step, found.tags) == (30, ("best",))


def test_tag_keeps_nothing_unless_the_policy_asks(runs: Path) -> None:
    run("tag", "20", "best", "--dir", runs)
    dry = ("prune", runs, "--dry-run", "--keep")
    assert run(*dry, "last(1)").stdout.count("\ndrop ") == 2
    kept = run(*dry, "last(1) | tagged('rel*')").stdout
    assert kept.count("\ndrop ") == 1
    assert "tagged release-1" in kept


def test_run_keeps_what_was_tagged_and_the_newest(tmp_path: Path) -> None:
    for steps in ((1, 2), (3, 4)):
        with CheckpointManager(tmp_path, CheckpointConfig(keep="tagged(good)"), prefix="n") as own:
            for step in steps:
                own.save(step, {"w": np.zeros(1)})
        run("tag", str(steps[-1]), "good", "--dir", tmp_path)
    assert tags(tmp_path) == {2: ["good"], 4: ["good"]}


def test_rule_is_written_as_it_is_read() -> None:
    for name in ("release", "paper 2", "rel*"):
        assert parse_policy(str(Tagged(name))).rules == (Tagged(name),)
    with pytest.raises(PolicyTextError, match="expected the name of a tag"):
        parse_policy("tagged(3)")
    with pytest.raises(PolicyTextError):
        parse_policy("tagged('')")


def test_tags_survive_another_key_and_a_new_format_of_the_file(tmp_path: Path) -> None:
    config = CheckpointConfig(enc_key=KEY.raw, format="safetensors")
    with CheckpointManager(tmp_path / "runs", config, prefix="net") as manager:
        manager.save(10, {"w": np.zeros(1000)})
    key = ("--key", key_file(tmp_path))
    refused = run("tag", "10", "paper", "--dir", tmp_path / "runs")
    assert refused.exit_code == 12
    assert run("tag", "10", "paper", "--dir", tmp_path / "runs", *key).exit_code == 0
    assert run("convert", tmp_path / "runs", "--compression", "zstd", *key).exit_code == 0
    (found,) = api.listed(tmp_path / "runs")
    assert found.tags == ("paper",)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("tag", "10", ""), 2, "is no name of a tag"),
        (("tag", "10", "two words"), 2, "'two words' is no name of a tag"),
        (("tag", "10", "-x"), 2, "no such option"),
        (("tag", "10", "ab.cd." * 12), 2, "is no name of a tag"),
        (("tag", "10"), 2, "missing argument"),
        (("tag", "99", "x"), 10, "no checkpoint is '99'"),
        (("untag", "10"), 2, "untag takes names, or --all"),
        (("untag", "10", "paper", "--all"), 2, "untag takes names, or --all"),
        (("untag", "10", "other"), 10, "it has no tag 'other'; its tags: release-1, paper"),
        (("untag", "20", "other"), 10, "its tags: none"),
    ],
)
def test_unusable_call_is_refused_and_changes_nothing(
    runs: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    before = tree_of(runs)
    answer = run(*arguments, "--dir", runs)
    assert (answer.exit_code, message in answer.stderr) == (code, True), answer.stderr
    assert {name: one[0] for name, one in tree_of(runs).items() if "lease" not in name} == {
        name: one[0] for name, one in before.items() if "lease" not in name
    }


def test_file_without_a_manifest_cannot_be_tagged(tmp_path: Path) -> None:
    (tmp_path / "net-1_1.ckpt").write_bytes((GOLDEN_FILES / "slices_sync.ckpt").read_bytes())
    answer = run("tag", tmp_path / "net-1_1.ckpt", "x")
    assert (answer.exit_code, "cannot be pinned or tagged" in answer.stderr) == (2, True)


def test_checkpoint_that_is_removed_before_the_lease_is_not_found(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = change_leases.lease_of_checkpoint

    def late(store: api.Place, checkpoint: Checkpoint) -> contextlib.AbstractContextManager[None]:
        checkpoint.path.unlink()
        return real(store, checkpoint)

    monkeypatch.setattr(change_leases, "lease_of_checkpoint", late)
    answer = run("tag", "20", "x", "--dir", runs)
    assert (answer.exit_code, "was removed meanwhile" in answer.stderr) == (10, True)


def test_live_run_keeps_its_manifests(runs: Path) -> None:
    with api.place(runs).lease("net"):
        assert run("tag", "20", "x", "--dir", runs).exit_code == 11


def test_name_that_looks_like_a_key_is_not_shown(runs: Path) -> None:
    answer = run("tag", "20", KEY.raw.hex(), "--dir", runs)
    assert (answer.exit_code, KEY.raw.hex() in answer.output) == (2, False)
