"""Files of caches, and the folder of computed prompts."""
