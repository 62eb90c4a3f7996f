"""Measurements of this machine and this installation, each against something run beside it."""
