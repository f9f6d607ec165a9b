"""The commands of mlx-blockpool, a file for each."""
