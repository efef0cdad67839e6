"""Files of a data set: local text, documents, token ids, the search for them, and reads ahead of training."""
