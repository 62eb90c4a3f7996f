"""`dsx bench link`: what clusters reach over a slow link, beside the same clusters without one."""

from dsx.bench.link.command import add_arguments, run

__all__ = ["add_arguments", "run"]
