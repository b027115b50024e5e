# SPDX-License-Identifier: Apache-2.0
"""One library in a process of its own: takes orders as lines of JSON and answers with their cost.

A process each, because allocators, thread pools and imports of one library slow down the others. The answers go out by the
original standard output; whatever a library prints goes to standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.contestant import Background, Contestant
from tools.bench.figures import cpu_of
from tools.bench.loops import lost_share, new_step
from tools.bench.peers import LIBRARIES
from tools.bench.workload import Workload

Order = Mapping[str, Any]
Answer = dict[str, Any]


class Worker:
    """What one library is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._library: Any = None
        self._contestants: dict[tuple[str, str], Contestant] = {}
        self._backgrounds: dict[tuple[str, str], Background] = {}
        self._windows_s: dict[tuple[str, str], float] = {}

    def answer(self, order: Order) -> Answer:
        """Carry out a request."""
        gc.collect()
        key = (order.get("who", ""), order.get("mode", ""))
        path = Path(order.get("path", ""))
        match order["do"]:
            case "prepare":
                return self._prepare(order)
            case "contestants":
                return {"contestants": self._list_contestants()}
            case "backgrounds":
                return {"contestants": self._list_backgrounds()}
            case "act":
                what = order["what"]
                started, used = time.perf_counter(), time.process_time()
                self._contestants[key].actions[what](path)
                used = time.process_time() - used
                return {what: time.perf_counter() - started, cpu_of(what): used}
            case "fly":
                return _fly(self._backgrounds[key], path, forward_s=order["forward_s"])
            case "loop":
                return self._loop(key, path, order["loop"])
            case "close":
                for background in self._backgrounds.values():
                    background.close()
                return {}
        raise ValueError(f"{order['do']!r} is no order")

    def _prepare(self, order: Order) -> Answer:
        workload = Workload(size_bytes=order["size_bytes"], tiny_tensors=order["tiny_tensors"])
        state = {} if self._name == "raw" else workload.new_state()
        module = importlib.import_module(f"tools.bench.peers.{LIBRARIES[self._name].module}")
        self._library = module.Library(
            state,
            workload.total_bytes,
            directory=Path(order["directory"]),
            rest_s=order["rest_s"],
        )
        return {"about": self._library.about}

    def _list_contestants(self) -> list[Answer]:
        found = self._library.contestants()
        self._contestants = {(one.name, one.mode): one for one in found}
        return [
            {"who": one.name, "mode": one.mode, "suffix": one.suffix, "actions": list(one.actions)}
            for one in found
        ]

    def _list_backgrounds(self) -> list[Answer]:
        found = self._library.backgrounds()
        self._backgrounds = {(one.name, one.mode): one for one in found}
        return [
            {"who": one.name, "mode": one.mode, "suffix": one.suffix, "actions": []}
            for one in found
        ]

    def _loop(self, key: tuple[str, str], path: Path, loop: str) -> Answer:
        lost, durable_s = lost_share(
            self._backgrounds[key],
            path,
            new_step(loop),
            window_s=self._windows_s.get(key, 0.2),
        )
        self._windows_s[key] = max(0.2, durable_s)
        return {f"lost {loop}": lost}


def _fly(background: Background, path: Path, *, forward_s: float) -> Answer:
    """Save in the background; the caller is blocked until `start` returns, and again before it may change the state."""
    started = time.perf_counter()
    flight = background.start(path)
    blocked_s = time.perf_counter() - started
    if flight.before_update is not None:
        time.sleep(forward_s)  # forward and backward, on an accelerator
        asked = time.perf_counter()
        flight.before_update()
        blocked_s += time.perf_counter() - asked
    flight.wait()
    return {"blocked": blocked_s, "durable": time.perf_counter() - started}


def main(name: str) -> None:
    """Serve until standard input ends."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        worker = Worker(name)
        for line in sys.stdin:
            try:
                answer = worker.answer(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
