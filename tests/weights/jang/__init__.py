"""JANG, JANGTQ and codebook checkpoints: read exactly, refused in one line, written so that others read them."""
