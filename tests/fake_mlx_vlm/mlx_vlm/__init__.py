"""As much of mlx-vlm as plugins/vision_text.py uses, for tests without it."""
