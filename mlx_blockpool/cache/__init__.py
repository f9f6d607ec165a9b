"""Layer caches that stand in for mlx-lm's, and the slabs behind them. The only room with mlx-lm's cache words."""
