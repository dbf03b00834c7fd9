"""Where a model's files come from: a directory, a bucket or the Hub. Knows no jax and no model."""
