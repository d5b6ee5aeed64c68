"""JANG, JANGTQ and codebook bundles: read exactly, refused in one line, written so that others read them."""
