"""OpenAI's Responses API: bodies, conversations, events, and what is kept of them."""
