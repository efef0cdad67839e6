"""The order of samples, computed from a position: permutations, shuffles of blocks, shares of a mixture."""
