# SPDX-License-Identifier: Apache-2.0
"""The benchmark is no part of the package: its tests need a checkout."""

from __future__ import annotations

from pathlib import Path

collect_ignore_glob: list[str] = []
if not (Path(__file__).parents[2] / "tools" / "bench").is_dir():
    collect_ignore_glob.append("test_*.py")
