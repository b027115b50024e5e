# SPDX-License-Identifier: Apache-2.0
"""Key services: one call wraps the key of a run, and only that service unwraps it.

`provider` is the interface of a service, `run_key` calls it once for a run, `registry` opens one by
its address. None of them is imported, and no process started, before an address asks for it.
"""
