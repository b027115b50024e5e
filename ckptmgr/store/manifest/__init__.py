# SPDX-License-Identifier: Apache-2.0
"""The manifest beside every data file: fields, JSON, proofs, files."""
