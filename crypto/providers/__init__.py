# SPDX-License-Identifier: Apache-2.0
"""Services that guard keys: one call wraps the key of a run, and nothing but that service unwraps it.

`provider` says what a service must offer, `run_key` calls it once for a run, `registry` finds one by its address. None of
them is imported, and no process started, before an address asks for it.
"""
