# SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: feed every parser with damaged, hostile and random inputs; see `__main__`."""
