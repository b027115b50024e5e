# SPDX-License-Identifier: Apache-2.0
"""Bytes to sealed bytes and back; every primitive is that of `cryptography` or `blake3`."""
