"""Storage of checkpoints: the interface ``store``, and its back ends in files, in S3, over fsspec and in memory."""
