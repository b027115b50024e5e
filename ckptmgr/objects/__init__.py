# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in object stores: S3, Google Cloud Storage, Azure; all requests go through obstore.

Start reading at `directory`: where the objects of a checkpoint are, and in which order requests
write and remove them.
"""
