"""Torch's operations on ragged tensors: the table, and the kinds of operations that it refers to.

``ops`` is the table. ``reduce``, ``views`` and ``pending`` treat some operations specially. ``fallback`` runs all others on whole tensors,
or refuses them. ``operands``, ``argument_tensors`` and ``schema`` prepare arguments. ``whole`` serves DTensors that every rank holds whole.
"""
