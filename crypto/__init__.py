# SPDX-License-Identifier: Apache-2.0
"""Bytes to sealed bytes and back; no primitive is written here, `cryptography` does them all."""
