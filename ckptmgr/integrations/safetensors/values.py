# SPDX-License-Identifier: Apache-2.0
"""Values of checkpoint files as tensors of a framework, on a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError

from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.formats.tensor import PackedArray

_NAMES = {
    **dict.fromkeys(("pt", "torch", "pytorch"), "pytorch"),
    **dict.fromkeys(("np", "numpy"), "numpy"),
    **dict.fromkeys(("jax", "flax"), "flax"),
}
_LIBRARY_ONLY = ("tf", "tensorflow", "mlx", "paddle")
_PACKED_IN_TORCH = {"F4": "float4_e2m1fn_x2"}


class Conversion(NamedTuple):
    """A framework and a device.

    Attributes:
        framework: `pytorch`, `numpy` or `flax`.
        device: Of torch tensors; else `cpu`.
    """

    framework: str
    device: Any

    @classmethod
    def of(cls, framework: str, device: Any) -> Conversion:
        """Return the conversion for the arguments of `safe_open`.

        Raises:
            SafetensorError: The framework is unknown, or is not on this device; as the library.
            UnsupportedCheckpoint: Only the library reads files for this framework.
        """
        known = _NAMES.get(framework)
        if known is None:
            if framework in _LIBRARY_ONLY:
                raise UnsupportedCheckpoint(
                    f"encrypted and compressed files are not read for framework {framework!r}",
                    hint="pass framework='np' and convert the arrays",
                )
            raise SafetensorError(f"framework {framework} is invalid")
        device = "cpu" if device is None else device
        if known != "pytorch" and device != "cpu":
            raise SafetensorError(f"Device {device} is not supported for framework {known}")
        return cls(known, device)

    def of_value(self, value: Any, name: str) -> Any:
        """Return an array or packed elements as a tensor.

        Raises:
            UnsupportedCheckpoint: The framework has no type for packed elements.
        """
        if self.framework == "numpy":
            return value
        if self.framework == "flax":
            import jax.numpy as jnp

            return jnp.asarray(_unpacked(value, name, self.framework))
        return self._torch(value, name).to(self.device)

    def _torch(self, value: Any, name: str) -> Any:
        import torch

        from ckptmgr.state.arrays import torch_tensor

        spelling = _PACKED_IN_TORCH.get(value.dtype) if isinstance(value, PackedArray) else None
        if spelling is None or value.shape[-1] % 2:
            return torch_tensor(_unpacked(value, name, self.framework))
        elements = torch_tensor(value.data).view(getattr(torch, spelling))
        return elements.reshape(*value.shape[:-1], value.shape[-1] // 2)


def _unpacked(value: Any, name: str, framework: str) -> np.ndarray:
    if isinstance(value, PackedArray):
        raise UnsupportedCheckpoint(
            f"{name!r} is {value.dtype}{list(value.shape)}, for which {framework} has no type",
            hint="pass framework='np', which returns the bytes as a PackedArray",
        )
    array: np.ndarray = value
    return array
