"""The real default model against other engines."""
