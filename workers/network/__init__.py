"""Process groups of a generation, their connections, and probes that tell which workers reach each other, without Ray."""
