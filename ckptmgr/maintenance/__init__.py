# SPDX-License-Identifier: Apache-2.0
"""The work of operators: verify, prune, convert, rekey, repair."""
