"""Train the demo model: python -m mlx_blockpool.demo.train [--out DIR].

Reads questions.json (topics) and systems.json (sentences of system messages), writes a folder that mlx_lm.load takes.
The last question of each topic is never trained on: it measures whether reworded questions get the right answer.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
from mlx.utils import tree_map
from mlx_lm.models import llama
from tqdm import tqdm

from . import model_path
from .conversations import Message, Topics, load_json, long_system, sample, single
from .numpy_math import numpy_math
from .tokenizer import IM_END, encode, save_tokenizer, train_tokenizer

STEPS = 1000
LEARNING_RATE = 4e-3
# Conversations per batch and turns: short ones teach most per second, long ones teach distance.
BATCHES = {"single": 48, "turns": 14, "long": 5}
SHARES = {"single": 0.6, "turns": 0.3, "long": 0.1}


def model_config(vocab_size: int, eos: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 352,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "eos_token_id": eos,
    }
