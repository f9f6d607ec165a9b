"""Model types of every kind of layer conform, as the bundled providers describe them."""

from __future__ import annotations

import pytest
from architectures.configs import CONFIGS, RUNNABLE
from architectures.configs_common import wide
from architectures.side_by_side import side_by_side
from thorough import only

from mlx_blockpool.testing import Subject
from mlx_blockpool.testing.kit import CHECKS, result_of

QUICK = ("gemma3_text", "falcon_h1", "deepseek_v32")
# One of each kind of layers.
KINDS = [
    *QUICK,
    *("qwen3_next", "mamba2", "llama4", "llama", "gpt_oss", "jamba", "deepseek_v3"),
    *("longcat_flash", "nemotron-nas"),
]


@pytest.mark.parametrize("name", only(RUNNABLE, "falcon_h1"))
def test_a_type_conforms(name: str) -> None:
    # Larger rows can be quantised, and take twice as long. With small ones plamo3's logits depend
    # on where a prompt is cut.
    larger = wide(CONFIGS[name])
    subject = Subject(larger if name == "plamo3" else CONFIGS[name])
    others = {"quantised": Subject(larger)}
    results = [result_of(check, others.get(check, subject)) for check in CHECKS]
    absent = {"wrap"} if not subject.sizes else set()
    # The attention of phi3small does not read quantised blocks.
    if not subject.spec.groups or name == "phi3small":
        absent.add("quantised")
    assert [str(r) for r in results if r.outcome == "FAILED"] == []
    assert {r.check for r in results if r.outcome == "not checked"} == absent


@pytest.mark.parametrize("name", only(KINDS, "falcon_h1"))
def test_sequences_of_a_type_decode_together(name: str) -> None:
    assert "within" in side_by_side(Subject(CONFIGS[name]))
