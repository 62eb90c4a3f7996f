"""The outer engine: rounds, overlap, averaging, outer optimizer. Tensors only."""
