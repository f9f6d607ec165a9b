"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import os
import tempfile

# No test may look for a model or a cache outside of what it made.
os.environ["HF_HUB_OFFLINE"] = "1"
CACHES = tempfile.TemporaryDirectory(prefix="mlx-blockpool-tests-")
os.environ["XDG_CACHE_HOME"] = CACHES.name
