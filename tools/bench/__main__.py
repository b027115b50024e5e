# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python tools/bench` and `python -m tools.bench`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tools.bench.command import main

    sys.exit(main(sys.argv[1:]))
