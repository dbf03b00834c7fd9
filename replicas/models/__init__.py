"""Model families as pure functions over pytrees, and the loading of their weights."""
