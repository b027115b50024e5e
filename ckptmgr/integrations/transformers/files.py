# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Transformers pyright takes this folder for it)
"""Files of a checkpoint as the Trainer writes and reads them."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from transformers import TrainerState

from ckptmgr.state.global_random import GlobalRandom


def text_of(state: TrainerState) -> str:
    """Return the state as the Trainer writes it."""
    number = os.memfd_create("trainer_state.json")
    with os.fdopen(number, "rb") as file:
        state.save_to_json(f"/proc/self/fd/{number}")
        return file.read().decode()


def weights_file(values: Mapping[str, Any]) -> bytes:
    """Return safetensors; tied weights come twice, because the file has no views."""
    seen: set[int] = set()
    tensors = {}
    for name, value in values.items():
        tensor = torch.as_tensor(value).contiguous()
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return safetensors_bytes(tensors, metadata={"format": "pt"})


def random_of_trainer(stored: Mapping[str, Any]) -> dict[str, object]:
    """Return random states as the Trainer stores them."""
    present = GlobalRandom().state_dict()
    GlobalRandom().load_state_dict(stored)
    try:
        found: dict[str, object] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.get_rng_state(),
        }
        if torch.cuda.is_available():  # pragma: no cover - needs CUDA
            found["cuda"] = torch.cuda.get_rng_state()
    finally:
        GlobalRandom().load_state_dict(present)
    return found
