# SPDX-License-Identifier: Apache-2.0
"""Keys from the environment, files, commands, descriptors and people: every encoding and every refusal."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.source_names import looks_like_key, spells_key
from ckptmgr.crypto.keys.sources import load_key, load_secret
from ckptmgr.crypto.keys.trusted_files import MAX_SOURCE_BYTES

SECRETS = [bytes(range(200, 200 + size)) for size in (16, 24, 32)]
SECRET = SECRETS[2]


def key_file(folder: Path, content: bytes, *, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return f"file:{path}"


def command(code: str) -> str:
    return f"cmd:{sys.executable} -c '{code}'"


@pytest.mark.parametrize("secret", SECRETS, ids=len)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"], ids=repr)
def test_environment_text_in_every_encoding_gives_the_key(
    secret: bytes, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        secret.hex(),
        secret.hex().upper(),
        base64.b64encode(secret).decode(),
        base64.urlsafe_b64encode(secret).decode(),
        f"hex:{secret.hex()}",
        f"base64:{base64.b64encode(secret).decode()}",
    ]
    for text in texts:
        monkeypatch.setenv("MODEL_KEY", text + end)
        assert load_key("env:MODEL_KEY") == Key(secret)


def test_environment_raw_prefix_gives_the_bytes_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", "raw:0123456789ABCDEF")
    assert load_key("env:MODEL_KEY") == Key(b"0123456789ABCDEF")


def test_environment_raw_text_without_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", "0123456789ABCDEF")
    with pytest.raises(KeySourceError, match="the 16 bytes of the key source are no key"):
        load_key("env:MODEL_KEY")


def test_environment_hex_that_is_also_base64_is_hex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", "00112233445566778899aabbccddeeff")
    assert load_key("env:MODEL_KEY") == Key(bytes.fromhex("00112233445566778899aabbccddeeff"))


@pytest.mark.parametrize("name", ["CKPTMGR_NO_SUCH_KEY", "", "a=b", "\ud800"], ids=repr)
def test_environment_without_the_variable_is_refused(name: str) -> None:
    with pytest.raises(KeySourceError, match="the environment has no variable"):
        load_key(f"env:{name}")


@pytest.mark.parametrize("secret", SECRETS, ids=len)
def test_file_of_raw_bytes_gives_the_key(secret: bytes, tmp_path: Path) -> None:
    assert load_key(key_file(tmp_path, secret)) == Key(secret)


def test_file_of_ascii_bytes_that_spell_nothing_gives_the_key(tmp_path: Path) -> None:
    assert load_key(key_file(tmp_path, b"0123456789ABCDEF")) == Key(b"0123456789ABCDEF")


@pytest.mark.parametrize(
    "content",
    [
        b"00112233445566778899aabbccddeeff",
        base64.b64encode(SECRETS[0]),
        base64.b64encode(SECRETS[1]),
    ],
    ids=["32 hex digits", "24 base64 characters", "32 base64 characters"],
)
def test_file_that_is_raw_or_text_is_refused_and_a_newline_decides(
    content: bytes, tmp_path: Path
) -> None:
    with pytest.raises(KeySourceError, match="could be the key itself or its text") as caught:
        load_key(key_file(tmp_path, content))
    assert caught.value.hint == "put hex:, base64: or raw: in front of it"
    assert len(load_key(key_file(tmp_path, content + b"\n")).raw) < len(content)
    if len(content) == 32:
        assert load_key(key_file(tmp_path, b"raw:" + content)) == Key(content)


@given(content=st.binary(max_size=80))
def test_descriptor_with_any_content_gives_a_key_or_a_key_source_error(content: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    try:
        key = load_key(f"fd:{reader}")
    except KeySourceError:
        assert len(content) not in (16, 24, 32) or content.isascii()
    else:
        assert len(key.raw) in (16, 24, 32)
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    "content",
    [b"hex:00", b"base64:AAAA", b"raw:short", b"rot13:00112233445566778899aabbccddeeff", b"\n"],
    ids=repr,
)
def test_file_with_a_prefix_and_no_key_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(KeySourceError, match="are no key"):
        load_key(key_file(tmp_path, content))


def test_file_that_is_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeySourceError, match="empty"):
        load_key(key_file(tmp_path, b""))


def test_file_that_is_huge_is_refused_after_its_first_bytes(tmp_path: Path) -> None:
    with pytest.raises(KeySourceError, match=f"more than {MAX_SOURCE_BYTES} bytes"):
        load_key(key_file(tmp_path, b"a" * 10 * MAX_SOURCE_BYTES))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_file_that_others_can_use_is_refused(mode: int, tmp_path: Path) -> None:
    source = key_file(tmp_path, SECRET, mode=mode)
    with pytest.raises(KeySourceError, match=f"can be used by others .mode {mode:04o}") as caught:
        load_key(source)
    assert caught.value.hint is not None


def test_file_that_is_a_link_to_a_private_file_is_followed(tmp_path: Path) -> None:
    key_file(tmp_path, SECRET)
    (tmp_path / "link").symlink_to("key")
    assert load_key(f"file:{tmp_path / 'link'}") == Key(SECRET)


def test_file_in_the_home_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file(tmp_path, SECRET)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_key("file:~/key") == Key(SECRET)


@pytest.mark.parametrize("name", ["", "absent", "a\0b", "~nobody-of-this-name/key", "\ud800"])
def test_file_that_cannot_be_opened_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeySourceError):
        load_key(f"file:{name}")


def test_file_that_is_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(KeySourceError, match="not a regular file"):
        load_key(f"file:{tmp_path / 'fifo'}")


def test_command_output_gives_the_key() -> None:
    assert load_key(f"cmd:echo {SECRET.hex()}") == Key(SECRET)


def test_command_raw_output_gives_the_key() -> None:
    code = f"import sys; sys.stdout.buffer.write(bytes(range({SECRET[0]}, {SECRET[0] + 32})))"
    assert load_key(command(code)) == Key(SECRET)


def test_command_is_not_run_by_a_shell(tmp_path: Path) -> None:
    with pytest.raises(KeySourceError):
        load_key(f"cmd:true; touch {tmp_path / 'touched'}")
    assert not (tmp_path / "touched").exists()


def test_command_that_fails_is_refused_without_its_output() -> None:
    with pytest.raises(KeySourceError, match="failed with status 3") as caught:
        load_key(command(f'print(bytes.fromhex("{SECRET.hex()}").hex()); exit(3)'))
    assert SECRET.hex() not in f"{caught.value} {caught.value.hint}"


def test_command_that_takes_too_long_is_refused() -> None:
    with pytest.raises(KeySourceError, match="gave no key within"):
        load_key("cmd:sleep 60", timeout_s=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("echo 'unfinished", "unfinished quotation"),
        ("/no/such/program", "'/no/such/program' cannot be run"),
        ("a\0b", "cannot be run"),
        (f"{SECRET.hex()}", "looks like a key"),
    ],
)
def test_command_that_cannot_be_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(KeySourceError, match=message):
        load_key(f"cmd:{text}")


def test_descriptor_is_read_to_its_end() -> None:
    reader, writer = os.pipe()
    os.write(writer, SECRET.hex().encode())
    os.close(writer)
    assert load_key(f"fd:{reader}") == Key(SECRET)
    os.close(reader)


@pytest.mark.parametrize("number", ["", "x", "-1", "3.0", "99999999999", "٣", "987654"])
def test_descriptor_that_is_none_is_refused(number: str) -> None:
    with pytest.raises(KeySourceError, match="key descriptor"):
        load_key(f"fd:{number}")


def test_prompt_answer_gives_the_key() -> None:
    assert load_key("prompt:", prompt=lambda _: SECRET.hex()) == Key(SECRET)


def no_terminal(question: str) -> str:
    raise EOFError(question)


def test_prompt_without_an_answer_is_refused() -> None:
    with pytest.raises(KeySourceError, match="nobody answered"):
        load_key("prompt:", prompt=no_terminal)


@pytest.mark.parametrize("content", [b"1234", b"1234\n", b"1234\r\n"], ids=repr)
def test_secret_is_the_text_of_its_source_less_one_newline(content: bytes, tmp_path: Path) -> None:
    assert load_secret(key_file(tmp_path, content)) == "1234"


def test_secret_from_a_person_is_asked_for_as_a_pin() -> None:
    assert load_secret("prompt:", prompt=lambda question: f"<{question}>") == "<PIN: >"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"1" * (MAX_SOURCE_BYTES + 1)], ids=len)
def test_secret_that_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(KeySourceError):
        load_secret(key_file(tmp_path, content))


def test_secret_in_a_file_that_others_can_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeySourceError, match="can be used by others"):
        load_secret(key_file(tmp_path, b"1234", mode=0o644))


@pytest.mark.parametrize(
    "source",
    [
        SECRET.hex(),
        base64.b64encode(SECRET).decode(),
        f"hex:{SECRET.hex()}",
        f"env:{SECRET.hex()}",
        f"file:{base64.b64encode(SECRET).decode()}",
        f"cmd:{SECRET.hex()}",
    ],
)
def test_literal_key_as_source_is_refused_and_not_repeated(source: str) -> None:
    with pytest.raises(KeySourceError) as caught:
        load_key(source)
    shown = f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    assert SECRET.hex()[:8] not in shown
    assert base64.b64encode(SECRET).decode()[:8] not in shown


@pytest.mark.parametrize("scheme", ["env", "file", "cmd", "wrapped"])
@pytest.mark.parametrize(
    "form",
    [
        f"hex:{SECRET.hex()}",
        f"HEX:{SECRET.hex()[:12]}",
        "raw:0123456789ABCDEF",
        "env:raw:0123456789ABCDEF",
        f"base64:{base64.b64encode(SECRET).decode()}",
        base64.b64encode(SECRET).decode().rstrip("="),
        base64.urlsafe_b64encode(SECRET).decode(),
        f"{SECRET.hex()} ",
        f"{SECRET.hex()}0",
        SECRET.hex()[:24],
        SECRET.hex(":"),
        SECRET.hex("-", 4),
        "/" * 21 + "w==",
        "AAAAAAAA/AAAAAAAA/AAAA==",
    ],
)
def test_key_in_place_of_a_name_is_not_repeated(scheme: str, form: str) -> None:
    with pytest.raises(KeySourceError, match="not shown") as caught:
        load_key(f"{scheme}:{form}")
    assert form[4:16] not in f"{caught.value} {caught.value.hint}"


@given(secret=st.sampled_from((16, 24, 32)).flatmap(lambda n: st.binary(min_size=n, max_size=n)))
def test_any_key_in_place_of_a_name_looks_like_one(secret: bytes) -> None:
    texts = [base64.b64encode(secret).decode(), base64.urlsafe_b64encode(secret).decode()]
    for text in (secret.hex(), secret.hex().upper(), *texts, *(t.rstrip("=") for t in texts)):
        assert looks_like_key(text)
        assert spells_key(text)


@pytest.mark.parametrize(
    "text",
    ["hex:0", "BASE64:x", "raw:secret", " " + "0f" * 16, ":".join(["0f"] * 24), "0f1e " * 16],
)
def test_key_in_groups_or_with_its_encoding_is_spelled(text: str) -> None:
    assert spells_key(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "latest",
        "runs/" + "0f" * 16,
        "0f" * 16 + ".ckpt",
        "0f" * 20,
        "550e8400-e29b-41d4-a716-446655440000",
        "resnet50-imagenet-batch256-run12",
        "runs/llama/checkpoints",
        "best:perplexity:min",
        "1000..5000",
    ],
)
def test_name_of_a_checkpoint_spells_no_key(text: str) -> None:
    assert not spells_key(text)


@pytest.mark.parametrize(
    "name",
    [
        "/srv/ada/keys/run-7f3a.key",
        "/srv/ada/experiments/checkpoints/secrets/run_20241121140321",
        "/mnt/NFS/Projects/LargeLanguageModel/keys/tmpk3x9q2ab/run.key",
        "~/.config/ckptmgr/production-key",
        "very-long-name-of-a-key-file-for-training",
    ],
)
def test_path_that_does_not_exist_is_shown(name: str) -> None:
    with pytest.raises(KeySourceError, match="cannot be opened") as caught:
        load_key(f"file:{name}")
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["MODEL_KEY", "CKPTMGR_PRODUCTION_TRAINING_KEY_2", "_k"])
def test_variable_that_does_not_exist_is_shown(name: str) -> None:
    with pytest.raises(KeySourceError, match=f"no variable '{name}'"):
        load_key(f"env:{name}")


@pytest.mark.parametrize("name", ["a=b", "0123456789ABCDEF", "A" * 65, "correct horse", ""])
def test_text_that_names_no_variable_is_not_shown(name: str) -> None:
    with pytest.raises(KeySourceError, match=r"of this name \(not shown") as caught:
        load_key(f"env:{name}")
    assert not name or name not in str(caught.value)


def test_literal_key_as_source_is_told_where_keys_belong() -> None:
    with pytest.raises(KeySourceError) as caught:
        load_key(SECRET.hex())
    assert caught.value.hint is not None
    assert "never put a key on a command line" in caught.value.hint
