# SPDX-License-Identifier: Apache-2.0
"""A program as the key service: it reads one JSON object and prints one.

With it, everything that has a command line can guard keys: Vault, the services of other clouds, a
script.

| action | stdin | stdout |
|---|---|---|
| wrap | `{"version": 1, "action": "wrap", "key": BASE64, "context": {...}}` | `{"version": 1,
"blob": BASE64}` |
| unwrap | `{"version": 1, "action": "unwrap", "blob": BASE64, "context": {...}}` | `{"version": 1,
"key": BASE64}` |

* It must refuse to unwrap with another context, or with none.
* Exit status 0 is an answer, 1 a refusal, 75 (EX_TEMPFAIL) an outage; any other one is a failure of
  the program.
* Keys travel in pipes only, never as an argument or in the environment; `CKPTMGR_KEY*` and other
  variables that hold keys are not passed on.
* If it fails, its stderr is shown to the user, without anything that looks like a key.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from ..errors import KeySourceError
from ..keys.child_environment import child_environment
from .provider import (
    MAX_BLOB_BYTES,
    ProviderAnswerError,
    ProviderError,
    ProviderRefusedError,
    ProviderUnavailableError,
    check_blob,
    check_key_size,
    check_unwrapped,
    context_bytes,
)
from .redaction import redact

PROTOCOL_VERSION = 1
REFUSED_STATUS = 1
UNAVAILABLE_STATUS = os.EX_TEMPFAIL

_MAX_ANSWER_BYTES = 2 * MAX_BLOB_BYTES
_KINDS = {REFUSED_STATUS: ProviderRefusedError, UNAVAILABLE_STATUS: ProviderUnavailableError}
_SAYS = {
    REFUSED_STATUS: "refused",
    UNAVAILABLE_STATUS: "cannot reach its key service",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecProvider:
    """A program that wraps keys.

    Attributes:
        command: Program and arguments; run without a shell. Never put a secret here.
        timeout_s: Time limit of one call; then the program and its children are killed.

    Raises:
        KeySourceError: There is no program.
    """

    command: tuple[str, ...]
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise KeySourceError("the key program has no name", hint="write exec:PROGRAM ARGUMENTS")

    @property
    def name(self) -> str:
        """`exec`."""
        return "exec"

    @property
    def key_id(self) -> str:
        """The name of the program, without its folder and arguments."""
        return PurePath(self.command[0]).name

    def wrap(self, key: bytes, context: Mapping[str, str]) -> bytes:
        """Return the blob of `key` from the program; raises as `KeyProvider.wrap`."""
        check_key_size(key)
        request = {"action": "wrap", "key": _text(key), "context": _checked(context)}
        blob = self._ask(request, answer="blob", secrets=(key,))
        return check_blob(blob, provider=self._shown)

    def unwrap(self, blob: bytes, context: Mapping[str, str]) -> bytes:
        """Return the key in `blob` from the program; raises as `KeyProvider.unwrap`."""
        request = {"action": "unwrap", "blob": _text(blob), "context": _checked(context)}
        return check_unwrapped(self._ask(request, answer="key", secrets=()), provider=self._shown)

    def _ask(
        self, request: Mapping[str, object], *, answer: str, secrets: tuple[bytes, ...]
    ) -> bytes:
        document = json.dumps({"version": PROTOCOL_VERSION, **request}) + "\n"
        status, stdout, stderr = self._run(document.encode("ascii"))
        if status:
            said = redact(stderr, secrets=secrets)
            raise _KINDS.get(status, ProviderError)(
                f"{self._shown} {_SAYS.get(status, f'failed with status {status}')}",
                hint=f"it said: {said}" if said else "it said nothing on stderr",
            )
        try:
            return _answer(stdout, answer)
        except _MalformedError as error:
            # The output may be the key, so it is not shown.
            raise ProviderAnswerError(
                f"{self._shown} gave no valid answer: {error}",
                hint=f'it must print {{"version": {PROTOCOL_VERSION}, "{answer}": BASE64}} and no more',
            ) from None

    def _run(self, request: bytes) -> tuple[int, bytes, bytes]:
        try:
            process = subprocess.Popen(  # noqa: S603 - the user names the program
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a usable name"
            raise ProviderUnavailableError(f"{self._shown} cannot be run: {reason}") from None
        with process:
            try:
                stdout, stderr = process.communicate(request, timeout=self.timeout_s)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise ProviderUnavailableError(
                    f"{self._shown} gave no answer within {self.timeout_s:g} s and was killed"
                ) from None
            except BaseException:
                _kill(process)
                raise
        return process.returncode, stdout, stderr

    @property
    def _shown(self) -> str:
        return f"the key program {self.key_id!r}"


def open_exec(command: str) -> ExecProvider:
    """Return the provider that runs `command`, such as `vault-wrap --mount transit`.

    Raises:
        KeySourceError: It is empty, or a quotation is not finished.
    """
    try:
        return ExecProvider(command=tuple(shlex.split(command)))
    except ValueError:
        raise KeySourceError("the key program has an unfinished quotation or escape") from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the program with its children, which would keep its pipes open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(secret: bytes) -> str:
    return base64.b64encode(secret).decode("ascii")


def _checked(context: Mapping[str, str]) -> dict[str, str]:
    context_bytes(context)
    return dict(context)


class _MalformedError(Exception):
    """The defect of an answer, without its content."""


def _answer(stdout: bytes, name: str) -> bytes:
    """Return the bytes in an answer, or raise _MalformedError."""
    if len(stdout) > _MAX_ANSWER_BYTES:
        raise _MalformedError(f"more than {_MAX_ANSWER_BYTES} bytes")
    try:
        document: object = json.loads(stdout)
    except (ValueError, RecursionError):
        raise _MalformedError("it is not JSON") from None
    if not isinstance(document, dict):
        raise _MalformedError("it is not a JSON object")
    version = document.get("version")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise _MalformedError(f"its version is not {PROTOCOL_VERSION}")
    if document.keys() != {"version", name}:
        raise _MalformedError(f"it has other members than version and {name}")
    value = document[name]
    if not isinstance(value, str):
        raise _MalformedError(f"its {name} is not a text")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:  # binascii.Error is one
        raise _MalformedError(f"its {name} is not base64") from None
