# SPDX-License-Identifier: Apache-2.0
"""An observer that logs events."""

from ckptmgr.observe.log import *  # noqa: F403 - a door: the public path of that module
