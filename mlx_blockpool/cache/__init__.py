"""Layer caches that stand in for mlx-lm's, and the slabs behind them. The only room with mlx-lm's cache words."""

from ..upstream import check_version

# Before a module of this room imports what another mlx-lm may not have.
check_version()
