"""The pool works for llama models as this plugin describes them."""

from __future__ import annotations

import json
from pathlib import Path

import blockpool_tiny_llama

from mlx_blockpool.testing import Conformance


class TestTinyLlama(Conformance):
    config = json.loads(Path(__file__).parent.with_name("config.json").read_text())
    provider = blockpool_tiny_llama
