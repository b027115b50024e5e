# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr rekey` and `ckptmgr reencrypt`: who opens what afterwards, messages, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptmgr.crypto.keys.pem import generate_pair
from tests.cli.running import run, run_json
from tests.cli.test_prune import Terminal
from tests.support import api
from tests.support.rekeying import NEW, OLD, OTHER, openers, ring, save_run
from tests.support.saved import flip, tree_of

HEAD = 2 * 4096


def source(directory: Path, key: api.Key) -> str:
    """Return a key as a source."""
    path = directory / f"{key.key_id}.key"
    path.touch(mode=0o600)
    path.write_text(key.raw.hex() + "\n")
    return f"file:{path}"


def text(directory: Path, name: str, content: bytes, *, mode: int = 0o600) -> str:
    """Return the source of a file."""
    path = directory / name
    path.write_bytes(content)
    path.chmod(mode)
    return f"file:{path}"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    save_run(directory=directory)
    return directory


@pytest.fixture
def rotation(tmp_path: Path) -> tuple[str, ...]:
    old, new = source(tmp_path, OLD), source(tmp_path, NEW)
    return ("--key", old, "--add", new, "--remove", old)


def who_opens(directory: Path) -> list[list[int]]:
    found = sorted(api.listed(directory), key=lambda one: one.name)
    return [openers(one, [ring(OLD), ring(NEW)]) for one in found]


def test_rekey_rotates_a_directory_and_says_so(runs: Path, rotation: tuple[str, ...]) -> None:
    result = run("rekey", runs, *rotation, "--yes")
    assert result.exit_code == 0, result.stderr
    assert f"key {OLD.key_id}" in result.stdout
    assert f"key {NEW.key_id}" in result.stdout
    assert "2 checkpoints changed" in result.stdout
    assert "may have kept a data key" in result.stderr
    assert who_opens(runs) == [[1], [1]]
    again = run("rekey", runs, *rotation, "--yes")
    assert (again.exit_code, "0 checkpoints changed" in again.stdout) == (0, True)


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_rekey_with_both_keys_at_hand_may_be_done_twice(
    tmp_path: Path, rotation: tuple[str, ...], form: str
) -> None:
    runs = tmp_path / "runs"
    save_run(directory=runs, form=form)
    both = ("--key", source(tmp_path, NEW), *rotation)
    first = next(runs.glob(f"*-1.{form}*"))
    assert run("rekey", first, *both, "--yes").exit_code == 0  # as if it had been cut after that
    result = run("rekey", runs, *both, "--yes")
    assert (result.exit_code, "1 checkpoint changed" in result.stdout) == (0, True)
    again = run("rekey", runs, *both, "--yes")
    assert (again.exit_code, "0 checkpoints changed" in again.stdout) == (0, True), again.stderr
    assert who_opens(runs) == [[1], [1]]


def test_rekey_of_a_ckpt_never_proposes_to_remove_the_key_that_is_added(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    save_run(directory=runs, form="ckpt")
    old, new, other = (source(tmp_path, key) for key in (OLD, NEW, OTHER))
    result = run("rekey", runs, "--key", old, "--add", old, "--add", new, "--yes")
    assert result.exit_code == 13
    assert "--remove" not in result.stderr
    assert f"--add one key, the one that opens it now ({OLD.key_id})" in result.stderr
    result = run("rekey", runs, "--key", old, "--add", other, "--yes")
    assert f"--add SOURCE --remove {OLD.key_id}" in result.stderr


def test_rekey_in_json_tells_what_was_done(runs: Path, rotation: tuple[str, ...]) -> None:
    assert "\n2 checkpoints would change\n" in run("rekey", runs, *rotation, "--dry-run").stdout
    planned = run_json("rekey", runs, *rotation, "--dry-run")
    assert planned["schema"] == "ckptmgr.rekey/1"
    assert planned["summary"] == {"planned": 2, "done": 0, "failed": 0}
    assert who_opens(runs) == [[0], [0]]
    done = run_json("rekey", runs, *rotation, "--yes")
    assert done["summary"] == {"planned": 2, "done": 2, "failed": 0}
    (item, _) = done["items"]
    assert (item["action"], item["is_done"]) == ("header", True)
    assert (item["before"], item["after"]) == ([f"key {OLD.key_id}"], [f"key {NEW.key_id}"])


@pytest.mark.hpke
def test_rekey_removes_by_key_id_and_adds_several(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    save_run(directory=runs, steps=1)
    private, public = generate_pair("x25519")
    alice = text(tmp_path, "alice.pem.pub", public, mode=0o644)
    phrase = f"passphrase:{text(tmp_path, 'phrase', b'correct horse')}"
    key = source(tmp_path, OLD)
    add = ("--add", alice, "--add", phrase)
    assert run("rekey", runs, "--key", key, *add, "--yes").exit_code == 0
    result = run("rekey", runs, "--key", phrase, "--remove", OLD.key_id, "--yes")
    assert result.exit_code == 0, result.stderr
    for checkpoint in api.listed(runs):
        assert openers(checkpoint, [ring(OLD), ring(private), ring("correct horse")]) == [1, 2]
    listed = run_json("ls", runs)["items"][0]
    assert listed["opened_by"] == [
        f"X25519 {ring(public).key_id}",
        "passphrase (argon2id, of a run)",
    ]
    private_source = text(tmp_path, "alice.pem", private)
    for command in ("verify", "ls", "inspect"):
        target = runs if command != "inspect" else next(runs.glob("*.ckpe"))
        result = run(command, target, "--key", private_source)
        assert result.exit_code == 0, result.stderr
    out = tmp_path / "out.safetensors"
    result = run("decrypt", next(runs.glob("*.ckpe")), "-o", out, "--key", phrase)
    assert result.exit_code == 0, result.stderr


def test_rekey_without_consent_changes_nothing(runs: Path, rotation: tuple[str, ...]) -> None:
    before = tree_of(runs)
    result = run("rekey", runs, *rotation)
    assert result.exit_code == 13
    assert "stdin is not a terminal" in result.stderr
    assert tree_of(runs) == before


def test_rekey_touches_nothing_when_the_key_does_not_open_everything(
    runs: Path, tmp_path: Path
) -> None:
    save_run(directory=tmp_path / "other", key=OTHER, steps=1)
    for path in (tmp_path / "other").glob("net*"):
        path.rename(runs / path.name.replace("net-1", "net-9"))
    (runs / api.manifest_name("net-9.safetensors.ckpe")).unlink()
    before = tree_of(runs)
    old, new = source(tmp_path, OLD), source(tmp_path, NEW)
    result = run("rekey", runs, "--key", old, "--add", new, "--yes")
    assert result.exit_code == 12
    assert "net-9" in result.stderr
    assert tree_of(runs) == before


def test_rekey_goes_on_after_a_damaged_file_and_says_that_it_did(
    runs: Path, rotation: tuple[str, ...]
) -> None:
    path = runs / "net-1.safetensors.ckpe"
    flip(path, 4090)
    flip(path, 4096 + 4090)
    result = run("rekey", runs, *rotation, "--yes")
    assert result.exit_code == 3
    assert "net-1.safetensors.ckpe" in result.stderr
    assert who_opens(runs)[1] == [1]
    alone = run("rekey", path, *rotation, "--yes", "--json")
    assert alone.exit_code == 1
    assert json.loads(alone.stderr)["error"] == "TamperedCheckpoint"


def test_rekey_mends_a_damaged_header_copy(runs: Path, tmp_path: Path) -> None:
    path = runs / "net-1.safetensors.ckpe"
    flip(path, 100)
    key = source(tmp_path, OLD)
    assert "header copy A: damaged" in run("verify", path, "--key", key).stdout
    result = run("rekey", runs, "--key", key, "--yes", "-q")
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    assert "header copy" not in run("verify", path, "--key", key).stdout


def test_rekey_leaves_plain_files_alone(tmp_path: Path, rotation: tuple[str, ...]) -> None:
    from tests.support.saved import save_run as save_plain

    save_plain(tmp_path / "runs", [1])
    path = tmp_path / "runs" / "net-1_1.ckpt"
    (tmp_path / "runs" / api.manifest_name(path.name)).unlink()
    result = run("rekey", path, *rotation, "--yes")
    assert (result.exit_code, "plain" in result.stdout) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--add", "0011"), 2),
        (("--remove", "00112233445566zz"), 2),
        (("--add", "env:NOT_THERE"), 12),
        (("--key", "PUBLIC", "--add", "env:NOT_THERE"), 12),
    ],
)
def test_rekey_with_a_wrong_source_is_refused(
    runs: Path, tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    public = text(tmp_path, "pub", generate_pair("x25519")[1], mode=0o644)
    given = [public if word == "PUBLIC" else word for word in arguments]
    key = () if "--key" in given else ("--key", source(tmp_path, OLD))
    assert run("rekey", runs, *key, *given, "--yes").exit_code == code


def test_rekey_without_a_key_is_refused(runs: Path) -> None:
    assert run("rekey", runs, "--yes").exit_code == 12


@pytest.mark.parametrize("form", ["safetensors", "ckpt"])
def test_reencrypt_gives_files_a_new_data_key(tmp_path: Path, form: str) -> None:
    directory = tmp_path / "runs"
    save_run(directory=directory, form=form)
    old, new = source(tmp_path, OLD), source(tmp_path, NEW)
    before = {path: path.read_bytes()[HEAD:] for path in directory.glob("net-?.[cs]*[et]")}
    plan = ("reencrypt", directory, "--key", old, "--to", new)
    assert run_json(*plan, "--dry-run")["summary"]["planned"] == 2
    result = run(*plan, "--yes")
    assert result.exit_code == 0, result.stderr
    assert who_opens(directory) == [[1], [1]]
    for path, payload in before.items():
        assert path.read_bytes()[HEAD:] != payload or form == "ckpt"
    assert run_json(*plan, "--yes")["summary"]["planned"] == 0
    steps = [one["step"] for one in run_json("ls", directory, "--key", new)["items"]]
    assert steps == [1, 2]


@pytest.mark.hpke
def test_reencrypt_to_several_at_once(runs: Path, tmp_path: Path) -> None:
    private, public = generate_pair("mlkem768-x25519")
    alice = text(tmp_path, "alice.pem.pub", public, mode=0o644)
    old, new = source(tmp_path, OLD), source(tmp_path, NEW)
    result = run("reencrypt", runs, "--key", old, "--to", alice, "--to", new, "--yes")
    assert result.exit_code == 0, result.stderr
    for checkpoint in api.listed(runs):
        assert openers(checkpoint, [ring(OLD), ring(private), ring(NEW)]) == [1, 2]


@pytest.mark.hpke
@pytest.mark.parametrize("kind", ["x25519", "mlkem768-x25519"])
def test_pair_of_keygen_encrypts_and_opens(tmp_path: Path, kind: str) -> None:
    document = run_json("keygen", "--type", kind, "--out", tmp_path / "alice.pem")
    (item,) = document["items"]
    public = Path(item["public_path"])
    assert (tmp_path / "alice.pem").stat().st_mode & 0o777 == 0o600
    assert public.read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----")
    runs = tmp_path / "runs"
    save_run(directory=runs, steps=1)
    add = ("--add", f"file:{public}", "--remove", OLD.key_id)
    done = run_json("rekey", runs, "--key", source(tmp_path, OLD), *add, "--yes")
    assert done["items"][0]["after"][0].endswith(item["key_id"])
    opened = run_json("verify", runs, "--key", f"file:{tmp_path / 'alice.pem'}")
    assert [one["status"] for one in opened["items"]] == ["ok"]
    refused = run("verify", runs, "--key", f"file:{public}")
    assert refused.exit_code == 12
    assert "only public keys" in refused.stdout


def test_answer_decides_at_a_terminal(runs: Path, rotation: tuple[str, ...]) -> None:
    terminal = Terminal(runs, *rotation, command="rekey")
    assert b"Change the keys of 2 checkpoints? [y/N]: " in terminal.question()
    assert terminal.answer(b"n\n")[0] == 1
    assert who_opens(runs) == [[0], [0]]
    terminal = Terminal(runs, *rotation, command="rekey")
    terminal.question()
    code, stdout = terminal.answer(b"y\n")
    assert (code, b"2 checkpoints changed" in stdout) == (0, True)
    assert who_opens(runs) == [[1], [1]]


def test_rekey_that_the_disk_refuses_is_partly_done(
    runs: Path, rotation: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "backup").hardlink_to(runs / "net-1.safetensors.ckpe")
    result = run("rekey", runs, *rotation, "--yes")
    assert result.exit_code == 3
    assert "has other names" in result.stderr
    assert "1 checkpoint changed, 1 failed" in result.stdout
    # Its manifest can be checked with both keys by now, and the file opens with the old one.
    assert who_opens(runs) == [[0], [1]]
    (tmp_path / "backup").unlink()
    assert run("rekey", runs, *rotation, "--yes").exit_code == 0
    assert who_opens(runs) == [[1], [1]]


@pytest.mark.hpke
def test_encrypt_to_a_public_key_and_decrypt_with_the_private_one(tmp_path: Path) -> None:
    private, public = generate_pair("x25519")
    alice = text(tmp_path, "alice.pem", private)
    plain, out = tmp_path / "net.safetensors", tmp_path / "out.safetensors"
    save_file({"w": np.arange(3.0)}, plain)
    sealed = tmp_path / "sealed.safetensors.ckpe"
    key = text(tmp_path, "alice.pem.pub", public, mode=0o644)
    assert run("encrypt", plain, "-o", sealed, "--key", key).exit_code == 0
    (tmp_path / api.manifest_name(sealed.name)).unlink()
    assert run_json("inspect", sealed)["summary"]["opened_by"] == [f"X25519 {ring(public).key_id}"]
    assert run("decrypt", sealed, "-o", out, "--key", key).exit_code == 12
    result = run("decrypt", sealed, "-o", out, "--key", alice)
    assert result.exit_code == 0, result.stderr
    assert out.read_bytes() == plain.read_bytes()


def test_inspect_tells_everything_that_opens_a_file(runs: Path, tmp_path: Path) -> None:
    key = source(tmp_path, OLD)
    assert run("rekey", runs, "--key", key, "--add", source(tmp_path, NEW), "--yes").exit_code == 0
    words = run("inspect", next(runs.glob("*.ckpe"))).stdout.split()
    assert f"opens with key {OLD.key_id}, key {NEW.key_id}" in " ".join(words)


class Person:
    """Somebody who is asked for secrets, and answers in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.questions: list[str] = []
        self._answers = iter(answers)
        monkeypatch.setattr("getpass.getpass", self._answer)

    def _answer(self, question: str) -> str:
        self.questions.append(question)
        return next(self._answers)


@pytest.mark.parametrize("command", [("rekey", "--add"), ("reencrypt", "--to")])
def test_new_passphrase_with_a_slip_changes_nothing(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, str]
) -> None:
    before = tree_of(runs)
    name, option = command
    person = Person(monkeypatch, "correct horse", "corect horse")
    key = source(tmp_path, OLD)
    result = run(name, runs, "--key", key, option, "passphrase:prompt:", "--yes")
    assert "the two answers differ" in result.stderr
    assert result.exit_code != 0
    assert person.questions == [
        f"Passphrase for {option}: ",
        f"Passphrase for {option}, once more: ",
    ]
    assert tree_of(runs) == before


def test_encrypt_asks_twice_and_decrypt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "net.safetensors")
    key = ("--key", "passphrase:prompt:")
    sealed, opened = tmp_path / "net.safetensors.ckpe", tmp_path / "opened.safetensors"
    person = Person(monkeypatch, "correct horse", "correct horse", "correct horse")
    assert run("encrypt", tmp_path / "net.safetensors", "-o", sealed, *key).exit_code == 0
    assert run("decrypt", sealed, "-o", opened, *key).exit_code == 0
    assert len(person.questions) == 3
    assert opened.read_bytes() == (tmp_path / "net.safetensors").read_bytes()


def test_removal_of_a_passphrase_that_opens_nothing_is_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = source(tmp_path, OLD)
    phrase = f"passphrase:{text(tmp_path, 'phrase', b'horse')}"
    assert run("rekey", runs, "--key", key, "--add", phrase, "--yes").exit_code == 0
    before = tree_of(runs)
    person = Person(monkeypatch, "hrose")
    result = run("rekey", runs, "--key", key, "--remove", "passphrase:prompt:", "--yes", "-q")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the passphrase of --remove opens none of them; nothing was changed" in result.stderr
    assert person.questions == ["Passphrase for --remove: "]
    assert tree_of(runs) == before


def test_passphrase_that_was_replaced_before_is_not_refused(runs: Path, tmp_path: Path) -> None:
    phrase = f"passphrase:{text(tmp_path, 'phrase', b'horse')}"
    change = ("--add", source(tmp_path, NEW), "--remove", phrase, "--yes")
    start = ("--key", source(tmp_path, OLD), "--add", phrase, "--remove", OLD.key_id, "--yes")
    assert run("rekey", runs, *start).exit_code == 0
    assert run("rekey", runs, "--key", phrase, *change).exit_code == 0
    again = run("rekey", runs, "--key", phrase, *change)
    assert again.exit_code == 0
    assert "--remove (passphrase (argon2id, of a run)): opens none of them" in again.stderr


@pytest.mark.parametrize("form", ["safetensors", "ckpt"])
def test_removal_of_a_key_that_opens_nothing_is_said(tmp_path: Path, form: str) -> None:
    runs = tmp_path / "runs"
    save_run(directory=runs, form=form)
    removed = ("--remove", "00112233445566aa", "--remove", source(tmp_path, OTHER))
    result = run("rekey", runs, "--key", source(tmp_path, OLD), *removed, "--yes", "-q")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "--remove 00112233445566aa: none of them opens with this key" in result.stderr
    assert f"--remove (key {OTHER.key_id}): opens none of them" in result.stderr


@pytest.mark.parametrize("form", ["safetensors", "ckpt"])
def test_removal_with_a_key_that_opens_nothing_is_refused(tmp_path: Path, form: str) -> None:
    runs = tmp_path / "runs"
    save_run(directory=runs, form=form)
    key = source(tmp_path, OTHER)
    result = run("rekey", runs, "--key", key, "--remove", "00112233445566aa", "--yes")
    assert result.exit_code == 12, result.stderr


@pytest.mark.parametrize("by_id", [True, False])
def test_key_that_removed_itself_is_not_refused_when_that_is_done_again(
    runs: Path, tmp_path: Path, by_id: bool
) -> None:
    old, new = source(tmp_path, OLD), source(tmp_path, NEW)
    assert run("rekey", runs, "--key", old, "--add", new, "--yes").exit_code == 0
    first = sorted(runs.glob("*.ckpe"))[0]
    change = ("--key", old, "--remove", OLD.key_id if by_id else old, "--yes")
    assert run("rekey", first, *change).exit_code == 0
    again = run("rekey", runs, *change)
    assert (again.exit_code, "opens" in again.stderr) == (0, False)
    assert who_opens(runs) == [[1], [1]]


@pytest.fixture
def thrown(runs: Path, tmp_path: Path) -> Path:
    """A run whose older checkpoint is in the trash, under the old key."""
    key = source(tmp_path, OLD)
    assert run("prune", runs, "--keep", "last(1)", "--yes", "--key", key).exit_code == 0
    assert len(list(runs.glob("*.ckpe"))) == 1
    return runs


@pytest.mark.parametrize("command", ["rekey", "reencrypt"])
def test_change_of_a_directory_includes_its_trash(
    thrown: Path, tmp_path: Path, rotation: tuple[str, ...], command: str
) -> None:
    new = source(tmp_path, NEW)
    change = rotation if command == "rekey" else (*rotation[:2], "--to", new)
    result = run(command, thrown, *change, "--yes")
    assert (result.exit_code, "2 checkpoints changed" in result.stdout) == (0, True), result.stderr
    assert " (trash)" in result.stdout
    again = run(command, thrown, *change, "--yes")
    assert (again.exit_code, "0 checkpoints changed" in again.stdout) == (0, True)
    assert run("prune", thrown, "--undo", "--yes", "--key", new).exit_code == 0
    assert who_opens(thrown) == [[1], [1]]


def test_change_of_one_checkpoint_leaves_the_trash(thrown: Path, rotation: tuple[str, ...]) -> None:
    trash = tree_of(thrown / ".ckptmgr-trash")
    assert run("rekey", "latest", "--dir", thrown, *rotation, "--yes").exit_code == 0
    assert tree_of(thrown / ".ckptmgr-trash") == trash


def test_dry_run_shows_the_trash_and_changes_nothing(
    thrown: Path, rotation: tuple[str, ...]
) -> None:
    before = tree_of(thrown)
    result = run("rekey", thrown, *rotation, "--dry-run")
    assert (result.exit_code, "2 checkpoints would change" in result.stdout) == (0, True)
    assert tree_of(thrown) == before


def test_checkpoint_in_the_trash_under_another_key_is_named_and_stops_nothing(
    thrown: Path, tmp_path: Path, rotation: tuple[str, ...]
) -> None:
    assert run("rekey", "latest", "--dir", thrown, *rotation, "--yes").exit_code == 0
    new, other = source(tmp_path, NEW), source(tmp_path, OTHER)
    change = ("--key", new, "--add", other, "--remove", new)
    result = run("rekey", thrown, *change, "--yes")
    assert result.exit_code == 3
    assert "1 checkpoint changed, 1 failed" in result.stdout
    assert "is in the trash, and keeps its keys" in result.stderr
    assert run("prune", thrown, "--grace", "0s", "--key", other, "--yes").exit_code == 0
    assert not (thrown / ".ckptmgr-trash").exists()
    assert run("rekey", thrown, *change, "--yes").exit_code == 0


def test_trash_that_is_a_link_is_not_followed(
    thrown: Path, tmp_path: Path, rotation: tuple[str, ...]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (thrown / ".ckptmgr-trash").rename(elsewhere)
    (thrown / ".ckptmgr-trash").symlink_to(elsewhere)
    before = tree_of(elsewhere)
    result = run("rekey", thrown, *rotation, "--yes")
    assert "1 checkpoint changed" in result.stdout
    assert tree_of(elsewhere) == before


def test_mirror_that_is_not_reached_is_named(runs: Path, rotation: tuple[str, ...]) -> None:
    (runs / ".net.mirror").write_text("s3://bucket/run")
    result = run("rekey", runs, *rotation, "--yes")
    assert result.exit_code == 0
    assert f"s3://bucket/run, the mirror of {runs}, is as it was" in result.stderr
    assert f"ckptmgr copy {runs} s3://bucket/run" in result.stderr
    assert "What is only there keeps its keys" in result.stderr
