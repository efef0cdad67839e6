"""The format of a checkpoint: a rank's object, the manifest, checksums, and verified reads of any range of any tensor."""
