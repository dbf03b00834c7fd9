"""Assistant messages: what a model writes, told apart into content, reasoning and tool calls.

One small file per style; `reader` runs them over text that is still arriving. Pure: knows neither
tokens nor HTTP.
"""
