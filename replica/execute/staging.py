"""Host arrays on their way to the device: copies that the host does not wait for. Knows nothing of what they hold."""

from typing import Any

import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy without waiting: from fresh pinned memory on CUDA, which torch keeps until the copy has run.

    From pageable memory a copy of more than 64 KiB would wait for all steps launched before it. On CPU: the array.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
