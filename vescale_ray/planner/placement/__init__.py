"""The division of tensors over ranks: layouts of buffers, lower bounds, and the search for the layout with the least padding."""
