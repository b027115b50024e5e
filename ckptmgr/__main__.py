# SPDX-License-Identifier: Apache-2.0
"""`python -m ckptmgr`."""

from ckptmgr.cli import main

main()
