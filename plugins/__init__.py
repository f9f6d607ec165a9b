"""The bundled plugins, one module each. Shipped as the package mlx_blockpool_plugins."""
