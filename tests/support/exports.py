# SPDX-License-Identifier: Apache-2.0
"""What can be seen of an export of weights with some options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckptmgr import export_weights, save_state
from ckptmgr.store.manifest.codec import manifest_name
from tests.support.options import tried

_STATE = {"net": {"w": np.ones(2, np.float32), "b": np.zeros(2)}, "optimizer": {"m": np.ones(3)}}


def exported(
    directory: Path,
    /,
    *,
    saved: Mapping[str, Any] | None = None,
    is_authenticated: bool = True,
    is_there_already: bool = False,
    **options: Any,
) -> object:
    """Return the files of an export, by name, or the kind of the error of a refusal."""
    path = directory / "x.ckpt"
    save_state(_STATE, path, **(saved or {}))
    save_state({"other": np.ones(1)}, directory / "other.ckpt")
    if not is_authenticated:
        manifest = directory / manifest_name(path.name)
        document = json.loads(manifest.read_text())
        del document["auth"]
        manifest.chmod(0o600)
        manifest.write_text(json.dumps(document))
    if is_there_already:
        export_weights(directory / "other.ckpt", directory / "out")
    given = {"path": path, "directory": directory / "out", **options}

    def run() -> object:
        export_weights(**given)
        folders = [directory / name for name in ("out", "elsewhere")]
        return {
            str(one.relative_to(directory)): one.read_bytes()
            for folder in folders
            if folder.is_dir()
            for one in sorted(folder.iterdir())
        }

    return tried(run)
