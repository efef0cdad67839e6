"""Asynchronous saves: agreement of the ranks, time limits, votes, and the handle that a save returns."""
