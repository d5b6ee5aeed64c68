"""What the host does between two launches, one small piece at a time: by the clock, or by instructions."""
