"""Parts of small models on a ring of two: pools on every rank, and the replies of the whole
model on one.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
from typing import Any

import mlx.core as mx
import pytest
from architectures.configs import CONFIGS as ARCHITECTURES
from documents import blocks
from mlx_lm.generate import generation_stream
from models import CONFIGS
from ranks.rings import on_ring

from mlx_blockpool.config import EngineConfig, KVBits
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.ranks.group import ALONE, Ranks

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("ranks")]

ROOMY = 20_000_000
TENSOR = ("llama", "gpt_oss", "qwen3_5", "deepseek_v3")
PIPELINE = ("qwen2", "qwen3_next", "deepseek_v2", "deepseek_v3")
# Without measured times ranks take the same steps also where nobody counts the time for all.
BY_COUNT = EngineConfig(decode_share=0.0)


def test_parts_of_each_layer_reply_as_the_whole_model() -> None:
    assert on_ring(parts) == [len(TENSOR)] * 2


def test_stages_reply_as_the_whole_model() -> None:
    assert on_ring(stages, kind="pipeline") == [len(PIPELINE)] * 2


def test_the_readmes_script_replies_on_several_ranks_as_on_one() -> None:
    alone = script(ALONE)
    assert "7 of 17 tokens cached" in alone
    assert on_ring(script) == [alone, ""]


def script(ranks: Ranks) -> str:
    """What a script prints that mlx.launch starts."""
    (example,) = (
        code for code in blocks("python", "mlx_blockpool/README.md") if "sharded_load" in code
    )
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(example, {})
    # The step that generate() has encoded ahead is in another stream than what comes next between
    # the ranks.
    mx.synchronize(generation_stream)
    return out.getvalue()


def parts(ranks: Ranks) -> int:
    for name in TENSOR:
        model = small(name)
        model.shard(ranks.group)
        compare(name, model, ranks)
    return len(TENSOR)


def stages(ranks: Ranks) -> int:
    for name in PIPELINE:
        model = small(name)
        model.model.pipeline(ranks.group)
        # Sums in another order would move quantised numbers; those of stages are in the same order.
        compare(name, model, ranks, KVBits() if name == "qwen2" else None)
    return len(PIPELINE)


def compare(name: str, model: Any, ranks: Ranks, bits: KVBits | None = None) -> None:
    """A part's batches are ragged, and it replies as the whole model does, at first and to known
    prompts.
    """
    mx.eval(model.parameters())
    own = BlockPoolBatchEngine(model, open_caches(model, ROOMY, bits=bits, ranks=ranks), BY_COUNT)
    whole = BlockPoolBatchEngine.open(small(name), ROOMY, BY_COUNT, bits=bits)
    for grown in (0, 30):
        assert replies(own, grown) == replies(whole, grown), (name, grown)
    caches: list[Any] = [own.caches, whole.caches]
    hits = [each.prefix.num_hit_tokens for each in caches]
    assert hits[0] == hits[1] > 600, (name, hits)
    assert {each.prefix.arena.spec.bits for each in caches} == {bits}
    assert caches[0].ragged, name


def replies(engine: BlockPoolBatchEngine, grown: int) -> list[list[int]]:
    """Greedy replies to three prompts at once, two of which begin alike."""
    prompts = [
        [(5 * i + k * (i > 200)) % 120 + 1 for i in range(220 + 40 * k + grown)] for k in range(3)
    ]
    found: dict[int, list[int]] = {
        engine.insert(Request(prompt, max_tokens=12)): [] for prompt in prompts
    }
    while len(engine):
        for event in engine.next():
            if isinstance(event, Token):
                found[event.uid].append(event.token)
    return list(found.values())


def small(name: str) -> Any:
    """A model that two ranks can share; the same weights on each."""
    config = copy.deepcopy(CONFIGS.get(name) or ARCHITECTURES[name])
    for part in (config, config.get("text_config", {})):
        part |= {"vocab_size": 132, "num_attention_heads": 4}
    if name == "qwen2":
        config |= {"hidden_size": 256}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model
