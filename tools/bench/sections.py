# SPDX-License-Identifier: Apache-2.0
"""Sections that are measured in turns: saves and loads of files, saves in the background, and their cost for a loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from tools.bench.disk import drop_cache, fill_cache, remove
from tools.bench.loops import LOOPS
from tools.bench.session import Session
from tools.bench.team import Player

WARM = "load warm"
READS = ("load", "load mmap", "into", "into own", "verify", WARM)
# Of the bare disk only, with the work that nobody avoids who keeps or checks what he reads. Those that take new memory do not
# come one upon the other: the second would find the leftovers of the first.
FLOORS = (
    "touch",
    "load digested",
    "load busy",
    "load new",
    "into digested",
    "load new digested",
    f"{WARM} digested",
)
LIMIT = "limit"
_FORWARD_S_PER_BYTE = 2e-9
_LONG_ROUND = 6
_LOOP_OF_PEERS = "numpy"
_LOOP_MODES = ("thread", "process", LIMIT)


def measure_files(
    session: Session, players: Iterable[Player], *, reads: Sequence[str] = (*READS, *FLOORS)
) -> None:
    """Save and load with everybody, those of one mode side by side, the bare disk twice in a long round.

    Args:
        session: Where it is noted.
        players: Contestants.
        reads: Actions on a file once it is written.
    """
    groups = _by_mode(players)
    limit = [group for group in groups if group[0].mode == LIMIT]
    others = [group for group in groups if group[0].mode != LIMIT]
    half = len(others) // 2
    again = limit if len(others) >= _LONG_ROUND else []
    order = [*limit, *others[:half], *again, *others[half:]]
    for turn in session.turns():
        for group in order:
            _take_turns(session, group, turn, reads)


def _by_mode(players: Iterable[Player]) -> list[list[Player]]:
    in_order = sorted(players, key=lambda player: player.mode)
    return [list(group) for _, group in groupby(in_order, key=lambda player: player.mode)]


def _take_turns(session: Session, group: Sequence[Player], turn: int, reads: Sequence[str]) -> None:
    with contextlib.ExitStack() as stack:
        saved = []
        for player in group:
            path = session.path_for(player, turn)
            stack.callback(_remove_if_there, path)
            if session.takes_part(player, turn) and session.measure(
                player, "act", path, turn, what="save"
            ):
                saved.append((player, path))
        for what in reads:
            for player, path in saved:
                if what in player.actions and session.takes_part(player, turn):
                    (fill_cache if what.startswith(WARM) else drop_cache)(path)
                    session.measure(player, "act", path, turn, what=what)


def measure_backgrounds(session: Session, players: Sequence[Player]) -> None:
    """Save in the background with everybody, and note how long the caller is held up."""
    forward_s = max(0.05, session.workload.total_bytes * _FORWARD_S_PER_BYTE)
    for turn in session.turns():
        for player in players:
            if session.takes_part(player, turn):
                with _path(session, player, turn) as path:
                    session.measure(player, "fly", path, turn, forward_s=forward_s)


def measure_loops(
    session: Session, players: Sequence[Player], loops: Sequence[str] = LOOPS
) -> None:
    """Run training loops beside saves: every loop beside ours and the bare disk, one beside the others."""
    players = [player for player in players if player.mode in _LOOP_MODES]
    for turn in session.turns():
        for loop in loops:
            for player in players:
                is_asked = not player.is_peer or loop == _LOOP_OF_PEERS
                if is_asked and session.takes_part(player, turn):
                    with _path(session, player, turn) as path:
                        session.measure(player, "loop", path, turn, loop=loop)


@contextlib.contextmanager
def _path(session: Session, player: Player, turn: int) -> Iterator[Path]:
    path = session.path_for(player, turn)
    try:
        yield path
    finally:
        _remove_if_there(path)


def _remove_if_there(path: Path) -> None:
    if path.exists():
        remove(path)
