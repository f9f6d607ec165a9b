"""`mlx-blockpool doctor`: what fits, what was measured on this device, and what to do about the
rest.
"""

from .command import add_options

__all__ = ["add_options"]
