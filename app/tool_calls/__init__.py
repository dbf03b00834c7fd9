"""Tool calls and reasoning: what a model writes, told apart into content, reasoning and calls.

One small file per style; `reader` runs them over text that is still arriving, `schema` is the
client's side. Pure: knows neither tokens nor HTTP.
"""
