"""mlx-lm's server on a block pool. The only room that knows mlx_lm.server."""

from ..upstream import check_version

check_version()
