# SPDX-License-Identifier: Apache-2.0
"""MindSpore's strategy files and the tools that merge, unify and transform rank files."""
