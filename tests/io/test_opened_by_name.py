# SPDX-License-Identifier: Apache-2.0
"""Files beside checkpoints are reached through their directory; these places alone open by a name."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import ckptmgr

_SOURCES = Path(ckptmgr.__file__).parent
_ON_PATHS = {"write_text", "write_bytes", "touch", "hardlink_to", "symlink_to", "chmod"}
_OF_OS = {"open", "mkdir", "makedirs", "symlink", "link", "rename", "replace", "unlink", "truncate"}
_MODES = {"r", "rb", "w", "wb", "x", "xb", "a", "ab", "r+b"}

BY_NAME = {
    # the rooms of the disk: through a held directory wherever one is held
    "io/appending.py": "its own directory, which is made; entries through its descriptor",
    "io/descriptors.py": "directories, and entries of held ones",
    "io/files.py": "what it is given a descriptor of the directory for, or a path of a user",
    "io/filesystem.py": "the file system itself",
    # files that a user names, outside of a run, or the machine's
    "cli/__init__.py": "/dev/null in the place of closed streams",
    "cli/exits.py": "/dev/null",
    "cli/commands/prove.py": "the directory of the runs that it starts, which a user names or nobody else knows",
    "cli/commands/report.py": "--events FILE; the page that -o names, by a random name and a rename",
    "parallel/layout.py": "a layout file that a user names",
    "parallel/mindspore/distributed.py": "a rank list that a user names",
    "integrations/safetensors/opening.py": "a file that a user names, for the library",
    # folders of this process alone, of mode 0700 and a random name
    "objects/staging.py": "the private folder of uploads",
    "engine/spill.py": "the private folder of spilled memory",
    "integrations/transformers/callback.py": "the private folder that the Trainer reads",
    # programs of tests of a user
    "testing/grid.py": "the page that a user names",
    "testing/kit.py": "results of runs, in a folder of the kit",
}


def _is_by_name(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.value.id == "os":
        return function.attr in _OF_OS
    if function.attr == "open" and call.args and isinstance(call.args[0], ast.Constant):
        return call.args[0].value in _MODES
    if function.attr == "mkdir":
        return True
    return function.attr in _ON_PATHS


def _found() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in sorted(_SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _is_by_name(node):
                found[path.relative_to(_SOURCES).as_posix()] += 1
    return found


@pytest.mark.slow
def test_every_place_that_opens_by_a_name_is_listed_with_its_reason() -> None:
    found = _found()
    assert found.keys() - BY_NAME.keys() == set()
    assert BY_NAME.keys() - found.keys() == set()
