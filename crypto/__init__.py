# SPDX-License-Identifier: Apache-2.0
"""Bytes to sealed bytes and back; no primitive is written here: `cryptography` and `blake3` do them all."""
