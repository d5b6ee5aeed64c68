"""The host's work between two launches, one hot path at a time: by the clock, or by instructions."""
