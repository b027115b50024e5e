# SPDX-License-Identifier: Apache-2.0
"""Observers that log events, or append them to a file."""

from ckptmgr.observe.json_lines import *  # noqa: F403 - a door: the public path of these modules
from ckptmgr.observe.log import *  # noqa: F403
