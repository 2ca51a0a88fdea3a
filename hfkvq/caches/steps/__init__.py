"""Step buffers: decode steps that the host need not see."""
