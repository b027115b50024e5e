# SPDX-License-Identifier: Apache-2.0
"""The parsers: what each is fed with, how its inputs are changed, and which errors are an answer.

A target returns a small value that tells kinds of accepted inputs apart, or raises one of its errors. It uses an accepted
input as its callers do: contents are read, and the parsed value is written and parsed again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives import hmac
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ckptmgr.cli.exits import UsageProblem
from ckptmgr.cli.policy_file import CONFIG_NAME, load_policy
from ckptmgr.core.errors import CkptmgrError, StoreLocked
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.container.source import open_container
from ckptmgr.crypto.container.unlock import find_copies, unlock
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.slots.public import x25519_identity
from ckptmgr.crypto.slots.secret import RawKey
from ckptmgr.engine.worker_protocol import describe_error, rebuild_error, receive
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.values import read_values
from ckptmgr.formats.compressed.source import open_frames
from ckptmgr.formats.dtypes import BY_SAFETENSORS
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.mindspore.wire import WireReader
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.formats.strategy import (
    Strategy,
    encode_strategy,
    parse_strategy,
    read_restore_ranks,
    split_stages,
)
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.io.leases import ProcProcesses, hold_lease, lease_path
from ckptmgr.policy.text import parse_policy
from ckptmgr.state.tree import flatten, unflatten
from ckptmgr.store.manifest.codec import decode, encode, manifest_name
from ckptmgr.store.manifest.keys import ManifestKey
from ckptmgr.store.manifest.proofs import authenticated_by
from tools.fuzz.mutators import (
    MAX_INPUT_BYTES,
    Mutate,
    changed_json,
    dumped,
    mutate_bytes,
    mutate_json,
    mutate_wire,
    tokens_of,
)

GOLDEN = Path(__file__).parents[2] / "tests/golden"
VECTORS = Path(__file__).parents[2] / "tests/vectors/manifests"
_KEY = Key(bytes(range(32)))
_MAX_SEED_BYTES = 1 << 12  # a fault that a small one does not show, a large one shows slowly
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser under test.

    Attributes:
        name: Of the command line.
        run: Parses an input; raises one of `errors`, or returns what kind of thing it is.
        errors: The documented errors; every other exception is a finding.
        seeds: Sound and broken inputs to start from.
        mutate: Returns a changed input.
    """

    name: str
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]
    mutate: Mutate


def _files(*patterns: str, most_bytes: int = _MAX_SEED_BYTES) -> list[bytes]:
    paths = [path for pattern in patterns for path in sorted(GOLDEN.glob(pattern))]
    return [path.read_bytes() for path in paths if path.stat().st_size <= most_bytes]


def _either(*choices: Mutate) -> Mutate:
    return lambda rng, data: rng.choice(choices)(rng, data)


# --- protobuf wire ---------------------------------------------------------------------------------------------------


def _run_wire(data: bytes) -> object:
    wire = WireReader(BytesSource(data))
    count = 0
    for field in wire.fields(0, wire.size):
        count += 1
        if field.wire_type == 2:
            sum(wire.varints(field))
            wire.payload(field)
    return min(count, 5)


# --- `.ckpt` and `.safetensors` --------------------------------------------------------------------------------------


def _run_file(suffix: str, data: bytes) -> object:
    opened = open_source(
        BytesSource(data), path=f"net{suffix}", options=ReadOptions(), is_for_loading=True
    )
    values = read_values(opened, check_crc=opened.index.crc is not None)
    return opened.format, min(len(values), 5)


def _mutate_safetensors(rng: Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(8)
    if kind == 0:
        return mutate_bytes(rng, data)
    if kind == 1:
        return data[: 8 + length] + mutate_bytes(rng, body)
    header = mutate_json(rng, header.rstrip())
    if rng.randrange(3) == 0:
        header, body = _laid_out(rng, header)
    return _LENGTH.pack(len(header)) + header + body


_SHAPES: tuple[list[int], ...] = (
    [0],
    [],
    [1],
    [2, 3],
    [0, 1 << 62],
    [1 << 62, 0],
    [1 << 40, 1 << 40, 0],
    [0] * 65,
    [1] * 40,
    [1 << 63, 0],
)


def _laid_out(rng: Random, header: bytes) -> tuple[bytes, bytes]:
    """Return a header and contents that fit each other, as far as the header makes sense."""
    try:
        tensors = dict(json.loads(header))
    except (ValueError, TypeError, RecursionError):
        return header, b""
    at = 0
    for name, one in tensors.items():
        with contextlib.suppress(Exception):
            if rng.randrange(4) == 0:
                one = {**one, "shape": rng.choice(_SHAPES)}
            size = math.prod(one["shape"]) * BY_SAFETENSORS[one["dtype"]].item_bytes
            size = sorted((0, int(size), 1 << 15))[1]
            tensors[name] = {**one, "data_offsets": [at, at + size]}
            at += size
    return dumped(rng, tensors), bytes(at)


# --- strategy files --------------------------------------------------------------------------------------------------


def _run_strategy(data: bytes) -> object:
    with contextlib.suppress(FormatError):
        read_restore_ranks(data)
    strategy = parse_strategy(data)
    kinds: list[Any] = ["protobuf"] if data[:1] != b"{" else ["json"]
    for kind in kinds:
        if parse_strategy(encode_strategy(strategy, kind=kind)) != strategy:
            raise AssertionError("another strategy is read back")
    split_stages(strategy)
    return _kind_of_strategy(strategy)


def _kind_of_strategy(strategy: Strategy) -> object:
    return min(len(strategy.layouts), 3), min(len(strategy.operators), 3)


# --- containers ------------------------------------------------------------------------------------------------------

_COPY_BYTES = 4096
_FIXED_BYTES = 64
_SLOTS_AT = 80
_IDENTITIES = (RawKey(_KEY), x25519_identity(X25519PrivateKey.from_private_bytes(bytes([1]) * 32)))


def _run_container(data: bytes) -> object:
    source = BytesSource(data)
    copies = find_copies(source)
    container = open_container(source, _IDENTITIES)
    read_bytes(container, 0, container.size)
    return len(copies), container.mode, container.content, container.unlocked.states


@cache
def _opened_header(fixed: bytes) -> tuple[Any, Key] | None:
    """Return the suite and the data key of a golden container with these immutable bytes."""
    for data in _container_seeds():
        if data.startswith(fixed):
            unlocked = unlock(BytesSource(data), _IDENTITIES)
            return unlocked.header.fixed.suite, unlocked.data_key
    return None


@cache
def _container_seeds() -> list[bytes]:
    sound = _files("containers/*.ckpe", "compressed/*.ckpe", most_bytes=1 << 15)
    found = []
    for data in sound:
        with contextlib.suppress(CryptoError):
            unlock(BytesSource(data), _IDENTITIES)
            found.append(data)
    return found


def _mutate_container(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for copy in rng.choice(((0,), (0,), (_COPY_BYTES,), (0, _COPY_BYTES))):
        end = copy + min(_SLOTS_AT + int.from_bytes(data[copy + 76 : copy + 80], "little"), 4000)
        start, stop = rng.choice(
            ((copy, copy + _FIXED_BYTES), (copy + _FIXED_BYTES, copy + _SLOTS_AT), (copy + _SLOTS_AT, end))
        )  # fmt: skip
        part = mutate_bytes(rng, bytes(changed[start:stop]))
        if rng.randrange(4):
            part = part[: stop - start].ljust(stop - start, b"\0")
        changed[start:stop] = part
        if rng.randrange(2):
            _authenticate(changed, copy)
    if rng.randrange(6) == 0:
        at = 2 * _COPY_BYTES
        changed[at:] = mutate_bytes(rng, bytes(changed[at:]))
    return bytes(changed)


def _authenticate(data: bytearray, copy: int) -> None:
    """Write the right MAC into a changed header copy, so that its fields are looked at."""
    opened = _opened_header(bytes(data[:_FIXED_BYTES]))
    content = bytes(data[copy : copy + _COPY_BYTES - 32])
    if opened is None or len(content) < _COPY_BYTES - 32:
        return
    suite, key = opened
    info = b"ckptmgr/v1/header-mac" + content[:_FIXED_BYTES]
    mac = hmac.HMAC(
        HKDFExpand(algorithm=suite.kdf_digest, length=32, info=info).derive(key.raw),
        suite.mac_digest,
    )
    mac.update(content)
    data[copy + _COPY_BYTES - 32 : copy + _COPY_BYTES] = mac.finalize()


# --- compressed files ------------------------------------------------------------------------------------------------

_ENTRY_BYTES = 56
_END_BYTES = 64


def _run_frames(data: bytes) -> object:
    frames = open_frames(BytesSource(data))
    if frames.size <= 8 * MAX_INPUT_BYTES:
        read_bytes(frames, 0, frames.size)
    return min(len(frames.table.frames), 4)


def _mutate_frames(rng: Random, data: bytes) -> bytes:
    count = int.from_bytes(data[-_END_BYTES : -_END_BYTES + 8], "little")
    at = len(data) - _END_BYTES - count * _ENTRY_BYTES
    if at < 16 or rng.randrange(6) == 0:
        return mutate_bytes(rng, data)
    head, body, table = data[:16], bytearray(data[16:at]), bytearray(data[at:-_END_BYTES])
    counts = data[-_END_BYTES : -_END_BYTES + 24]
    if rng.randrange(3) == 0:
        body = bytearray(mutate_bytes(rng, bytes(body)))
    if rng.randrange(3) == 0:
        _mutate_planes(rng, body, table)
    if rng.randrange(3):
        start = rng.randrange(max(1, count)) * _ENTRY_BYTES
        table[start : start + 24] = mutate_bytes(rng, bytes(table[start : start + 24]))[:24]
    if rng.randrange(4) == 0:
        counts = mutate_bytes(rng, counts)[:24].ljust(24, b"\0")
    for start in range(0, len(table) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
        offset, stored = struct.unpack_from("<QI", table, start)
        if 16 <= offset < len(data):
            frame = bytes(body[offset - 16 : offset - 16 + stored])
            table[start + 24 : start + _ENTRY_BYTES] = blake3(frame).digest()
    digest = blake3(head + table + counts).digest()
    return head + bytes(body) + bytes(table) + counts + digest + b"CKPZTBL1"


def _mutate_planes(rng: Random, body: bytearray, table: bytearray) -> None:
    """Change the head of a frame of planes, which has at most eight."""
    at = rng.randrange(max(1, len(table) // _ENTRY_BYTES)) * _ENTRY_BYTES
    start = int.from_bytes(table[at : at + 8], "little") - 16
    if table[at + 17 : at + 18] == b"\x02" and 0 <= start < len(body) - 1:
        head = bytes(body[start : start + 8 + 8 * min(8, body[start + 1])])
        body[start : start + len(head)] = mutate_bytes(rng, head)[: len(head)].ljust(len(head))


# --- manifests -------------------------------------------------------------------------------------------------------


@cache
def _manifest_seeds() -> list[bytes]:
    vectors = [json.loads(path.read_bytes()) for path in sorted(VECTORS.glob("*.json"))]
    found = [vector["manifest"].encode("utf-8", "surrogatepass") for vector in vectors]
    document = json.loads(found[0])
    replaced = {**document, "replaces": {**document, "kept": found[0].decode()}}
    [entry] = document["files"]
    names = [f"net-40.{rank}-of-2.67d2f1a41f0c9a2e.ckpt" for rank in range(2)]
    sharded = {
        **document,
        "schema": "ckptmgr.manifest/2",
        "files": [{**entry, "name": name} for name in names],
    }
    return [*found, *(json.dumps(one).encode() for one in (replaced, sharded))]


def _run_manifest(data: bytes) -> object:
    found = decode(data, path=_manifest_path(data))
    again = decode(encode(found), path=Path(manifest_name(found.name)))
    if again.file != found.file or again.step != found.step or again.shards != found.shards:
        raise AssertionError("another manifest is read back")
    proven = decode(data, path=Path(manifest_name(found.name)), trust=Trust(keys=_KEY))
    return bool(found.shards), found.replaces is None, proven.auth is None


def _manifest_path(data: bytes) -> Path:
    """Return the path that a manifest belongs to, as far as one can tell."""
    name = "net-1.ckpt"
    with contextlib.suppress(Exception):
        document = json.loads(data.decode("utf-8", "surrogatepass"))
        is_sharded = document["schema"].endswith("/2")
        name = str(document["files"][0]["name"])
        name = name.split(".")[0] + ".shards" if is_sharded else name
    return Path("/") / manifest_name(name.replace("/", "").replace("\0", ""))


def _mutate_manifest(rng: Random, data: bytes) -> bytes:
    try:
        document = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return mutate_bytes(rng, data)
    document = changed_json(rng, document)
    if rng.randrange(2):
        with contextlib.suppress(Exception):
            document = authenticated_by(document, ManifestKey(_KEY))
    return dumped(rng, document)


# --- policies, configuration -----------------------------------------------------------------------------------------

_POLICIES = (
    "last(3)", "best(2, loss, min) | every(1000)", "within(1d12h)|hourly(24)|daily(7)", "pinned | all()",
    "weekly(4) | monthly(6) | per_minutes(5)", "best(1, 'val loss', max)", 'best(1,"a\\u00e9",max)',
)  # fmt: skip
_POLICY_WORDS = (
    "last", "best", "every", "within", "hourly", "daily", "weekly", "monthly", "per_minutes", "pinned", "all", "(", ")",
    ",", "|", "min", "max", "90s", "1d12h", "999999999999w", "0s", "loss", "'", '"', "\\", "\\ud800", '"a\\"b"', "''",
    "9223372036854775807", "9223372036854775808", "\n", "\0", "é", "一", "٣", "1_0", "-1", "1.5", "'x'", '"\\u0041"',
)  # fmt: skip
_TOML_WORDS = (
    *_POLICY_WORDS, "keep", "=", '"last(5)"', "[", "]", "[[", "]]", "{", "}", ".", "#", "'''", '"""', "\r\n", "true",
    "1979-05-27T07:32:00Z", "0x", "inf", "nan", "1e400", "\\U00110000", "keepp",
)  # fmt: skip


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _run_policy(data: bytes) -> object:
    policy = parse_policy(_text(data))
    if parse_policy(str(policy)) != policy:
        raise AssertionError("another policy is read back")
    return tuple(type(rule).__name__ for rule in policy.rules[:2])


@cache
def _folder() -> Path:
    """Return an empty directory of this process, in memory where the machine has that."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    holder = tempfile.TemporaryDirectory(prefix="ckptmgr-fuzz-", dir=parent)
    _holders.append(holder)
    return Path(holder.name)


_holders: list[tempfile.TemporaryDirectory[str]] = []


def _run_toml(data: bytes) -> object:
    path = _folder() / CONFIG_NAME
    path.write_bytes(data)
    return type(load_policy(None, path.parent).rules[0]).__name__


# --- leases ----------------------------------------------------------------------------------------------------------


def _run_lease(data: bytes) -> object:
    """Read the text of a lease that another descriptor holds, and take the input for the token of a writer."""
    ProcProcesses().is_dead(_text(data[:255]))
    folder = _folder()
    with _held_lease(folder) as descriptor:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        with hold_lease(OsFileSystem(), folder, "net"):
            raise AssertionError("two hold one lease")


@contextlib.contextmanager
def _held_lease(folder: Path) -> Any:
    import fcntl

    descriptor = os.open(lease_path(folder, "net"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


# --- worker protocol -------------------------------------------------------------------------------------------------

_HEAD = struct.Struct("<II")


def _message(body: object) -> bytes:
    data = json.dumps(body).encode()
    return _HEAD.pack(len(data), 0) + data


def _run_worker(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_INPUT_BYTES)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        message, descriptors = receive(ours)
    if descriptors:
        raise AssertionError("descriptors were sent by nobody")
    return type(rebuild_error(message)).__name__


def _mutate_worker(rng: Random, data: bytes) -> bytes:
    if rng.randrange(6) == 0:
        return mutate_bytes(rng, data)
    body = mutate_json(rng, data[_HEAD.size :])
    return _HEAD.pack(len(body), 0) + body


def _worker_seeds() -> list[bytes]:
    problems = (
        CkptmgrError("no", path="/x", hint="h"),
        StoreLocked("locked"),
        OSError(28, "full", "/x"),
        ValueError("v"),
        KeyError("k"),
    )
    return [_message({"kind": "done"}), *(_message(describe_error(one)) for one in problems)]


# --- skeletons -------------------------------------------------------------------------------------------------------


def _state() -> dict[str, Any]:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    generator, numbers = np.random.default_rng(7), [1, 2]
    state: dict[str, Any] = {
        "w": weights,
        "view": weights[1],
        "tied": weights,
        "half": np.float16(1.5),
        "list": [1, 2.5, None, True, "é", b"bytes", bytearray(b"x"), 1 + 2j, 10**30],
        "tuple": (1, (2, {3}), frozenset({4})),
        "ordered": OrderedDict(a=1, b=np.arange(3)),
        "rng": generator,
        "shared": {"rng": [generator, generator], "numbers": [numbers, numbers]},
        "empty": np.zeros((0, 3)),
        "date": np.datetime64("2026-03-01"),
    }
    with contextlib.suppress(ImportError):
        import torch

        state["torch"] = {
            "p": torch.nn.Parameter(torch.ones(2, 2)),
            "t": torch.arange(4),
            "bf": torch.ones(2, dtype=torch.bfloat16),
            "size": torch.Size((1, 2)),
            "dtype": torch.float16,
            "device": torch.device("cpu"),
            "sparse": torch.eye(2).to_sparse(),
        }
    return state


@cache
def _flat() -> tuple[list[bytes], dict[str, np.ndarray]]:
    state = _state()
    parts: list[object] = [state, *({name: value} for name, value in state.items())]
    stored: dict[str, np.ndarray] = {}
    skeletons = []
    for part in parts:
        flat = flatten(part)
        skeletons.append(flat.skeleton.encode())
        for tensor in flat.tensors:
            array = np.frombuffer(bytes(tensor.content()), tensor.spec.dtype.to_numpy())
            stored[tensor.spec.name] = array.reshape(tensor.spec.shape)
    return skeletons, stored


def _mutate_skeleton(rng: Random, data: bytes) -> bytes:
    """Change single nodes: a program of which a node is missing takes values that are not there, and ends."""
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        document = json.loads(data)
        nodes = list(document["nodes"])
        if rng.randrange(6):
            for _ in range(rng.choice((1, 1, 2))):
                at = rng.randrange(len(nodes))
                nodes[at] = changed_json(rng, nodes[at])
            return dumped(rng, {**document, "nodes": nodes})
    return mutate_json(rng, data)


def _run_skeleton(data: bytes) -> object:
    return type(unflatten(_text(data), _flat()[1].__getitem__)).__name__


TARGETS: Sequence[Target] = (
    Target(
        name="wire",
        run=_run_wire,
        errors=(FormatError,),
        seeds=partial(_files, "files/*.ckpt", "transform/strategies/*.ckpt"),
        mutate=_either(mutate_wire, mutate_bytes),
    ),
    Target(
        name="ckpt",
        run=partial(_run_file, ".ckpt"),
        errors=(CkptmgrError,),
        seeds=partial(_files, "files/[cs][klt]*.ckpt", "files/broken/*.ckpt"),
        mutate=_either(mutate_wire, mutate_wire, mutate_wire, mutate_bytes),
    ),
    Target(
        name="safetensors",
        run=partial(_run_file, ".safetensors"),
        errors=(CkptmgrError,),
        seeds=partial(_files, "files/*.safetensors", "files/broken/*.safetensors"),
        mutate=_mutate_safetensors,
    ),
    Target(
        name="strategy",
        run=_run_strategy,
        errors=(FormatError,),
        seeds=partial(_files, "transform/strategies/*.*"),
        mutate=lambda rng, data: (mutate_json if data[:1] == b"{" else mutate_wire)(rng, data),
    ),
    Target(
        name="container",
        run=_run_container,
        errors=(CryptoError,),
        seeds=_container_seeds,
        mutate=_mutate_container,
    ),
    Target(
        name="zstd",
        run=_run_frames,
        errors=(FormatError,),
        seeds=partial(_files, "compressed/*.ckpz", most_bytes=1 << 15),
        mutate=_mutate_frames,
    ),
    Target(
        name="manifest",
        run=_run_manifest,
        errors=(CkptmgrError,),
        seeds=_manifest_seeds,
        mutate=_mutate_manifest,
    ),
    Target(
        name="policy",
        run=_run_policy,
        errors=(CkptmgrError,),
        seeds=lambda: [text.encode() for text in _POLICIES],
        mutate=_either(tokens_of(_POLICY_WORDS), tokens_of(_POLICY_WORDS), mutate_bytes),
    ),
    Target(
        name="toml",
        run=_run_toml,
        errors=(CkptmgrError, UsageProblem),
        seeds=lambda: [f"keep = {json.dumps(text)}\n".encode() for text in _POLICIES],
        mutate=_either(tokens_of(_TOML_WORDS), tokens_of(_TOML_WORDS), mutate_bytes),
    ),
    Target(
        name="lease",
        run=_run_lease,
        errors=(StoreLocked,),
        seeds=lambda: [b"process 17 on host", ProcProcesses().token().encode(), b"a-b-1-2", b""],
        mutate=_either(
            tokens_of(("-", "0", ".", "/", "%s", "\n", "٣", "process", "\0")), mutate_bytes
        ),
    ),
    Target(
        name="worker",
        run=_run_worker,
        errors=(EOFError,),
        seeds=_worker_seeds,
        mutate=_mutate_worker,
    ),
    Target(
        name="skeleton",
        run=_run_skeleton,
        errors=(CkptmgrError,),
        seeds=lambda: _flat()[0],
        mutate=_mutate_skeleton,
    ),
)
