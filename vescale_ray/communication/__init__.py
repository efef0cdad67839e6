"""Communication of the ranks beyond torch's own: messages between two ranks, waits that another thread can end, and collectives."""
