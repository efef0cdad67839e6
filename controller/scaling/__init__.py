"""The number of workers: hiring and dismissal, free places in the cluster, and wishes (requests for places) to Ray's autoscaler."""
