"""mlx-lm's own tests, from its source distribution on the package index, with pooled caches in
place of its own.

What passes with mlx-lm's caches has to pass with pooled ones, attached or not, but for what WAIVED
names. Its tests of the server have to pass with our generator and handler too, without exception.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from models import save_model

TESTS = Path(__file__).parent.parent
MODULES = ["test_prompt_cache", "test_generate", "test_server", "test_models", "test_chat"]

BATCH = (
    "one pooled cache holds one sequence, and refuses a batch by name; merge() makes the cache of "
    "a batch"
)
WAIVED = {
    "test_save_load_cache_list": BATCH,
    "test_save_load_mixed_cache": BATCH,
    "test_quantized_sdpa_gqa_batched_mask": BATCH,
    "test_completion_quantizes_the_cache": "a PrefixCache keeps no quantised caches: their "
    "requests compute their prompts",
}
TRAINED = "asks for what only a trained model says"
# What does not pass here with mlx-lm's own caches either.
ALSO_STOCK = {
    "test_stream_generate_input_embeddings": TRAINED,
    "test_stream_generate_input_embeddings_prefill": TRAINED,
    "test_handle_completions": "draws the same with the same seed from a trained model only",
    "test_handle_models": "lists downloaded models, and there are none",
    "test_bitnet": "needs Metal",
    "test_gated_delta": "needs Metal or CUDA",
    "test_gated_delta_masked": "needs Metal or CUDA",
}

Results = dict[str, str]


@pytest.fixture(scope="module")
def upstream() -> Iterator[Path]:
    """A folder with mlx-lm's tests, the small model that they load, and what they import beyond
    mlx-lm.
    """
    version = metadata.version("mlx-lm")
    with TemporaryDirectory(prefix="mlx-lm-tests-") as name:
        folder = Path(name)
        # A wheel has no tests.
        pip("download", "--no-deps", "--no-binary", "mlx-lm", "-d", name, f"mlx-lm=={version}")
        pip("install", "--target", str(folder / "packages"), "requests")
        (archive,) = folder.glob("mlx_lm-*.tar.gz")
        with tarfile.open(archive) as tar:
            members = [member for member in tar.getmembers() if "/tests/" in member.name]
            tar.extractall(folder, members, filter="data")
        next(folder.glob("mlx_lm-*/tests")).rename(folder / "tests")
        save_model(folder / "model", "qwen2", seed=3, hidden_size=128, num_attention_heads=2)
        (folder / "hub").mkdir()
        yield folder


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    ran = subprocess.run(
        [*command, "--disable-pip-version-check", "--retries", "1"], capture_output=True, text=True
    )
    if ran.returncode:
        pytest.skip(
            f"pip {arguments[0]} could not fetch {arguments[-1]}; is there a network? "
            f"{ran.stderr[-300:]}"
        )


@functools.cache
def run(folder: Path, mode: str, module: str) -> Results:
    """Each test of a module, and each failed subtest, and what became of it: passed, failed or
    skipped.
    """
    environment = {
        **os.environ,
        "BLOCKPOOL_UPSTREAM": mode,
        "BLOCKPOOL_UPSTREAM_MODEL": str(folder / "model"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS / "upstream", folder / "packages", TESTS))),
    }
    report = folder / f"{mode}-{module}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "substitutes",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
    ]
    command += [
        "--rootdir",
        str(folder / "tests"),
        f"--junitxml={report}",
        str(folder / "tests" / f"{module}.py"),
    ]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=folder / "tests"
    )
    assert report.exists(), ran.stdout[-3000:] + ran.stderr[-3000:]
    found: Results = {}
    for case in ET.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        outcome = (
            "failed"
            if outcomes & {"failure", "error"}
            else "skipped"
            if "skipped" in outcomes
            else "passed"
        )
        name = case.attrib["name"]
        # A subtest comes as a case of its test's name, or of one that begins with it.
        found[name] = outcome if found.get(name, "passed") != "failed" else "failed"
    return found


def failures(results: Results) -> set[str]:
    return {name for name, outcome in results.items() if outcome == "failed"}


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", MODULES)
def test_mlx_lms_own_caches_pass(upstream: Path, module: str) -> None:
    """Else nothing would be said about ours."""
    results = run(upstream, "stock", module)
    assert "passed" in results.values()
    assert failures(results) <= set(ALSO_STOCK)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["pooled", "attached"])
@pytest.mark.parametrize("module", MODULES)
def test_pooled_caches_pass_what_mlx_lms_own_pass(upstream: Path, module: str, mode: str) -> None:
    needed, found = run(upstream, "stock", module), run(upstream, mode, module)
    assert found.keys() == needed.keys()
    assert failures(found) - failures(needed) <= set(WAIVED)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_our_generator_and_handler_pass_mlx_lms_tests_of_the_server(upstream: Path) -> None:
    """Its servers have one thread for all connections."""
    needed, found = run(upstream, "stock", "test_server"), run(upstream, "served", "test_server")
    assert found.keys() == needed.keys()
    assert set(found.values()) == {"passed"}, failures(found)
