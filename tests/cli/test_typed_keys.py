# SPDX-License-Identifier: Apache-2.0
"""A key that is typed where a path, a selector or a value belongs is not repeated, and no file gets its name."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ckptmgr.cli import cli
from tests.cli.running import run
from tests.cli.test_secrets import HELD, Transcript, save, transcript

__all__ = ["transcript"]  # the fixture

BASE64 = base64.b64encode(HELD.raw).decode()
TYPED = {
    "hex": HELD.raw.hex(),
    "capitals": HELD.raw.hex().upper(),
    "colons": HELD.raw.hex(":"),
    "stated": f"hex:{HELD.raw.hex()}",
    "base64": BASE64,
    "url": base64.urlsafe_b64encode(HELD.raw).decode().rstrip("="),
}
REQUIRED = {
    "decrypt": ("-o", "out"),
    "encrypt": ("-o", "out"),
    "transform": ("-o", "out"),
    "unify": ("-o", "out"),
    "merge": ("-o", "out"),
    "keygen": ("-o", "out"),
    "convert": ("--compression", "zstd"),
    "export": ("--hf", "-o", "out"),
    "diff": (".",),
    "tag": ("release",),
    "config": ("show",),
    "untag": ("--all",),
    "simulate": ("last(",),
    "reencrypt": ("--to", "env:NOBODY"),
    "sign": ("--private-key", "env:NOBODY"),
    "watch": ("--once",),
}
# Words of the person's own, which a listing or a manifest repeats.
FREE = ("series", "name", "reason", "prefix", "pattern", "context", "expect_id")


def slips(name: str, secret: str, runs: Path) -> Iterator[tuple[str, ...]]:
    """Yield command lines with a secret in the place of each argument and each value of a command."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    required = REQUIRED.get(name, ())
    for param in command.params:
        if isinstance(param, click.Argument):
            yield (name, secret, *required)
        elif isinstance(param, click.Option) and not (param.is_flag or param.name in FREE):
            others = () if param.opts[0] in required else required
            target = () if name == "keygen" else (str(runs),)
            yield (name, *target, param.opts[-1], secret, *others)
            yield (name, *target, f"{param.opts[-1]}={secret}", *others)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test changes."""
    folder = tmp_path_factory.mktemp("typed") / "runs"
    save(folder, HELD, "AES-GCM", None)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(cli.list_commands(click.Context(cli))) - {"help"}))
def test_key_in_the_place_of_any_value_is_not_repeated(
    name: str,
    runs: Path,
    tmp_path: Path,
    transcript: Transcript,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    count = 0
    for secret in TYPED.values():
        for line in slips(name, secret, runs):
            for option in ((), ("--json",)):
                result = transcript.add_result(run("--debug", *line, *option))
                assert result.exit_code != 0, line
                count += 1
        shown = b"".join(transcript.shown).decode()
        assert not any(secret[start : start + 12] in shown for start in range(len(secret) - 11))
    assert count >= len(TYPED)
    transcript.add_files(tmp_path, but=())
    assert transcript.leaks([HELD]) == []


@pytest.mark.parametrize("typed", TYPED.values(), ids=TYPED)
def test_key_in_the_place_of_a_path_is_refused_with_the_way_out(typed: str) -> None:
    result = run("verify", typed)
    assert result.exit_code == 2
    assert result.stderr == (
        "ckptmgr: error: a path looks like a key (not shown)\n"
        "ckptmgr: hint: a key comes by --key env:NAME or file:PATH, and one that was on a command line is no secret any more;"
        " write ./NAME for a file of such a name\n"
    )


def test_missing_path_that_is_no_key_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "net-3.ckpt", tmp_path / HELD.raw.hex(), Path("runs/resnet50-best")):
        result = run("verify", path)
        assert result.exit_code == 10
        assert f"{path}: no such checkpoint" in result.stderr


def test_file_with_a_name_like_a_key_is_used(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / HELD.raw.hex()).symlink_to(runs)
    result = run("ls", HELD.raw.hex())
    assert result.exit_code == 0, result.stderr
    assert "3 checkpoints" in result.stdout


def test_path_with_a_folder_in_front_may_look_like_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = f"./{HELD.raw.hex()}"
    assert run("keygen", "-o", out).exit_code == 0
    assert Path(out).is_file()
