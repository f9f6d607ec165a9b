"""mlx-blockpool plan of models, called as a user calls it; and what a plan takes itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands.planning import output, refusal
from documents import TEXTS
from models import save_model
from published import (
    DEEPSEEK_V32,
    FOUR_BITS,
    GEMMA_12B_4BIT,
    GPT_OSS_20B,
    LLAMA4_SCOUT,
    LLAMA_8B,
    LLAMA_8B_4BIT,
    QWEN3_NEXT_80B,
    QWEN_14B_4BIT,
    write_config,
)
from thorough import only

from mlx_blockpool.cli import main
from mlx_blockpool.commands.plan import describe, parse_context, parse_memory
from mlx_blockpool.mlx_lm_compat import installed
from mlx_blockpool.model_files import device, modelfile
from mlx_blockpool.model_files.calculator import Memory, ModelPlan, Weights
from mlx_blockpool.plugins import spec_from_config
from mlx_blockpool.spec import FullLayer, ModelCacheSpec

README = TEXTS["mlx_blockpool/README.md"]

GEMMA = """\
gemma-3-12b-it-4bit, bfloat16: 48 layers

layers                              one token  one block   at most  at 8,192 tokens
window 1024 x40 (8 heads, dim 256)   327.7 kB    83.9 MB  335.5 MB         335.5 MB
full x8 (8 heads, dim 256)            65.5 kB    16.8 MB     grows         536.9 MB

                             16-bit     8-bit
one more token              65.5 kB   34.8 kB
fixed, at most             335.5 MB  178.3 MB
one agent of 8,192 tokens  872.4 MB  463.5 MB
one checkpoint             335.5 MB  178.3 MB
agents that fit                  19        37

  memory            24.0 GB  --memory
- weights            6.6 GB  estimate: 11.8 billion parameters, 4-bit
= left for agents   17.4 GB
/ one agent        872.4 MB  8,192 tokens, 16-bit, nothing shared
= agents that fit        19

`mlx-blockpool serve` takes half of what is left unless --pool-bytes says more: 9 agents.
"""

SEVERAL = """\
Agents of 4,096 tokens, nothing shared, in 24.0 GB (--memory) less the weights

model                 weights  one token     fixed  one agent     8-bit  checkpoint  agents  8-bit
Llama-3.1-8B-4bit     ~4.5 GB   131.1 kB         -   536.9 MB  285.2 MB           -      36     68
gemma-3-12b-it-4bit   ~6.6 GB    65.5 kB  335.5 MB   604.0 MB  320.9 MB    335.5 MB      28     54
gpt-oss-20b          ~13.8 GB    24.6 kB    6.3 MB   107.0 MB   56.8 MB      6.3 MB      95    180
Qwen2.5-14B-4bit      ~8.3 GB   196.6 kB         -   805.3 MB  427.8 MB           -      19     36
"""
MODELS = {
    "Llama-3.1-8B-4bit": LLAMA_8B_4BIT,
    "gemma-3-12b-it-4bit": GEMMA_12B_4BIT,
    "gpt-oss-20b": GPT_OSS_20B,
    "Qwen2.5-14B-4bit": QWEN_14B_4BIT,
}
OTHERS = {
    "Qwen3-Next-80B": {**QWEN3_NEXT_80B, **FOUR_BITS},
    "Llama-4-Scout": LLAMA4_SCOUT,
    "DeepSeek-V3.2": DEEPSEEK_V32,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a folder for each model and nothing in it but config.json."""
    for name, config in {**MODELS, **OTHERS}.items():
        write_config(tmp_path / name, config)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(*names: str) -> list[str]:
    return [word for name in names for word in ("--model", name)]


def lines_of(text: str) -> dict[str, list[str]]:
    """The cells of each line, by the first of them."""
    return {
        cells[0].strip(): cells[1:]
        for cells in (re.split("  +", line.strip()) for line in text.splitlines())
    }


# -- what is printed -------------------------------------------------------------------------------


def test_one_model(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert (
        output(capsys, "--model", "gemma-3-12b-it-4bit", "--memory", "24GB", "--context", "8k")
        == GEMMA
    )


def test_several_models_are_compared_in_one_table(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    found = output(capsys, *given(*MODELS), "--memory", "24GB", "--context", "4k")
    assert found.startswith(SEVERAL)
    assert found.removeprefix(SEVERAL).splitlines() == [
        "",
        "~ is an estimate from config.json.",
    ]


def test_the_readme_shows_that_table(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    shown = "".join(f"    {line}\n" for line in SEVERAL.splitlines()[2:])
    assert shown in README
    assert "in 24 GB and with agents of 4,096 tokens" in README


def test_the_readmes_plan_of_the_demo_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = (
        line
        for line in README.splitlines()
        if re.match(r"\.venv/bin/mlx-blockpool plan .*--memory", line)
    )
    found = output(capsys, *command.split()[2:])
    assert found.startswith("demo, float16: 4 layers\n")
    # 4 layers * 2 heads * (32 + 32) values * 2 bytes * 32,768 tokens
    assert lines_of(found)["/ one agent"][0] == "33.6 MB"


def test_the_readmes_agents_by_memory_are_those_of_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = {
        "Llama-3.1-8B-4bit": LLAMA_8B_4BIT,
        "gemma-3-12b-it-4bit": GEMMA_12B_4BIT,
        "Qwen2.5-14B-4bit": QWEN_14B_4BIT,
        "gpt-oss-20b": GPT_OSS_20B,
        "Qwen3-Next-80B-A3B-4bit": {**QWEN3_NEXT_80B, **FOUR_BITS},
    }
    text = TEXTS["README.md"].partition("<!-- plan -->")[2].partition("<!-- end of plan -->")[0]
    heads, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    )
    assert [name for name, *_ in lines] == list(configs)
    models = [
        argument
        for name, config in configs.items()
        for argument in ("--model", str(write_config(tmp_path / name, config).parent))
    ]
    for column, head in enumerate(heads[1:], 1):
        (memory,) = re.findall(r"\((\d+) GB\)", head)
        found = output(
            capsys, *models, "--memory", f"{memory}GB", "--context", "32k", "--shared", "16k"
        )
        agents = {row[0]: row[-2:] for row in map(str.split, found.splitlines()) if row}
        for name, *cells in lines:
            expected = "none" if agents[name] == ["0", "0"] else ", ".join(agents[name])
            assert cells[column - 1] == expected, (name, head)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Qwen3-Next-80B", ["state x36 (3x8192, 32x128x128)", "full x12 (2 heads, dim 256)"]),
        ("Llama-4-Scout", ["chunk 8192 x36 (8 heads, dim 128)", "full x12 (8 heads, dim 128)"]),
        ("DeepSeek-V3.2", ["composite x61 (full (1 heads, dim 512/64) + full (1 heads, dim 128))"]),
    ],
)
def test_every_kind_of_layer_has_a_line(
    capsys: pytest.CaptureFixture[str], here: Path, name: str, layers: list[str]
) -> None:
    table = output(capsys, "--model", name, "--memory", "2TB").split("\n\n")[1].splitlines()
    assert [re.split("  +", line)[0] for line in table[1:]] == layers


def test_a_layer_that_holds_nothing_is_called_unused() -> None:
    spec = ModelCacheSpec("m", (FullLayer(1, 64, 64), FullLayer(0, 0, 0)))
    found = describe([ModelPlan(spec, "m", Weights(), Memory(10**9, "option"), 256)])
    assert lines_of(found)["unused x1"] == ["-", "-", "-", "-"]
    assert lines_of(found)["- weights"] == ["unknown"]


def test_what_agents_share_is_counted_once(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    asked = ["--model", "Llama-3.1-8B-4bit", "--memory", "24GB", "--context", "4k"]
    alone = lines_of(output(capsys, *asked))
    shared = lines_of(output(capsys, *asked, "--shared", "3k"))
    # 131,072 bytes a token; 1,024 of 4,096 tokens are each agent's.
    assert alone["/ one agent"][0] == "536.9 MB"
    assert shared["- shared prefix"][0] == "402.7 MB"
    assert shared["/ one agent"] == ["134.2 MB", "4,096 tokens, 16-bit, 3,072 of them shared"]
    left = int(alone["= agents that fit"][0])
    assert 4 * left - 3 <= int(shared["= agents that fit"][0]) <= 4 * left


def test_kv_bits_choose_what_the_agents_are_counted_with(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    asked = ["--model", "Llama-3.1-8B-4bit", "--memory", "24GB", "--context", "4k"]
    found = lines_of(output(capsys, *asked, "--kv-bits", "4"))
    assert found["one more token"] == ["131.1 kB", "69.6 kB", "36.9 kB"]
    assert found["/ one agent"] == ["151.0 MB", "4,096 tokens, 4-bit, nothing shared"]
    assert found["= agents that fit"] == ["129"]
    found = lines_of(output(capsys, *asked, "--kv-bits", "8"))
    assert found["= agents that fit"] == ["68"]
    assert (
        "`mlx-blockpool serve --kv-bits 8` takes half of what is left unless --pool-bytes says "
        "more: 34 agents." in found
    )
    assert lines_of(output(capsys, *asked))["= agents that fit"] == ["36"]
    compared = output(
        capsys,
        *given("Llama-3.1-8B-4bit", "gpt-oss-20b"),
        "--memory",
        "24GB",
        "--context",
        "4k",
        "--kv-bits",
        "4",
    )
    mixed = output(
        capsys, *asked, "--kv-bits-keys", "8", "--kv-bits-values", "4", "--kv-group-size", "32"
    )
    found = lines_of(mixed)
    assert mixed.startswith("Llama-3.1-8B-4bit, bfloat16: 32 layers, 8-bit keys and 4-bit values\n")
    assert found["16-bit"] == ["8-bit", "8/4-bit"]
    # 32 layers * 8 heads * (128 + 64 + 2 * 4 * 4) bytes
    assert found["one more token"] == ["131.1 kB", "73.7 kB", "57.3 kB"]
    command = "mlx-blockpool serve --kv-bits-keys 8 --kv-bits-values 4 --kv-group-size 32"
    assert (
        f"`{command}` takes half of what is left unless --pool-bytes says more: 41 agents." in found
    )
    assert lines_of(compared)["Llama-3.1-8B-4bit"][-2:] == ["36", "129"]


def test_without_memory_this_machines_is_taken(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "memory_bytes", lambda: 12 * 10**9)
    assert lines_of(output(capsys, "--model", "gpt-oss-20b"))["memory"] == [
        "12.0 GB",
        "of this machine",
    ]
    assert "in 12.0 GB (this machine)" in output(capsys, *given(*MODELS))
    monkeypatch.undo()
    assert 10**8 < device.memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_device_says_how_much_a_process_should_take(monkeypatch: pytest.MonkeyPatch) -> None:
    for info in ({"max_recommended_working_set_size": 7, "total_memory": 9}, {"total_memory": 7}):
        monkeypatch.setattr("mlx.core.device_info", lambda info=info: info)
        assert device.memory_bytes() == 7


@pytest.mark.parametrize(
    ("memory", "context", "left", "verdict"),
    [
        ("4GB", "4k", "nothing", "The weights alone take 517.4 MB more than the memory."),
        (
            "5GB",
            "4k",
            "482.6 MB",
            "One agent needs 54.3 MB more; a shorter --context, or --kv-bits 8, takes less.",
        ),
        (
            "24GB",
            "4k",
            "19.5 GB",
            "`mlx-blockpool serve` takes half of what is left unless --pool-bytes says more: 18 "
            "agents.",
        ),
        (
            "24GB",
            "64k",
            "19.5 GB",
            "`mlx-blockpool serve` takes half of what is left unless --pool-bytes says more: 1 "
            "agent.",
        ),
    ],
)
def test_what_does_not_fit_is_said(
    capsys: pytest.CaptureFixture[str],
    here: Path,
    memory: str,
    context: str,
    left: str,
    verdict: str,
) -> None:
    found = output(capsys, "--model", "Llama-3.1-8B-4bit", "--memory", memory, "--context", context)
    assert verdict in found.splitlines()
    assert lines_of(found)["= left for agents"] == [left]


def test_a_context_beyond_the_models_is_said(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    note = "Qwen2.5-14B-4bit: its config.json says 32,768 tokens at most."
    assert note not in output(capsys, "--model", "Qwen2.5-14B-4bit", "--context", "32k")
    assert note in output(capsys, "--model", "Qwen2.5-14B-4bit", "--context", "128k")
    assert note in output(capsys, *given(*MODELS), "--context", "128k")


def test_weights_are_those_of_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", "llama")
    size = (folder / "model.safetensors").stat().st_size
    (model,) = json.loads(output(capsys, "--model", str(folder), "--memory", "1GB", "--json"))[
        "models"
    ]
    assert model["weights"]["source"] == "files"
    assert 0 < size - model["weights"]["bytes"] < 10_000
    assert model["left_bytes"] == 10**9 - model["weights"]["bytes"]
    assert (
        lines_of(output(capsys, "--model", str(folder), "--memory", "1GB"))["- weights"][1]
        == "its files"
    )
    assert "~" not in output(capsys, *given(str(folder), "demo"), "--memory", "1GB")


def test_models_of_the_same_name_are_named_in_full(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    other = here / "other/gpt-oss-20b"
    write_config(other, GPT_OSS_20B)
    found = lines_of(
        output(
            capsys,
            *given("gpt-oss-20b", str(other), "Llama-4-Scout/config.json"),
            "--memory",
            "24GB",
        )
    )
    assert {"gpt-oss-20b", str(other), "Llama-4-Scout/config.json"} <= set(found)
    assert "Llama-4-Scout" in lines_of(
        output(capsys, *given("gpt-oss-20b", "Llama-4-Scout/config.json"), "--memory", "24GB")
    )


def test_json_has_every_model(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    found = json.loads(
        output(capsys, *given(*MODELS), "--memory", "24GB", "--context", "4k", "--json")
    )
    assert list(found) == ["models"]
    assert [(model["model"], model["agents"]) for model in found["models"]] == list(
        zip(MODELS, [36, 28, 95, 19], strict=True)
    )
    spec = spec_from_config(LLAMA_8B, "Llama-3.1-8B-4bit")
    weights = Weights(4_517_404_672, "estimate", 8_030_261_248, 4)
    plan = ModelPlan(spec, "llama", weights, Memory(24 * 10**9, "option"), 4096, None, 131_072)
    assert found["models"][0] == plan.as_dict()


# -- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1),
        ("8192", 8192),
        ("4k", 4096),
        (" 128K ", 131_072),
        ("1m", 2**20),
        ("1000000000", 10**9),
    ],
)
def test_contexts(text: str, tokens: int) -> None:
    assert parse_context(text) == tokens


@pytest.mark.parametrize(
    "text", ["", " ", "0", "0k", "-5", "4kb", "1.5k", "k", "4 k", "1e3", "٣", "9" * 5000]
)
def test_contexts_that_are_none(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert refusal(capsys, "--context", text) == (
        f"--context must be a whole number of tokens from 1 on, e.g. 8192 or 8k (got {text!r})"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("1.5 tb", 15 * 10**11), ("1", 1)],
)
def test_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "0", "0GB", "lots", "24 apples", "9" * 400 + "GB"])
def test_memory_that_is_none(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert refusal(capsys, "--memory", text) == (
        f"--memory must be a size such as 24GB or 24GiB (got {text!r})"
    )


def test_a_model_type_that_nobody_knows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_config(tmp_path, {"model_type": "unheard_of"})
    assert refusal(capsys, *given("demo", str(path))) == (
        f"{path}: neither mlx-lm {installed()} nor an installed plugin has model_type "
        "'unheard_of'. Correct it, or install a plugin that has it (with mlx-vlm, its text models "
        "are served)"
    )


def test_other_bits_are_argparses_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--kv-bits", "3"])
    assert "invalid choice: 3" in capsys.readouterr().err


# -- what it takes ---------------------------------------------------------------------------------

# A process counts its parent's memory until it runs another program: so a small one starts the plan
# and waits for it.
LAUNCHER = """
import json, resource, subprocess, sys, time
start = time.monotonic()
subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], check=True, capture_output=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
unit = 1 if sys.platform == "darwin" else 1024
cpu = used.ru_utime + used.ru_stime
figures = {"wall": time.monotonic() - start, "cpu": cpu, "bytes": used.ru_maxrss * unit}
print(json.dumps(figures))
"""
PLAN = """
import sys
from mlx_blockpool.cli import main
sys.exit(main(["plan", *sys.argv[1:]]))
"""


def measured(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", LAUNCHER, PLAN, *arguments]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    print(
        f"{found['wall']:.2f} s, {found['cpu']:.2f} s of CPU, {found['bytes'] / 1e6:.0f} MB: "
        f"{' '.join(arguments)}"
    )
    return found


@pytest.mark.parametrize("name", only([*MODELS, *OTHERS], "Llama-4-Scout"))
def test_a_plan_of_a_full_size_model_takes_little(here: Path, name: str) -> None:
    found = measured("--model", name, "--memory", "24GB")
    assert found["bytes"] < 200 * 10**6
    # Measured: 0.8 to 1 s. No clock on the wall: this machine may have other work.
    assert found["cpu"] < 3


@pytest.mark.thorough
def test_a_plan_of_all_of_them_takes_little(here: Path) -> None:
    found = measured(*given(*MODELS, *OTHERS), "--memory", "24GB")
    assert found["bytes"] < 200 * 10**6
    assert found["cpu"] < 5


def test_models_are_listed_with_agents_of_at_most_the_positions_that_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_config(tmp_path / "llama", LLAMA_8B_4BIT).parent)
    monkeypatch.setattr(modelfile, "downloaded", lambda: [path, str(tmp_path / "gone")])
    assert main(["models"]) == 0
    llama, gone, demo = (line.split() for line in capsys.readouterr().out.splitlines()[1:4])
    assert (llama[0], llama[-1]) == (path, "32,768")
    assert "does not exist" in " ".join(gone)
    assert (demo[0], demo[-1]) == ("demo", "8,192")


def test_a_file_of_llama_cpp_is_not_read_as_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    assert "m.gguf has weights in the form GGUF" in refusal(capsys, "--model", str(path))
