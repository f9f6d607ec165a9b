"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import os

# No test may look for a model or a cache outside of what it made.
os.environ["HF_HUB_OFFLINE"] = "1"
