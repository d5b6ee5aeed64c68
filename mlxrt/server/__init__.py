"""The HTTP server: OpenAI, Anthropic and Ollama protocols on one engine per model. Needs the `server` extra."""
