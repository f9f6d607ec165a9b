"""The pool works for models of type my_arch."""

from __future__ import annotations

import json
from pathlib import Path

import my_arch

from mlx_blockpool.testing import Conformance


class TestMyArch(Conformance):
    config = json.loads(Path(__file__).parent.with_name("config.json").read_text())
    provider = my_arch
