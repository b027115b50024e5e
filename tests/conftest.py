# SPDX-License-Identifier: Apache-2.0
"""What every test shares: hypothesis profiles, and the tests this machine cannot run."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ckptmgr.crypto.keys import child_environment
from ckptmgr.crypto.slots import stretching
from ckptmgr.io.filesystem import OsFileSystem

pytest.register_assert_rewrite("ckptmgr.testing.places")  # its assertions say what differs

# A busy machine makes examples slow, which says nothing about the code; so no deadline anywhere.
settings.register_profile(
    "dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=100, derandomize=True, print_blob=True
)
# The wheel is searched for files that the package left out, not for those that CI found in the sources before.
settings.register_profile("wheel", settings.get_profile("ci"), max_examples=10)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


# Shells start background jobs with Ctrl-C ignored, and what tests start inherits that: programs that wait for it would hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def plain_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, and check that it still does in the end: nobody kept its handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test the state of a new process: all of the budget for passphrases, and no variable named as a secret yet."""
    monkeypatch.setattr(stretching, "_of_process", stretching.StretchingBudget())
    monkeypatch.setattr(child_environment, "_named", set[str]())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once what failed: the pauses between attempts would be a fifth of the time of all tests."""
    monkeypatch.setattr(OsFileSystem, "pause", lambda disk, seconds: None)


# Memory, where the machine lets us: there a test that saves a thousand times waits for no disk.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  not a fixed name


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """Yield an empty directory, in memory if possible."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


def _interop_obstacle(_: pytest.Config) -> str | None:
    if importlib.util.find_spec("mindspore") is None:
        return "needs MindSpore: make interop"
    return None


def _root_obstacle(config: pytest.Config) -> str | None:
    # Being root by chance, as in many containers, is no permission to mount file systems.
    if "root" not in str(config.getoption("markexpr")):
        return "mounts file systems: make test-root"
    if os.geteuid() != 0:
        return "needs root"
    return _strace_obstacle_here()


def _strace_obstacle(config: pytest.Config) -> str | None:
    if "strace" not in str(config.getoption("markexpr")):
        return "takes minutes: make test-strace"
    return _strace_obstacle_here()


def _strace_obstacle_here() -> str | None:
    strace = shutil.which("strace")
    if strace is None:
        return "needs strace"
    trial = subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True, check=False)
    return None if trial.returncode == 0 else "needs ptrace, which is denied here"


def _hpke_obstacle(_: pytest.Config) -> str | None:
    if importlib.util.find_spec("cryptography.hazmat.primitives.asymmetric.mlkem") is None:
        return "needs cryptography 48, for X25519 and ML-KEM keys"
    return None


def _kit_obstacle(config: pytest.Config) -> str | None:
    if "kit" not in str(config.getoption("markexpr")):
        return "takes minutes: make kit FRAMEWORK=..."
    return None


_OBSTACLES: dict[str, Callable[[pytest.Config], str | None]] = {
    "hpke": _hpke_obstacle,
    "interop": _interop_obstacle,
    "kit": _kit_obstacle,
    "root": _root_obstacle,
    "strace": _strace_obstacle,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs something that is absent."""
    for marker, obstacle in _OBSTACLES.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = obstacle(config) if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the collected objects (10,000 tests, the frameworks) out of each later garbage collection: one took 0.5 s."""
    gc.collect()
    gc.freeze()
