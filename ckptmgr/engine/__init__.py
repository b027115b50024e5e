# SPDX-License-Identifier: Apache-2.0
"""Background saves: staging memory, threads, the worker process, snapshots."""
