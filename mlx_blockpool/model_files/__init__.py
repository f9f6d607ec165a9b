"""Models before they are loaded: their config, weights and memory, and the memory of the
machine.
"""

from __future__ import annotations
