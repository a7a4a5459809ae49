"""The HTTP face of the engine: /generate, the OpenAI routes, metrics and administration."""
