# SPDX-License-Identifier: Apache-2.0
"""Keep pytest, which imports every module in search of doctests, away from the one that needs MindSpore."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("mindspore") else ["training.py"]
