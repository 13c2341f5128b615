"""Context parallelism: ranks of a context group get the same batch, and divide each sequence between them in the model."""
