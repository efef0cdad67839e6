"""Text as bytes, and the order in which it is read.

``corpus`` turns files into fixed windows of bytes with a held-out part; ``stream`` shuffles the window ids by a seeded
permutation whose whole state is one integer. May import numpy and torch, and nothing of the layers above them.
"""
