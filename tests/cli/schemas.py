# SPDX-License-Identifier: Apache-2.0
"""Run a command with `--json` and compare its output with its schema in `docs/schemas`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import run
from tests.support.json_schema import violations

_SCHEMAS = Path(__file__).parents[2] / "docs/schemas"


def run_with_schema(
    *arguments: str | Path, code: int = 0, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the document that a command prints, which ends with `code` and fits its schema."""
    result = run(*arguments, "--json", env=env)
    assert result.exit_code == code, result.stderr
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    name = document["schema"].removeprefix("ckptmgr.").partition("/")[0]
    if not _SCHEMAS.exists():
        pytest.skip("needs the sources: the schemas are not installed")
    schema = json.loads((_SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    assert list(violations(document, schema)) == []
    return document
