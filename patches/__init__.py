"""Source patches for mlx-lm, one folder per mlx-lm version.

A folder holds unified diffs and a manifest with the sha256 of each file before and after. Knows
nothing of how they are
applied: that is mlx_blockpool.commands.patch.
"""
