# SPDX-License-Identifier: Apache-2.0
"""The field numbers, names and limits of a MindSpore `.ckpt`, shared by its writer and its reader.

```
message Checkpoint { repeated Value value = 1;
  message Value { required string tag = 1;
                  oneof value { TensorProto tensor = 2; MapTensorProto maptensor = 3; } } }
message TensorProto { repeated int64 dims = 1; required string tensor_type = 2; required bytes tensor_content = 3; }
message MapTensorProto { repeated TensorProto tensor = 1; }
```

A file is a run of `Checkpoint` messages of one value each, then an optional CRC trailer. A tensor
of more than 512 MiB spans several adjacent values that repeat its tag, dims and type.

Source: `checkpoint.proto` and `train/serialization.py` of MindSpore 2.10.
"""

from __future__ import annotations

CHECKPOINT_VALUE = 1
VALUE_TAG, VALUE_TENSOR, VALUE_MAPTENSOR = 1, 2, 3
TENSOR_DIMS, TENSOR_TYPE, TENSOR_CONTENT = 1, 2, 3
MAPTENSOR_TENSOR = 1

CHECKPOINT_METADATA = 17229
"""Our top-level field: a UTF-8 JSON object of strings. MindSpore skips unknown field numbers."""

TEXT_TYPE = "str"
SCALAR_DIMS = (0,)
"""How texts and, in old files, scalars spell their shape."""

SLICE_BYTES = 512 * 1024 * 1024
MAX_DIM = 2**31 - 1
"""MindSpore converts dims to a C int."""
MAX_RANK = 64
"""NumPy's limit."""
MAX_TEXT_BYTES = 64 * 1024 * 1024
MAX_METADATA_BYTES = 64 * 1024 * 1024

MAP_PARTS = ("key", "value", "status")
MAP_DTYPES = frozenset({"int32", "float16", "float32", "float64"})
"""The types MindSpore reads back from a MapParameter; it takes all others for float64."""
