# SPDX-License-Identifier: Apache-2.0
"""Take turns: A B C A B C, one round to warm up, a machine at rest before each, and every value noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.bench.figures import OURS, Figures, Subject
from tools.bench.quiet import rest
from tools.bench.team import Failed, Player
from tools.bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how calmly to measure.

    Attributes:
        rounds: Measured rounds, after one that is not.
        peer_rounds: Of those, how many the libraries that no target names and rare modes take part in.
        rest_s: Seconds of rest before every measurement.
    """

    rounds: int
    peer_rounds: int
    rest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One section of the benchmark with one workload.

    Attributes:
        section: Its name.
        workload: What everybody has in memory.
        directory: Where to write; removed files leave it as it was.
        pace: How often and how calmly.
        figures: Where values are noted.
        failures: Where failures of peers are noted, by name and place.
        report: Takes a line of progress.
    """

    section: str
    workload: Workload
    directory: Path
    pace: Pace
    figures: Figures
    failures: dict[str, str]
    report: Callable[[str], None]
    _left_out: set[tuple[str, str]] = field(default_factory=set)

    def turns(self) -> Iterator[int]:
        """Yield the number of each round; -1 is the one to warm up."""
        for turn in range(-1, self.pace.rounds):
            self.report(f"{self.section}: round {turn + 1} of {self.pace.rounds}")
            yield turn

    def takes_part(self, player: Player, turn: int) -> bool:
        """Return whether a player is measured in a round."""
        if (player.who, player.mode) in self._left_out:
            return False
        return turn < (self.pace.rounds if player.takes_all_rounds else self.pace.peer_rounds)

    def path_for(self, player: Player, turn: int) -> Path:
        """Return a path that does not exist."""
        name = "".join(letter if letter.isalnum() else "-" for letter in player.who)
        return self.directory / f"{name}-{player.mode.split()[0]}-{turn + 1}{player.suffix}"

    def measure(self, player: Player, do: str, path: Path, turn: int, **details: object) -> bool:
        """Let a player do something and note its cost; return whether it could.

        Raises:
            Failed: It could not, and is ours.
        """
        rest(self.pace.rest_s)
        try:
            measured = player.ask(do, path, **details)
        except Failed as failure:
            if not player.is_peer:
                raise
            self.failures[f"{player.who}, {player.mode} ({self._where})"] = str(failure)
            self.leave_out(player)
            return False
        if turn >= 0:
            for what, value in measured.items():
                self.figures.add(self._subject(player.who, player.mode, what), value)
        return True

    def note(self, mode: str, what: str, value: float) -> None:
        """Note a value of ours that no player has measured."""
        self.figures.add(self._subject(OURS, mode, what), value)

    def leave_out(self, player: Player) -> None:
        """Measure a player no more."""
        self._left_out.add((player.who, player.mode))

    @property
    def _where(self) -> str:
        return f"{self.section}, {self.workload.tensors} tensors, {self.workload.total_bytes} bytes"

    def _subject(self, who: str, mode: str, what: str) -> Subject:
        return Subject(
            section=self.section,
            who=who,
            mode=mode,
            what=what,
            size_bytes=self.workload.total_bytes,
            tensors=self.workload.tensors,
        )


NewSession = Callable[[str, Workload], Session]
"""Makes the session of a section with a workload."""
