"""pytest in processes of its own, with the plugin."""

from __future__ import annotations

from importlib.metadata import entry_points

# An environment that was set up before there was an entry point has the plugin under its module's
# name.
HAS_ENTRY_POINT = any(point.name == "blockpool" for point in entry_points(group="pytest11"))
PLUGIN = [] if HAS_ENTRY_POINT else ["-p", "mlx_blockpool.testing.pytest_plugin"]
