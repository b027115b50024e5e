# SPDX-License-Identifier: Apache-2.0
"""One directory of checkpoints: manifests, publishing, listing, recovery, trash."""
