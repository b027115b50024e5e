# SPDX-License-Identifier: Apache-2.0
"""Report about a directory: kept checkpoints and why, costs of saves, failures."""
