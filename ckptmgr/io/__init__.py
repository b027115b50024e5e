# SPDX-License-Identifier: Apache-2.0
"""File system, locks, threads, buffers, digests, for files of any kind, not only checkpoints."""
