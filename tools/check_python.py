# SPDX-License-Identifier: Apache-2.0
"""Name missing programs before a virtual environment is made. Runs on any Python 3.6 or newer."""

import importlib.util
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"ckptmgr needs Python 3.11 or newer, but {sys.executable} is "
        f"{sys.version_info[0]}.{sys.version_info[1]}.\nhint: make PYTHON=/path/to/python3.11"
    )
if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
    sys.exit(
        f"{sys.executable} cannot make virtual environments: its ensurepip module is missing.\n"
        "hint: on Debian and Ubuntu, install the package python3-venv"
    )
