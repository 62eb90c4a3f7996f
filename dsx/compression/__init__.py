"""Codecs: how pseudo-gradients become bytes, and what is kept of what the bytes leave out."""
