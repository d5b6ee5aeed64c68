"""Tests of where weights come from: names, aliases, the hub, published shapes."""
