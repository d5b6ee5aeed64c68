"""Converting a model to another weight format."""
