"""Private names of torch's distributed checkpoint (DCP), for the bridges to its format."""

from __future__ import annotations

from vescale_ray.compat import private_names

with private_names():
    # Gives nested states the names that DCP gives them.
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    # The place of a tensor in a file of a DCP checkpoint, written into its metadata.
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
