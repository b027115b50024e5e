# SPDX-License-Identifier: Apache-2.0
"""Report about a directory: what is kept and why, what saves cost, what failed."""
