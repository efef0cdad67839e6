"""The number of workers: hiring and dismissal, free places in the cluster, and requests for places to Ray's autoscaler."""
