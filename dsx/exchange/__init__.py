"""Bytes between clusters: one interface, an in-process and a torchft implementation."""
