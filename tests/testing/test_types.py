"""Model types of every kind of layer conform, as the bundled providers describe them."""

from __future__ import annotations

import functools

import pytest
from architectures.configs import CONFIGS
from architectures.side_by_side import side_by_side

from mlx_blockpool.testing import CHECKS, Subject
from mlx_blockpool.testing.kit import result_of

TYPES = {
    "llama": "full and window",
    "gemma3_text": "full and window",
    "gpt_oss": "full and window, sinks",
    "qwen3_next": "full and state",
    "falcon_h1": "composite of state and full",
    "jamba": "full and state",
    "mamba2": "state",
    "llama4": "full and chunk, one at a time",
    "deepseek_v3": "full, padded",
    "deepseek_v32": "composite of full and full, padded",
    "longcat_flash": "composite of full and full, padded",
    "nemotron-nas": "full, some unused",
}


@functools.cache
def subject_of(name: str) -> Subject:
    return Subject(CONFIGS[name])


@pytest.mark.sampled
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", TYPES)
def test_a_type_conforms(name: str, check: str) -> None:
    subject = subject_of(name)
    result = result_of(check, subject)
    # Quantised blocks need wider rows: architectures/test_pooled.py checks them for all types.
    wanted = (
        "not checked"
        if check == "quantised" or (check == "wrap" and not subject.sizes)
        else "passed"
    )
    assert (result.outcome, result.text) == (wanted, result.text)


@pytest.mark.sampled
@pytest.mark.parametrize("name", TYPES)
def test_sequences_of_a_type_decode_together(name: str) -> None:
    assert "within" in side_by_side(subject_of(name))
