# SPDX-License-Identifier: Apache-2.0
"""The errors that ckptmgr raises."""

from ckptmgr.core.errors import *  # noqa: F403 - a door: the public path of that module
