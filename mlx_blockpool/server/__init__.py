"""mlx-lm's server on a block pool. The only room that knows mlx_lm.server."""

from ..mlx_lm_compat import check_version

check_version()
