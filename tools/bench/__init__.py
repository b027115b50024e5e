# SPDX-License-Identifier: Apache-2.0
"""Measure saves and loads against the disk and against other libraries: `python tools/bench --help`."""
