# SPDX-License-Identifier: Apache-2.0
"""`CheckpointConfig` and `MemoryConfig`: MindSpore's options, checked at construction."""
