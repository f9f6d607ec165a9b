"""The bundled architecture providers, one module each. Shipped as the package mlx_blockpool_plugins."""
