"""`dsx bench scale`: how the exchange grows with the number of clusters."""

from dsx.bench.scale.command import add_arguments, run

__all__ = ["add_arguments", "run"]
