"""Where a model comes from: aliases, the hub, packages, local folders and files."""
