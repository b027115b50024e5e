# SPDX-License-Identifier: Apache-2.0
"""Fail when the branch coverage is below what we promise.

Reads the report of `coverage json`. Every file of `formats/` and `crypto/` and every pure decision module must be
covered completely; all other files together to at least 95 %.

    coverage json -o .coverage-figures.json && python tools/check_coverage.py .coverage-figures.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

COMPLETE_FOLDERS = ("formats/", "crypto/", "ckptmgr/policy/")
COMPLETE_MODULES = ("ckptmgr/config/config.py", "ckptmgr/config/checks.py", "ckptmgr/core/names.py")
REST_MINIMUM_PERCENT = 95.0


class Summary(TypedDict):
    """The totals of one file, as coverage names them."""

    covered_lines: int
    num_statements: int
    covered_branches: NotRequired[int]
    num_branches: NotRequired[int]


class FileReport(TypedDict):
    """One file of the report."""

    summary: Summary


class Report(TypedDict):
    """The part of the report that is read here."""

    files: dict[str, FileReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Lines and branches together, which is how coverage computes its percentage."""

    covered: int
    total: int

    @property
    def percent(self) -> float:
        """The covered share; an empty file is covered."""
        return 100.0 * self.covered / self.total if self.total else 100.0


def promise(path: str) -> str | None:
    """Return the folder or module whose files must be covered completely that a file belongs to.

    `ckptmgr/policy/rules.py` is a part of `retention` that was split off.
    """
    for folder in COMPLETE_FOLDERS:
        if path.startswith(folder):
            return folder
    return path if path in COMPLETE_MODULES else None


def count(reports: list[FileReport]) -> Count:
    """Add up the lines and branches of some files."""
    summaries = [report["summary"] for report in reports]
    if any("num_branches" not in summary for summary in summaries):
        raise SystemExit("the report has no branches\nhint: measure with branch = true")
    return Count(
        covered=sum(s["covered_lines"] + s.get("covered_branches", 0) for s in summaries),
        total=sum(s["num_statements"] + s.get("num_branches", 0) for s in summaries),
    )


def complaints(report: Report) -> list[str]:
    """Return one sentence for each promise that is broken."""
    files = report["files"]
    kept = {path: name for path in sorted(files) if (name := promise(path)) is not None}
    rest = count([file for path, file in files.items() if path not in kept])
    found = [
        f"{name}: was not measured"
        for name in (*COMPLETE_FOLDERS, *COMPLETE_MODULES)
        if name not in kept.values()
    ]
    found += [
        f"{path}: {figures.percent:.1f} %, must be 100 %"
        for path in kept
        if (figures := count([files[path]])).covered < figures.total
    ]
    if rest.percent < REST_MINIMUM_PERCENT:
        found.append(f"all other files: {rest.percent:.1f} %, must be {REST_MINIMUM_PERCENT:g} %")
    return found


def main() -> None:
    """Check the report named on the command line."""
    report: Report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = complaints(report)
    if found:
        sys.exit("coverage is too low\n" + "\n".join(found))
    print(f"coverage: all promises hold ({count(list(report['files'].values())).percent:.1f} %)")


if __name__ == "__main__":
    main()
