"""The number of workers: who is hired and dismissed, free places in the cluster, and wishes for Ray's autoscaler."""
