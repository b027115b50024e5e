# SPDX-License-Identifier: Apache-2.0
"""Prune plan on the screen: header, timeline, a row with reasons per checkpoint, and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.cli import render
from ckptmgr.cli.exits import Exit, report_all
from ckptmgr.cli.filters import ALL, Chosen
from ckptmgr.cli.render import Cell, Output
from ckptmgr.cli.run_lines import are_as_series, run_by_name, shown_run
from ckptmgr.core.model import Checkpoint, Reason, State, Verdict
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.json_fields import has_known_step
from ckptmgr.maintenance.prune import LinePlan, Proposal
from ckptmgr.policy.lines import RunLine
from ckptmgr.policy.rules import Best, RetentionPolicy
from ckptmgr.series.candidates import is_manifest
from ckptmgr.store.applied import Applied

_TIMELINE_WIDTH = 60
_UNICODE_MARKS = {"keep": "■", "drop": "·", "corrupt": "✗"}
_ASCII_MARKS = {"keep": "#", "drop": ".", "corrupt": "x"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """Prints plans and results.

    `verbose` lists the files to be removed; without `shows_dropped` no row has one that goes.
    """

    output: Output
    directory: Path
    series: str | None
    verbose: bool
    shows_dropped: bool = True
    chosen: Chosen = ALL

    def plan(self, proposal: Proposal) -> None:
        """Show what would be done; nothing with JSON, which is printed once, at the end."""
        if self.output.is_quiet:
            self.output.paths([c.path for c in proposal.dropped])
        if not self.output.is_text:
            return
        lines = [line for one in proposal.plans for line in one.counted.lines]
        for one in proposal.plans:
            self._line(proposal, one, has_others=len(proposal.plans) > 1, lines=lines)
        for other in proposal.undecided:
            label = f"{self.directory} [{', '.join(other.counted.series)}]"
            why = "all stay: their run recorded no policy; --keep names one"
            if other.error is not None:
                why = "all stay, because of an error"
            self.output.line(f"{label}  {why}")
        for entry in proposal.untouched:
            self.output.line(f"{entry.name}: stays, because its name has no step")
        for leftover in proposal.leftovers:
            self.output.line(f"{leftover.path.name}: {leftover.problem}; {_fate(leftover)}")
        for batch in (*proposal.expired, *proposal.spared):
            stored = f"{render.counted(len(batch.checkpoints), 'checkpoint')}, {size_text(batch.size_bytes)}"
            fate = "would be removed for good"
            if batch in proposal.spared:
                fate = "stays, because outside the trash nothing whole of a run is left"
            self.output.line(f"trash {batch.path.name}: {stored}; {fate}")
        kept = proposal.kept
        freed = size_text(sum(c.size_bytes for c in proposal.dropped))
        stays = size_text(sum(c.size_bytes for c in kept))
        verb = "stays" if len(kept) == 1 else "stay"
        self.output.line(f"would free {freed}; {len(kept)} {verb} ({stays})")

    def result(self, proposal: Proposal, outcome: Applied | None) -> None:
        """Show the result of a prune; None if nothing was done."""
        if self.output.is_json:
            self.output.result(plan_items(proposal), self._summary(proposal, outcome))
        elif outcome is not None and self.output.is_quiet:
            self.output.paths([c.path for c in outcome.removed])
        elif outcome is not None:
            removed = render.counted(len(outcome.removed), "checkpoint")
            size = size_text(sum(c.size_bytes for c in outcome.removed))
            where = (
                ""
                if outcome.batch is None
                else f" to {outcome.batch.relative_to(self.output.root)}"
            )
            verb = "removed" if outcome.batch is None else "moved"
            self.output.line(f"{verb} {removed}, {size}{where}")

    def _line(
        self, proposal: Proposal, one: LinePlan, *, has_others: bool, lines: Sequence[RunLine]
    ) -> None:
        verdicts = one.plan.verdicts
        checkpoints = [verdict.checkpoint for verdict in verdicts]
        total = size_text(sum(c.size_bytes for c in checkpoints))
        label = ", ".join(one.series)
        if not (one.counted.is_series or are_as_series(lines)):
            label += f"; {one.counted.lines[0]}"
        is_plain = not has_others and len(one.series) == 1
        name = str(self.directory) if is_plain else f"{self.directory} [{label}]"
        given = [f"series={self.series}"] * (self.series is not None) + self.chosen.texts
        filters = f"   filter {', '.join(given)}" if given else ""
        self.output.line(
            Cell(name, "bold"),
            f"  {render.counted(len(checkpoints), 'checkpoint')}, {total}   policy {one.plan.policy}{filters}",
        )
        self._timeline(verdicts)
        self._table(proposal, one)
        unproven = Counter(c.state.value for c in checkpoints if c.is_unproven)
        for word, found in sorted(unproven.items()):
            number = render.counted(found, "checkpoint")
            self.output.line(f"{number} {word}: no rule counts it, and it is removed only by name")

    def _timeline(self, verdicts: Sequence[Verdict]) -> None:
        marks = _UNICODE_MARKS if self.output.has_unicode else _ASCII_MARKS
        oldest_first = [v for v in reversed(verdicts) if has_known_step(v.checkpoint)]
        if not oldest_first:
            return
        per_mark = -(-len(oldest_first) // _TIMELINE_WIDTH)
        groups = [oldest_first[i : i + per_mark] for i in range(0, len(oldest_first), per_mark)]
        line = "".join(marks[_mark(group)] for group in groups)
        first, last = (_short(oldest_first[i].checkpoint.step) for i in (0, -1))
        self.output.line(f" step {first} {line} {last}")
        legend = f"{marks['keep']} keep  {marks['drop']} drop"
        if any(v.checkpoint.state is State.CORRUPT for v in oldest_first):
            legend += f"  {marks['corrupt']} corrupt (does not count towards any rule)"
        if per_mark > 1:
            legend += f"  (each for up to {per_mark} checkpoints)"
        self.output.line(" " * len(f" step {first} ") + legend)

    def _table(self, proposal: Proposal, one: LinePlan) -> None:
        metrics, plan = _metrics(one.policy), one.plan
        has_series, has_runs = len(one.series) > 1, len(one.counted.lines) > 1
        names = ["SERIES"] * has_series + ["RUN"] * has_runs
        shown = [*names, "STEP", "SAVED", "SIZE", *(name.upper() for name in metrics)]
        header = ("", *shown, "STATE", "WHY")
        runs = run_by_name(one.counted.lines) if has_runs else {}
        rows = []
        for verdict in self.chosen.in_order(plan.verdicts, of=lambda one: one.checkpoint):
            if not (verdict.is_kept or self.shows_dropped):
                continue
            cells = _row(proposal, verdict, metrics)
            checkpoint = verdict.checkpoint
            if has_runs:
                cells.insert(1, Cell(shown_run(runs[checkpoint.name])))
            if has_series:
                cells.insert(1, Cell(checkpoint.series))
            rows.append(cells)
        right = " ".join(("STEP", "SAVED", "SIZE", *(name.upper() for name in metrics)))
        self.output.table(header, rows, right=right)
        if self.verbose:
            for checkpoint in plan.dropped:
                self.output.line(f"  {checkpoint.name}  {size_text(checkpoint.size_bytes)}")

    def _summary(self, proposal: Proposal, outcome: Applied | None) -> dict[str, Json]:
        return {
            "policy": proposal.policy,
            "filters": {"series": self.series, "conditions": self.chosen.texts},
            "by_series": proposal.by_series,
            "kept": len(proposal.kept),
            "kept_bytes": sum(c.size_bytes for c in proposal.kept),
            "dropped": len(proposal.dropped),
            "unproven": dict(Counter(c.state.value for c in proposal.kept if c.is_unproven)),
            "freed_bytes": sum(c.size_bytes for c in proposal.dropped),
            "leftovers": [str(c.path) for c in proposal.leftovers],
            "expired_bytes": sum(batch.size_bytes for batch in proposal.expired),
            "spared_bytes": sum(batch.size_bytes for batch in proposal.spared),
            "is_done": outcome is not None,
            "removed": [] if outcome is None else [str(c.path) for c in outcome.removed],
            "trash": str(outcome.batch) if outcome is not None and outcome.batch else None,
            "notes": [] if outcome is None else list(outcome.notes),
        }


def report_refused(proposal: Proposal, *, as_json: bool) -> Exit:
    """Report the errors of lines that were left out; return the exit code, 0 without any."""
    return report_all(proposal.refused, is_partial=True, as_json=as_json)


def plan_items(proposal: Proposal) -> list[dict[str, Json]]:
    """Return the JSON items of a plan: checkpoints, with the reasons why they stay or go."""
    return [
        {
            **render.checkpoint_json(verdict.checkpoint),
            "line": runs[verdict.checkpoint.name],
            "keep": verdict.is_kept,
            "reasons": [_reason(reason) for reason in verdict.reasons],
            "nearest": [_reason(reason) for reason in verdict.nearest],
        }
        for one in proposal.plans
        for runs in [run_by_name(one.counted.lines)]
        for verdict in one.plan.verdicts
    ]


def _reason(reason: Reason) -> dict[str, Json]:
    return {
        "rule": reason.rule,
        "detail": reason.detail,
        "rank": reason.rank,
        "of": reason.of,
        "value": reason.value,
    }


def _metrics(policy: RetentionPolicy) -> list[str]:
    return list(dict.fromkeys(rule.metric for rule in policy.rules if isinstance(rule, Best)))


def _row(proposal: Proposal, verdict: Verdict, metrics: Sequence[str]) -> list[Cell]:
    checkpoint = verdict.checkpoint
    word = "keep" if verdict.is_kept else "drop"
    if verdict.is_kept:
        why = "; ".join([reason.detail for reason in verdict.reasons])
    else:
        why = "nearest: " + (", ".join([reason.detail for reason in verdict.nearest]) or "none")
    return [
        render.state(word),
        Cell(render.step(checkpoint)),
        Cell(render.age(checkpoint.saved_at, proposal.now)),
        Cell(size_text(checkpoint.size_bytes)),
        *[Cell(render.number(checkpoint.metrics.get(name))) for name in metrics],
        render.state(checkpoint.state.value),
        Cell(why),
    ]


def _fate(leftover: Checkpoint) -> str:
    if leftover.state is State.WRITING:
        return "stays"
    if parse_shard_name(leftover.name) is not None:
        return "stays; its run removes it at a later save"
    # The data of a manifest may still be on the way to the directory.
    return (
        "goes when it has been here for a day" if is_manifest(leftover) else "would be cleaned up"
    )


def _mark(group: Sequence[Verdict]) -> str:
    if any(verdict.checkpoint.state is State.CORRUPT for verdict in group):
        return "corrupt"
    return "keep" if any(verdict.is_kept for verdict in group) else "drop"


def _short(steps: int) -> str:
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)
