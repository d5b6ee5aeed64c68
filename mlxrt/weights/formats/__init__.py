"""How weights are stored: one file per format. None of them knows an architecture."""
