"""Planning a run before it is paid for: models by shape, clusters, the time and the memory of a step, and the search."""
