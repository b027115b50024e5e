# SPDX-License-Identifier: Apache-2.0
"""No key in anything a person, a log or a bug report could see."""

from __future__ import annotations

import base64
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from traceback import TracebackException

import pytest

from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.sources import load_key
from ckptmgr.crypto.mindspore.blocks import BlockSealer, open_blocks
from ckptmgr.formats.source import BytesSource
from tests.crypto.mindspore.sealing import MODES, seal, split, unseal

SECRET = b"\xc0\xff\xee-Top-Secret!!"
KEY = Key(SECRET)
FORMS = (
    SECRET.hex(),
    base64.b64encode(SECRET).decode(),
    base64.urlsafe_b64encode(SECRET).decode(),
    repr(SECRET)[2:-1],
    SECRET.decode("latin-1"),
    "Top-Secret",
)


def assert_hidden(shown: str) -> None:
    for form in FORMS:
        assert form.lower() not in shown.lower()


def failures(mode: str) -> list[Callable[[], object]]:
    file = seal(bytes(100), mode, key=KEY)
    flipped = file[:60] + bytes([file[60] ^ 1]) + file[61:]
    records = split(file, mode)
    return [
        lambda: unseal(file, mode, key=Key(SECRET[::-1])),
        lambda: unseal(file[:-1], mode, key=KEY),
        lambda: unseal(flipped, mode, key=KEY),
        lambda: unseal(records[0], mode, key=KEY),
        lambda: unseal(b"".join(records[1:]), mode, key=KEY),
        lambda: unseal(b"plain", mode, key=KEY),
        lambda: unseal(file, "SM4-GCM", key=KEY),
        lambda: unseal(file, "SM4-CBC", key=Key(SECRET + SECRET)),
        lambda: Key(SECRET[:-1]),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_failures_of_every_kind_hide_the_key(
    mode: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    for fail in failures(mode):
        with pytest.raises(CryptoError) as caught:
            fail()
        error = caught.value
        assert_hidden(f"{error!r} {error} {error.hint} {error.args}")
        assert_hidden("".join(traceback.format_exception(error)))
    assert_hidden(caplog.text + "".join(capfd.readouterr()))


@pytest.mark.parametrize("mode", MODES)
def test_objects_that_hold_the_key_hide_it(mode: str) -> None:
    source = open_blocks(BytesSource(seal(b"weights", mode, key=KEY)), KEY, mode)
    sealer = BlockSealer(KEY, mode, plaintext_size=7)
    assert_hidden(f"{KEY!r} {KEY} {source!r} {sealer!r} {vars(source)} {vars(sealer)}")


def test_key_sources_of_every_kind_hide_what_they_gave(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = SECRET.hex() + "00"
    monkeypatch.setenv("MODEL_KEY", wrong)
    for source in ("env:MODEL_KEY", f"cmd:echo {wrong}", f"cmd:false {wrong}", "prompt:"):
        with pytest.raises(CryptoError) as caught:
            load_key(source, prompt=lambda _: wrong)
        assert_hidden("".join(traceback.format_exception(caught.value)).replace(repr(source), ""))
    assert_hidden("".join(capfd.readouterr()))


def locals_of_refused(source: str) -> str:
    """Return a bug report with local variables, about a source that is refused."""
    try:
        load_key(source)
    except CryptoError as error:
        return "".join(TracebackException.from_exception(error, capture_locals=True).format())
    raise AssertionError("not refused")


@pytest.mark.parametrize(
    "content",
    [SECRET.hex().encode(), SECRET + b"\n", base64.b64encode(SECRET) + b"\n\n"],
    ids=["raw or hex", "a newline too many", "two newlines too many"],
)
def test_locals_of_what_reads_a_source_that_gives_no_key_hide_what_it_gave(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.key"
    file.write_bytes(content)
    file.chmod(0o600)
    monkeypatch.setenv("MODEL_KEY", SECRET.hex() + "00")
    for source in (f"file:{file}", f"cmd:cat {file}", "env:MODEL_KEY"):
        assert_hidden(locals_of_refused(source))


def test_locals_of_what_refuses_a_file_for_all_or_a_failed_command_hide_the_key(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.key"
    file.write_bytes(SECRET)
    file.chmod(0o644)
    for source in (f"file:{file}", f"cmd:cat {file} {tmp_path}/none"):
        assert_hidden(locals_of_refused(source))
