# SPDX-License-Identifier: Apache-2.0
"""A file to named tensors: open, verify, decrypt, index, read."""
