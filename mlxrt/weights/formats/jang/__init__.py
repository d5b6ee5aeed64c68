"""JANG checkpoints: labels, bit streams, JANGTQ and JANGH."""
