"""mlx-lm's server on a block pool.

The only package that uses mlx_lm.server, through mlx_lm_compat.
"""

from ..mlx_lm_compat import check_version

check_version()
