"""Private names of torch's distributed checkpoint (DCP) and of ``torch.load``, for the bridges to their formats."""

from __future__ import annotations

from typing import IO, Any

import torch

from vescale_ray.compat import private_names

with private_names():
    # Loads an archive without its elements.
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Gives nested states the names that DCP gives them.
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    # The place of a tensor in a file of a DCP checkpoint, written into its metadata.
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

    # A part of a file as a file.
    from torch.distributed.checkpoint.utils import _create_file_view as file_view


def load_without_elements(file: IO[bytes]) -> Any:
    """Return what ``torch.save`` wrote to ``file``, with fake tensors, whose elements are not read."""
    with FakeTensorMode():
        return torch.load(file, weights_only=True)


def elements_offset(tensor: torch.Tensor) -> int:
    """Return the byte in the archive at which the storage of a tensor of :func:`load_without_elements` begins."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset
