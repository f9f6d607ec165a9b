"""Key and value blocks: the pool of them, the layer caches that stand in for mlx-lm's, and
attention over both.

The only package that uses mlx-lm's cache words.
"""

from ..mlx_lm_compat import check_version

# Before a module of this package imports what another version of mlx-lm may not have.
check_version()
