# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as a table in a notebook: what Jupyter shows for a manager and its list of checkpoints.

The HTML consists of paragraphs and tables, without scripts, styles, links and pictures; every text
is escaped. What keeps a checkpoint is found as in a report: by the policy that its run recorded,
else by that of the manager. Nothing is verified or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.sizes import size_text
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store.store import Store

if TYPE_CHECKING:  # nothing of a report is imported before one is shown
    from ckptmgr.maintenance.report.model import RunReport

_MOST_ROWS = 1000


class CheckpointList(list[Checkpoint]):
    """A list of checkpoints that a notebook shows as a table; copies of it are plain lists."""

    __slots__ = ("_view",)

    def __init__(self, found: Iterable[Checkpoint], view: NotebookView) -> None:
        super().__init__(found)
        self._view = view

    def __reduce__(self) -> tuple[type[list[Checkpoint]], tuple[list[Checkpoint]]]:
        """Return how a copy is made: without the manager."""
        return list, (list(self),)

    def _repr_html_(self) -> str:
        return self._view.table(self)


class NotebookView:
    """Shows the checkpoints of a series."""

    def __init__(
        self, store: Store, series: str, *, policy: RetentionPolicy, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._series = series
        self._policy = policy
        self._clock = clock

    def page(self, found: Iterable[Checkpoint]) -> str:
        """Return the HTML of a manager: its directory and series, and the table."""
        from ckptmgr.maintenance.report.charts import shown

        head = f"{self._store.directory}, series {self._series}"
        return f"<p>{shown(head)}</p>{self.table(list(found))}"

    def table(self, found: list[Checkpoint]) -> str:
        """Return the HTML of checkpoints, the newest first, under the policy that explains them."""
        from ckptmgr.maintenance.report.charts import shown
        from ckptmgr.maintenance.report.model import usual_metrics
        from ckptmgr.maintenance.report.page import cells, number, utc

        if not found:
            return "<p>no checkpoints</p>"
        try:
            report = self._report()
            if report.refused and report.policy is None:
                raise report.refused[0]
            entries = {one.path: one for one in report.entries}
            head = "; ".join(report.policy_sentences())
        except (CkptmgrError, OSError) as error:
            entries, head = {}, f"what keeps them is unknown: {error}"
        metrics = usual_metrics([one.metrics for one in found])
        rows = []
        for one in found[: -_MOST_ROWS - 1 : -1]:
            entry = entries.get(one.path)
            rows.append(
                (
                    str(one.step),
                    utc(one.saved_at),
                    size_text(one.size_bytes),
                    *(number(one.metrics.get(name)) for name in metrics),
                    one.state.value,
                    "-" if entry is None else entry.fate.value,
                    "-" if entry is None else "; ".join(entry.why),
                    one.name,
                )
            )
        header = ("step", "saved", "size", *metrics, "state", "fate", "why", "file")
        left_out = len(found) - len(rows)
        more = f"<p>and {left_out:,} older ones</p>" if left_out else ""
        others = len({name for one in found for name in one.metrics}) - len(metrics)
        more += f"<p>and {others:,} more metrics</p>" if others else ""
        return f"<p>{shown(head)}</p>{cells(header, rows)}{more}"

    def _report(self) -> RunReport:
        from ckptmgr.maintenance.prune_plan import Counted
        from ckptmgr.maintenance.recorded_policy import recorded_policy
        from ckptmgr.maintenance.report.model import make_report

        def policy_of(counted: Counted) -> RetentionPolicy:
            return recorded_policy(self._store, counted) or self._policy

        now = datetime.fromtimestamp(self._clock(), UTC)
        return make_report(self._store, policy=policy_of, now=now, series=self._series)
