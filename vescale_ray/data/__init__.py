"""Text as bytes, and the order in which samples are read.

``corpus`` turns files into fixed windows of bytes with a held-out part. ``stream`` shuffles the window ids by a seeded permutation,
with one integer as its whole state. Imports numpy and torch, and no higher layer of this package.
"""
