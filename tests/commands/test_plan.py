"""mlx-blockpool plan --lengths, called as a user calls it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands.planning import output, refusal
from documents import TEXTS
from models import CONFIGS
from published import write_config

from mlx_blockpool.cli import main
from mlx_blockpool.demo import model_path
from mlx_blockpool.formatting import human_bytes
from mlx_blockpool.memory import batch_memory
from mlx_blockpool.plugins import spec_from_config
from mlx_blockpool.spec import ModelCacheSpec

README = TEXTS["mlx_blockpool/README.md"]

EXAMPLE = """\
demo, float16: 3 sequences

sequence  tokens  padded waste  pool waste
1            500         3,500          12
2          4,000             0          96
3          1,200         2,800          80
all        5,700         6,300         188

layers                       used   padded   waste         pool     waste
full x4 (2 heads, dim 32)  5.8 MB  12.3 MB  6.5 MB  52%  6.0 MB  192.5 kB  3%

The pool takes 6.0 MB instead of 12.3 MB, 51% less; as it decodes, mlx-lm's padded batch grows to 13.1 MB.
"""

# gpt_oss: a window layer of 128 tokens and a full one, 2 heads of 16 + 16 values in float32: 256 bytes a token each.
WITH_WINDOW = """\
2 sequences; tokens of full x1 (2 heads, dim 16)

sequence  tokens  padded waste  pool waste
1            100         1,900         156
2          2,000             0          48
all        2,100         1,900         204

layers                               used   padded     waste           pool     waste
window 128 x1 (2 heads, dim 16)   58.4 kB  65.5 kB    7.2 kB  11%  131.1 kB   72.7 kB  55%
full x1 (2 heads, dim 16)        537.6 kB   1.0 MB  486.4 kB  48%  589.8 kB   52.2 kB   9%
all                              596.0 kB   1.1 MB  493.6 kB  45%  720.9 kB  124.9 kB  17%

The pool takes 720.9 kB instead of 1.1 MB, 34% less; as it decodes, mlx-lm's padded batch grows to 1.2 MB.
"""

MAMBA = {
    "model_type": "mamba",
    "vocab_size": 131,
    "hidden_size": 16,
    "intermediate_size": 32,
    "state_size": 4,
    "num_hidden_layers": 2,
    "conv_kernel": 3,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}


def demo_spec() -> ModelCacheSpec:
    return spec_from_config(json.loads((Path(model_path()) / "config.json").read_text()), "demo")


def test_the_example_with_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--lengths", "500,4000,1200") == EXAMPLE
    assert output(capsys, "--model", "demo", "--lengths", " 500, 4000 ,01200") == EXAMPLE


def test_the_readme_shows_the_command_and_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = (line for line in README.splitlines() if re.match(r"\.venv/bin/mlx-blockpool plan .*--lengths", line))
    assert output(capsys, *shlex.split(command)[2:]) == EXAMPLE
    assert "padding wastes 6,300 tokens, blocks waste 188" in README


def test_json_is_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "--lengths", "500,4000,1200", "--json"))
    assert found == batch_memory(demo_spec(), [500, 4000, 1200]).as_dict()
    assert found["bytes"]["padded"]["waste"] == 6300 * 1024


@pytest.mark.parametrize("as_folder", [True, False])
def test_windows_and_full_layers_have_a_line_each(capsys: pytest.CaptureFixture[str], tmp_path: Path, as_folder: bool) -> None:
    path = write_config(tmp_path, CONFIGS["gpt_oss"])
    model = str(tmp_path if as_folder else path)
    found = output(capsys, "--lengths", "100,2000", "--model", model)
    assert found == f"{model}, float32: {WITH_WINDOW}"


def test_no_weights_are_needed_for_a_large_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    path = write_config(tmp_path, {**config, "num_hidden_layers": 32, "torch_dtype": "bfloat16"})
    # 131,072 bytes a token: 500 of them, and two blocks.
    assert "The pool takes 67.1 MB instead of 65.5 MB, 1.6 MB more" in output(capsys, "--lengths", "500", "--model", str(path))


def test_one_full_block_is_the_same_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    found = output(capsys, "--lengths", "256")
    assert found.startswith("demo, float16: 1 sequence\n")
    assert "The pool takes 262.1 kB instead of 262.1 kB, the same; as it decodes" in found


def test_a_hybrid_model_is_said_to_be_served_by_mlx_lm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_config(tmp_path, CONFIGS["lfm2"])
    found = output(capsys, "--lengths", "500,4000,1200", "--model", str(path))
    assert "but 2 other layers cannot live in blocks: mlx-lm's own caches serve it." in found


@pytest.mark.parametrize("text", ["", " "])
def test_no_lengths_are_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    expected = "--lengths is empty. Write the tokens of each sequence, such as --lengths 500,4000,1200."
    assert refusal(capsys, "--lengths", text) == expected


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("0", "0"),
        ("500,0", "0"),
        ("-5", "-5"),
        ("-5,3", "-5"),
        ("3,-5", "-5"),
        ("4k", "4k"),
        ("1.5", "1.5"),
        ("1e3", "1e3"),
        ("500,,1200", ""),
        (",", ""),
        ("4_000", "4_000"),
        ("1000000001", "1000000001"),
        ("9" * 5000, "9" * 5000),
        ("²", "²"),
        ("٣", "٣"),
    ],
)
def test_lengths_that_are_none_are_named(capsys: pytest.CaptureFixture[str], text: str, wrong: str) -> None:
    assert refusal(capsys, "--lengths", text) == (
        f"{wrong!r} is no length: lengths are whole numbers of tokens from 1 to 1,000,000,000. Write --lengths 500,4000,1200."
    )


def test_several_models_have_their_batches_one_after_the_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(write_config(tmp_path, CONFIGS["gpt_oss"]))
    models = ("--model", "demo", "--model", path)
    both = output(capsys, "--lengths", "100,2000", *models)
    first, second = (output(capsys, "--lengths", "100,2000", "--model", model) for model in ("demo", path))
    assert both == f"{first}\n{second}"
    found = json.loads(output(capsys, "--lengths", "100,2000", "--json", *models))["models"]
    assert [model["model"] for model in found] == ["demo", path]
    assert found[0]["batch"] == batch_memory(demo_spec(), [100, 2000]).as_dict()


def test_a_batch_follows_the_plan_where_both_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--memory", "1GB", "--context", "8k")
    alone = output(capsys, *asked)
    assert output(capsys, "--lengths", "500,4000,1200", *asked) == f"{alone}\n{EXAMPLE}"
    (model,) = json.loads(output(capsys, "--lengths", "500,4000,1200", "--json", *asked))["models"]
    assert model.pop("batch") == batch_memory(demo_spec(), [500, 4000, 1200]).as_dict()
    assert model == json.loads(output(capsys, "--json", *asked))["models"][0]


def test_blocks_of_a_batch_are_in_the_bits_that_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    found = output(capsys, "--model", "demo", "--lengths", "500,4000,1200", "--kv-bits", "8", "--memory", "1GB")
    assert "\n\ndemo, float16: 3 sequences, 8-bit keys and values in the pool\n\n" in found
    # 5,888 tokens of 4 layers * 2 heads * (32 + 32) bytes, and 4 bytes for each 32 of them
    assert "The pool takes 3.4 MB instead of 12.3 MB, 72% less; as it decodes," in found


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    advice = "Give --model the path of a model folder or its config.json, the id of a downloaded model, or demo."
    paths = [(tmp_path / "none", tmp_path / "none"), (tmp_path, tmp_path / "config.json")]
    paths += [(tmp_path / ("long" * 100),) * 2]
    for model, missing in paths:
        found = refusal(capsys, "--lengths", "5", "--model", str(model))
        assert found == f"{missing} does not exist. {advice}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "Cannot read {path}: "),
        ("[1]", "{path} is no config.json of a model: it holds no JSON object."),
        ({}, "{path}: the config has no model_type. Check {path}"),
        ({"model_type": "unheard_of"}, "{path}: mlx-lm cannot build a model from this config: "),
        ({"model_type": "llama"}, "{path}: "),
        ({**CONFIGS["llama"], "num_hidden_layers": 0}, "{path}: a spec needs at least one layer. Check {path}"),
        (
            {**CONFIGS["llama"], "num_key_value_heads": "2"},
            "{path}: the figures of layer 0 are no sizes: FullLayer(kv_heads='2', key_dim=16, value_dim=16)",
        ),
        ({**CONFIGS["gpt_oss"], "sliding_window": 0}, "{path}: the figures of layer 0 are no sizes: WindowLayer("),
        ({**CONFIGS["gpt_oss"], "head_dim": -1}, "{path}: the figures of layer 0 are no sizes: WindowLayer("),
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: Any, expected: str
) -> None:
    path = write_config(tmp_path, content)
    found = refusal(capsys, "--lengths", "5", "--model", str(path))
    assert found.startswith(expected.format(path=path))
    assert found.count(str(path)) >= 1 + ("Check" in found)
    assert str(path) in found


def test_bytes_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe")
    assert refusal(capsys, "--lengths", "5", "--model", str(path)).startswith(f"Cannot read {path}: ")


def test_a_model_of_states_alone_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_config(tmp_path, MAMBA)
    assert "no layer of this model can be kept in blocks" in refusal(capsys, "--lengths", "5", "--model", str(path))


def test_an_unknown_option_is_argparses_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["plan", "--lengths", "5", "--length-of-all", "3"])
    assert info.value.code == 2
    assert "unrecognized arguments: --length-of-all 3" in capsys.readouterr().err


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["plan", "--help"])
    assert info.value.code == 0
    found = capsys.readouterr().out
    options = ("--lengths", "--model", "--memory", "--context", "--kv-bits", "--json")
    assert all(option in found for option in options)


@pytest.mark.parametrize("module", ["cli", "calculator", "commands.plan", "memory", "modelfile", "system"])
def test_importing_it_imports_no_mlx(module: str) -> None:
    code = f"import sys, mlx_blockpool.{module}; print([m for m in sys.modules if m.partition('.')[0] in ('mlx', 'mlx_lm')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (6_029_312, "6.0 MB"),
        (10**9, "1.0 GB"),
        (2_500 * 10**9, "2.5 TB"),
        (2_500 * 10**12, "2,500.0 TB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
