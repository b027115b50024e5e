# SPDX-License-Identifier: Apache-2.0
"""Bytes and files of any kind: file system, locks, threads, buffers, digests. Knows no checkpoint."""
