"""What OpenAI's API has beyond mlx-lm's server, and its errors."""
