# SPDX-License-Identifier: Apache-2.0
"""Named tensors to a file: image, seal, stream, publish."""
