"""Writing a model in another format."""
