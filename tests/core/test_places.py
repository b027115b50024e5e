# SPDX-License-Identifier: Apache-2.0
"""Texts that were meant as an address, or that a shell should have expanded, make no local folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptmgr
from ckptmgr import CheckpointManager, Mirror, ModelCheckpoint
from ckptmgr.core.urls import SCHEMES, is_url
from ckptmgr.event_log import JsonLinesObserver
from ckptmgr.events import Event
from ckptmgr.parallel import SharedDirectory
from tests.cli.running import run

STATE = {"w": np.zeros(3)}
_MEANT_AS_ADDRESSES = [
    " s3://bkt/run",
    "'s3://bkt/run'",
    '"s3://bkt/run"',
    '"s3://bkt/run',
    "\ufeffs3://bkt/run",
    "\u200bs3://bkt/run",
    "\ns3://bkt/run",
    "<s3://bkt/run>",
    "s3:bkt/run",
    "S3://bkt/run",
    "gs:bkt",
    "dbfs:/run",
    "hdfs:/run",
    "abfss://c@account/run",
    "runs/s3://bkt/run",
    "file:run",
    "runs:/a",
    "tos:/bkt/run",
    "weird+scheme:/run",
]
_NOT_EXPANDED = [
    "~/run",
    "~",
    "~root/run",
    "${HOME}/run",
    "$HOME/run",
    "runs/${USER}/a",
    "runs/$RUN",
]


def save(text: str) -> None:
    with CheckpointManager(text, prefix="net") as manager:
        manager.save(1, STATE)


def note_event(text: str) -> None:
    JsonLinesObserver(f"{text}/events.jsonl")(Event(name="load", at=1.0))


_SURFACES: list[Callable[[str], object]] = [
    save,
    lambda text: save(Path(text)),  # type: ignore[arg-type]
    lambda text: ModelCheckpoint(directory=text),
    lambda text: ckptmgr.save_state(STATE, f"{text}/net.ckpt"),
    lambda text: ckptmgr.save_checkpoint([{"name": "w", "data": STATE["w"]}], f"{text}/net.ckpt"),
    lambda text: ckptmgr.load_state(f"{text}/net.ckpt"),
    lambda text: ckptmgr.export_weights("x.ckpt", text),
    note_event,
    lambda text: SharedDirectory(f"{text}/meeting", rank=0, world=1, session="a"),
]
_IDS = ["run", "run of a Path", "callback", "save_state", "save_checkpoint", "load_state"]
_IDS += ["export", "events", "ranks"]


@pytest.mark.parametrize("surface", _SURFACES, ids=_IDS)
@pytest.mark.parametrize("text", [*_MEANT_AS_ADDRESSES, *_NOT_EXPANDED])
def test_place_that_is_none_is_refused_and_makes_nothing(
    surface: Callable[[str], object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(ValueError, match=r"address|expanded"):
        surface(text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [one for one in _MEANT_AS_ADDRESSES if "@" not in one])
def test_refusal_of_an_address_shows_what_was_read(text: str) -> None:
    with pytest.raises(ValueError, match="is no address of an object store") as caught:
        CheckpointManager(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", [*_MEANT_AS_ADDRESSES, *_NOT_EXPANDED])
@pytest.mark.parametrize(
    "command",
    [
        ("ls",),
        ("verify",),
        ("prune", "--keep", "last(1)", "--yes"),
        ("report",),
        ("watch", "--once"),
        ("copy", "1", "--dir"),
    ],
    ids=lambda command: command[0],
)
def test_command_refuses_a_place_that_is_none(
    command: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    first, *rest = command
    arguments = [first, *rest, text, "copies"] if first == "copy" else [first, text, *rest]
    refused = run(*arguments)
    assert refused.exit_code == 2, refused.output
    assert "internal" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_folder_that_was_made_under_such_a_name_is_still_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("~/run").mkdir(parents=True)
    save("~/run")
    assert (tmp_path / "~/run/net-1.ckpt").exists()


@pytest.mark.parametrize(
    "text", ["runs/a~b", "a:b/run", "run$1x$", "s3/run", "gs", "~nobody-here/run", "price$5"]
)
def test_path_with_such_characters_is_a_path(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(text)
    assert (tmp_path / text / "net-1.ckpt").exists()


@given(
    st.sampled_from(["", " ", "\t", "'", '"', "\ufeff", "<", " '"]),
    st.sampled_from(SCHEMES),
    st.sampled_from(["://", ":/", ":"]),
    st.text(max_size=5),
)
def test_text_that_begins_as_an_address_is_no_path(
    before: str, scheme: str, after: str, rest: str
) -> None:
    assert is_url(before + scheme + after + rest)
    assert is_url(before + scheme.upper() + after + rest)


@pytest.mark.parametrize(
    "name", ["net-3.ckpt", "net-3.safetensors.ckpe", "net-3.ckpt.manifest.json"]
)
@pytest.mark.parametrize("place", ["s3://bkt/run", "runs"])
def test_name_of_a_checkpoint_is_refused_as_a_run(
    place: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"{place}/{name}"
    with pytest.raises(ValueError, match="is the name of a checkpoint") as caught:
        CheckpointManager(text)
    assert text in str(caught.value)
    if place.startswith("s3:"):
        with pytest.raises(ValueError, match="is the name of a checkpoint"):
            Mirror(text)
        refused = run("copy", tmp_path, text)
        assert refused.exit_code == 2
        assert "is the name of a checkpoint" in refused.stderr
        refused = run("watch", tmp_path, "--once", "--mirror", text)
        assert refused.exit_code == 2
        assert "is the name of a checkpoint" in refused.stderr
    else:
        with pytest.raises(ValueError, match="is the name of a checkpoint"):
            ModelCheckpoint(directory=text)
        assert run("copy", "memory://elsewhere/run", text).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_directory_with_the_name_of_a_checkpoint_is_taken(tmp_path: Path) -> None:
    directory = tmp_path / "step-3.ckpt"
    directory.mkdir()
    save(str(directory))
    assert os.listdir(directory)


@pytest.mark.parametrize("text", ["s3://bkt/run", "gs://bkt/run"])
def test_address_that_a_function_of_paths_made_absolute_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for made in (os.path.abspath(text), Path(text).resolve(), Path(text).absolute()):
        with pytest.raises(ValueError, match="pass the address itself"):
            save(made)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
