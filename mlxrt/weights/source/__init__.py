"""Where a model comes from: local files, aliases, the hub."""
