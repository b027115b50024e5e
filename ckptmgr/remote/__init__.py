# SPDX-License-Identifier: Apache-2.0
"""Work with object stores: the mirror of a run, copies in both directions, prune, the probe."""
