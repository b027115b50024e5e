# SPDX-License-Identifier: Apache-2.0
"""One checkpoint file: writing, opening, reading."""
