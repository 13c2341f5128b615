"""The engine: initialize(), forward, backward, step, and the pipeline engine."""
