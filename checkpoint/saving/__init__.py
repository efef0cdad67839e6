"""Asynchronous saves: agreement of the ranks, time limits, votes, the proof of a commit, and the handle that a save returns."""
