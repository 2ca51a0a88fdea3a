"""State of a layer that its parts share: padding, updates, statistics of queries, tags."""
