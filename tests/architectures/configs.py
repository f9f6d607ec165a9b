"""CONFIGS: one small config for every model type of mlx-lm, and what a few of them need to run.

Float32, a vocabulary of 131, windows and chunks of 32 tokens; each kind of layer that a model can
have is there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import mlx.core as mx

from .configs_common import Config
from .configs_dense import DENSE
from .configs_experts import WITH_EXPERTS
from .configs_hybrid import HYBRID

CONFIGS: dict[str, Config] = {**DENSE, **WITH_EXPERTS, **HYBRID}

# Kernels written in Metal have no fallback; mlx_lm.models.olmo ends the process without hf_olmo.
NEEDS: dict[str, str] = {"bitnet": "Metal", "muse_spark": "Metal", "olmo": "hf_olmo"}
_PRESENT: dict[str, Callable[[], bool]] = {
    "Metal": mx.metal.is_available,
    "hf_olmo": lambda: importlib.util.find_spec("hf_olmo") is not None,
}


def runs_here(name: str) -> bool:
    """Whether this machine has what the model type needs to run."""
    return name not in NEEDS or _PRESENT[NEEDS[name]]()


RUNNABLE: list[str] = sorted(name for name in CONFIGS if runs_here(name))
# One or two of every row of the table of architectures: what runs without --thorough.
QUICK: tuple[str, ...] = (
    "qwen3",
    "gpt_oss",
    "falcon_h1",
    "lfm2",
    "deepseek_v3",
    "deepseek_v32",
    "plamo2",
    "gemma2",
    "iquestloopcoder",
    "mamba2",
    "baichuan_m1",
    "llama4",
    "deepseek_v41",
    "recurrent_gemma",
)
