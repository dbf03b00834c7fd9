"""The engine: token ids in, token ids out; it knows nothing of text, HTTP or Ray."""
