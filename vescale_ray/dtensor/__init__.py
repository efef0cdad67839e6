"""RaggedDTensor: torch's DTensor with a RaggedShard on one mesh dimension, its operations, and its moves between placements.

The public names are exported here; ``ragged_dtensor`` describes the class. An import of this package registers the class with torch.
"""

from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor, RaggedFallbackWarning, distribute_tensor, local_interval, redistribute

__all__ = ["RaggedDTensor", "RaggedFallbackWarning", "RaggedShard", "distribute_tensor", "local_interval", "redistribute"]
