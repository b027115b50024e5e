# SPDX-License-Identifier: Apache-2.0
"""A rank that waits for another one hears Ctrl-C and SIGTERM long before the other one is given up."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ckptmgr.parallel.coordinator import waited_in_pieces
from tests.cli.running import process_env

_WAITING = """
import os, signal

def ended(number, frame):
    raise SystemExit(7)

signal.signal(signal.SIGTERM, ended)
{make}
try:
    print("waiting", flush=True)
    ranks.all_gather("save", None, timeout_s=100_000)
except KeyboardInterrupt:
    os._exit(6)  # not through the end of a table, which is in this process here
except SystemExit as error:
    os._exit(error.code)
"""
_TORCH = """
from torch.distributed import TCPStore
from ckptmgr.integrations.torch_store import store_coordinator
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
ranks = store_coordinator(store, rank=0, world=2)
"""
_JAX = """
import jax, threading
from jax._src.lib import _jax
from ckptmgr.integrations.jax_distributed import _Table
from ckptmgr.parallel.coordinator import KeyValueCoordinator
from tests.support.ports import free_port
address = f"127.0.0.1:{free_port()}"
service = _jax.get_distributed_runtime_service(address, 1)
client = _jax.get_distributed_runtime_client(address, 0)
client.connect()
ranks = KeyValueCoordinator(_Table(client, "ckptmgr/0"), rank=0, world=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "number", "code"),
    [
        ("torch", signal.SIGINT, 6),
        ("torch", signal.SIGTERM, 7),
        ("jax", signal.SIGINT, 6),  # SIGTERM is for JAX itself, which ends the process
    ],
)
def test_signal_ends_the_wait_of_a_rank(library: str, number: signal.Signals, code: int) -> None:
    pytest.importorskip(library)
    program = _WAITING.format(make=_TORCH if library == "torch" else _JAX)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=process_env()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.wait(timeout=200) == code


def test_wait_in_pieces_grows_from_one_second_to_five_and_ends_in_time() -> None:
    asked: list[float] = []
    now = [0.0]

    def wait(wait_s: float) -> bool:
        asked.append(wait_s)
        now[0] += wait_s
        return False

    assert not waited_in_pieces(wait, timeout_s=20.0, monotonic=lambda: now[0])
    assert asked == [1.0, 2.0, 4.0, 5.0, 5.0, 3.0]


def test_table_out_of_reach_is_not_asked_again_and_again() -> None:
    asked: list[float] = []

    def wait(wait_s: float) -> bool:
        asked.append(wait_s)
        return False

    assert not waited_in_pieces(wait, timeout_s=600.0, monotonic=lambda: 0.0)
    assert asked == [1.0]


def test_value_that_comes_ends_the_wait() -> None:
    answers = iter([False, True])
    clock = iter(range(100))
    assert waited_in_pieces(
        lambda _: next(answers), timeout_s=600.0, monotonic=lambda: float(next(clock))
    )
