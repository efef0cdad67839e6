"""What is sharded and how: shardings, dtypes, parameters, and their division over ranks."""
