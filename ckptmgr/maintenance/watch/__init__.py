# SPDX-License-Identifier: Apache-2.0
"""Follow directories: verify checkpoints as they appear, apply retention, raise alarms."""
