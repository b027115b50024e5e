# SPDX-License-Identifier: Apache-2.0
"""One module for each command, or for commands that share their options."""
