# SPDX-License-Identifier: Apache-2.0
"""A key program gets keys through pipes only, and whatever it does wrong has a name."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import pytest

from ckptmgr.crypto.errors import KeySourceError
from ckptmgr.crypto.providers.exec import ExecProvider, open_exec
from ckptmgr.crypto.providers.provider import (
    KeyProvider,
    ProviderAnswerError,
    ProviderError,
    ProviderRefusedError,
    ProviderUnavailableError,
)
from ckptmgr.crypto.providers.run_key import RunKey, RunKeyReader
from tests.support.interrupts import pressing_ctrl_c

KEY = b"\xc0\xff\xee-Top-Secret!!"
CONTEXT = {"run": "7f"}

# A key program: the key-encryption key is its own affair.
HONEST = """
import base64, json, os, sys
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.exceptions import InvalidTag
request = json.load(sys.stdin)
kek = AESGCM(bytes(32))
aad = json.dumps(request["context"], sort_keys=True).encode()
if request["action"] == "wrap":
    nonce = os.urandom(12)
    blob = nonce + kek.encrypt(nonce, base64.b64decode(request["key"]), aad)
    answer = {"version": 1, "blob": base64.b64encode(blob).decode()}
else:
    blob = base64.b64decode(request["blob"])
    try:
        answer = {"version": 1, "key": base64.b64encode(kek.decrypt(blob[:12], blob[12:], aad)).decode()}
    except InvalidTag:
        print("AccessDenied: wrong context", file=sys.stderr)
        sys.exit(1)
print(json.dumps(answer))
"""


def honest() -> ExecProvider:
    return ExecProvider(command=(sys.executable, "-c", HONEST), timeout_s=60)


def printing(text: str) -> ExecProvider:
    return ExecProvider(command=("printf", "%s", text))


def failing(status: int, stderr: str) -> ExecProvider:
    code = f'printf %s "$1" >&2; exit {status}'
    return ExecProvider(command=("sh", "-c", code, "sh", stderr))


def test_honest_program_wraps_and_unwraps() -> None:
    provider: KeyProvider = honest()
    blob = provider.wrap(KEY, CONTEXT)
    assert KEY not in blob
    assert provider.unwrap(blob, CONTEXT) == KEY


def test_honest_program_refuses_another_context() -> None:
    provider = honest()
    blob = provider.wrap(KEY, CONTEXT)
    with pytest.raises(ProviderRefusedError, match="refused") as caught:
        provider.unwrap(blob, {"run": "80"})
    assert caught.value.hint == "it said: AccessDenied: wrong context"


def test_honest_program_serves_a_run() -> None:
    provider = honest()
    wrapped = RunKey(provider, CONTEXT).take()
    assert RunKeyReader(provider).unwrap(wrapped.blob, CONTEXT) == wrapped.key
    assert wrapped.provider_key_id == Path(sys.executable).name


def test_request_is_the_documented_one(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    provider = ExecProvider(
        command=("sh", "-c", f'cat > "{seen}"; printf \'{{"version": 1, "blob": "AAAA"}}\'')
    )
    assert provider.wrap(KEY, CONTEXT) == bytes(3)
    assert json.loads(seen.read_bytes()) == {
        "version": 1,
        "action": "wrap",
        "key": base64.b64encode(KEY).decode(),
        "context": CONTEXT,
    }
    with pytest.raises(ProviderAnswerError):
        provider.unwrap(b"blob", CONTEXT)
    assert json.loads(seen.read_bytes()) == {
        "version": 1,
        "action": "unwrap",
        "blob": "YmxvYg==",
        "context": CONTEXT,
    }


def test_arguments_and_environment_of_the_program_hold_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTMGR_KEY", KEY.hex())
    monkeypatch.setenv("VAULT_ADDR", "http://localhost")
    seen = tmp_path / "seen"
    provider = ExecProvider(
        command=(
            "sh",
            "-c",
            f'cat /proc/$$/cmdline /proc/$$/environ > "{seen}"; printf \'{{"version": 1, "blob": "AAAA"}}\'',
        )
    )
    provider.wrap(KEY, CONTEXT)
    content = seen.read_bytes()
    assert b"VAULT_ADDR" in content
    assert b"CKPTMGR_KEY" not in content
    for form in (KEY, KEY.hex().encode(), base64.b64encode(KEY)):
        assert form not in content


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (1, ProviderRefusedError, "refused"),
        (75, ProviderUnavailableError, "cannot reach its key service"),
        (2, ProviderError, "failed with status 2"),
        (127, ProviderError, "failed with status 127"),
    ],
)
def test_exit_status_tells_the_kind_of_failure(
    status: int, kind: type[ProviderError], message: str
) -> None:
    with pytest.raises(ProviderError, match=message) as caught:
        failing(status, "because").wrap(KEY, CONTEXT)
    assert type(caught.value) is kind
    assert caught.value.hint == "it said: because"


def test_program_killed_by_a_signal_is_a_failure() -> None:
    with pytest.raises(ProviderError, match=f"status -{signal.SIGKILL:d}") as caught:
        ExecProvider(command=("sh", "-c", "kill -9 $$")).wrap(KEY, CONTEXT)
    assert caught.value.hint == "it said nothing on stderr"


@pytest.mark.parametrize("action", ["wrap", "unwrap"])
def test_failure_that_prints_the_key_is_shown_without_it(action: str) -> None:
    forms = (KEY.hex(), base64.b64encode(KEY).decode())
    provider = failing(1, " ".join(("no:", *forms)))
    with pytest.raises(ProviderRefusedError) as caught:
        getattr(provider, action)(KEY, CONTEXT)
    shown = f"{caught.value!r} {caught.value.hint} {traceback.format_exception(caught.value)}"
    assert caught.value.hint == "it said: no: (not shown) (not shown)"
    assert not any(form in shown for form in forms)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "not JSON"),
        ("blob", "not JSON"),
        ("[" * 10_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("1", "not a JSON object"),
        ("{}", "its version is not 1"),
        ('{"version": 2, "blob": "AAAA"}', "its version is not 1"),
        ('{"version": true, "blob": "AAAA"}', "its version is not 1"),
        ('{"version": 1.0, "blob": "AAAA"}', "its version is not 1"),
        ('{"version": 1}', "other members"),
        ('{"version": 1, "key": "AAAA"}', "other members"),
        ('{"version": 1, "blob": "AAAA", "more": 1}', "other members"),
        ('{"version": 1, "blob": 7}', "its blob is not a text"),
        ('{"version": 1, "blob": "AAA"}', "its blob is not base64"),
        ('{"version": 1, "blob": "A A="}', "its blob is not base64"),
        ('{"version": 1, "blob": "é"}', "its blob is not base64"),
        ('{"version": 1, "blob": "AAAA"} {}', "not JSON"),
        ('{"version": 1, "blob": ""}', "a blob of 0 bytes"),
    ],
)
def test_answer_that_is_none_is_refused_with_the_reason(answer: str, reason: str) -> None:
    with pytest.raises(ProviderAnswerError, match=reason):
        printing(answer).wrap(KEY, CONTEXT)


def test_answer_in_bytes_that_are_no_text_is_refused() -> None:
    with pytest.raises(ProviderAnswerError, match="not JSON"):
        ExecProvider(command=("printf", r"\377\376\000")).wrap(KEY, CONTEXT)


def test_answer_that_is_huge_is_refused() -> None:
    with pytest.raises(ProviderAnswerError, match="more than 32768 bytes"):
        ExecProvider(command=("head", "-c", "100000", "/dev/zero")).wrap(KEY, CONTEXT)


def test_answer_with_something_that_is_no_key_is_refused_without_it() -> None:
    text = base64.b64encode(KEY[:-1]).decode()
    with pytest.raises(ProviderAnswerError, match="unwrapped 15 bytes") as caught:
        printing(f'{{"version": 1, "key": "{text}"}}').unwrap(b"blob", CONTEXT)
    assert text not in f"{caught.value} {caught.value.hint}"


def test_program_that_never_reads_its_request_may_answer() -> None:
    assert printing('{"version": 1, "blob": "AAAA"}').wrap(KEY, CONTEXT) == bytes(3)


def test_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    code = f'exec 9> "{alive}"; sleep 600 & wait'
    provider = ExecProvider(command=("sh", "-c", code), timeout_s=1.0)
    with pytest.raises(ProviderUnavailableError, match="no answer within 1 s and was killed"):
        provider.wrap(KEY, CONTEXT)
    # Both hold the other end; it is closed when the last of them has died.
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_wait_that_is_interrupted_kills_the_program(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    pids: list[str] = []

    def interrupt() -> None:
        pids.append(pid_file.read_text())
        press()

    watcher = threading.Thread(target=interrupt)
    # It prints its pid when it has the request, so the interrupt meets a wait that has begun.
    code = f'cat > /dev/null; echo $$ > "{pid_file}"; exec sleep 600'
    provider = ExecProvider(command=("sh", "-c", code))
    with pressing_ctrl_c() as press:
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            provider.wrap(KEY, CONTEXT)
    watcher.join()
    assert has_ended(int(pids[0]))


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or waits only to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize(
    ("name", "reason"), [("/no/such/program", "No such file"), ("a\0b", "not a usable name")]
)
def test_program_that_cannot_be_run_is_unavailable(name: str, reason: str) -> None:
    with pytest.raises(ProviderUnavailableError, match=f"cannot be run: {reason}"):
        ExecProvider(command=(name,)).wrap(KEY, CONTEXT)


@pytest.mark.parametrize("command", ["", "  ", "''"])
def test_address_without_a_program_is_refused(command: str) -> None:
    with pytest.raises(KeySourceError, match="has no name"):
        open_exec(command)


def test_address_with_an_open_quotation_is_refused() -> None:
    with pytest.raises(KeySourceError, match="unfinished quotation"):
        open_exec("vault 'a")


def test_address_is_split_without_a_shell() -> None:
    assert open_exec("vault --mount 'a b' $HOME").command == ("vault", "--mount", "a b", "$HOME")


@pytest.mark.parametrize("action", ["wrap", "unwrap"])
def test_context_that_is_too_long_never_reaches_the_program(action: str) -> None:
    with pytest.raises(KeySourceError, match="more than 8192"):
        getattr(ExecProvider(command=("/no/such/program",)), action)(KEY, {"run": "7" * 9000})


def test_key_of_another_length_never_reaches_the_program() -> None:
    with pytest.raises(KeySourceError, match="not of 15"):
        ExecProvider(command=("/no/such/program",)).wrap(KEY[:-1], CONTEXT)
