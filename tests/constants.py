"""The numeric constants of the package outside config.py, and which of them are not settings, with
the reason.

What a user could want to change is a field in config.py: a limit of a request, a budget of memory
or disk, a time that a client waits. A constant is not a setting if another value would be wrong,
could not be noticed, or would need a measurement.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import mlx_blockpool

PACKAGE = Path(mlx_blockpool.__file__).parent

# By reason: patterns of "module:NAME".
NOT_SETTINGS = {
    "Commands and the conformance kit run once, and have options for what differs.": """
        commands/*:* testing/*:*
        """,
    "Formats of files and messages: versions, widths, digests, and bounds that no valid file "
    "reaches.": """
        prefix/salts.py:* ranks/facts.py:* ranks/head.py:* ranks/wakes.py:*_BYTES
        spec.py:BLOCK_TOKENS store/db.py:SCHEMA_VERSION store/hashing.py:* store/paths.py:MAX_*
        store/reader.py:* store/record.py:* tier/agreement.py:_NAME_BYTES
        tier/checkpoints.py:MOST_DIGITS model_files/*:* server/embedding.py:MAX_FILE_BYTES
        server/api/thinking.py:MAX_BYTES
        """,
    "Numbers of protocols, units, exit statuses, and what mlx, macOS or number types can hold.": """
        */retention.py:DAY_SECONDS */limits.py:DAY_SECONDS
        server/api/anthropic_request.py:MAX_BREAKPOINTS server/api/logprobs.py:LOWEST
        server/api/ollama_*:* server/health.py:HUNG server/ranked/ending.py:LOST
        server/replies.py:SEEDS server/validation.py:LARGEST server/preparation.py:NEVER
        server/watch/last_hour.py:MINUTES server/watch/explain.py:LONGEST_HEADER
        server/wire.py:RXT_CONNDROPTIME server/wire.py:PROBES kv/build.py:KEPT_TOKENS
        forms/exact.py:_WHOLE forms/exact.py:_DIGITS forms/exact.py:*PLACES forms/exact.py:_MULTIPLE
        """,
    "Values that stand for none, never or without a limit.": """
        */text_source.py:BREAK engine/decode.py:NEVER drafts/curve.py:MOST_ROWS
        drafts/acceptance.py:REPLACED kv/pool.py:UNBOUNDED kv/step.py:POOL_STRIDE store/scan.py:TICK
        """,
    "The layout of the kernel, which its text repeats, and what its plan and its trial on the "
    "device take.": """
        kernel/*:* kv/kernel_*:*
        """,
    "How speed is measured: rounds, sizes and noise. Another value gives other figures, not "
    "another behaviour.": """
        kv/measuring.py:* kv/path_measuring.py:* kv/cost_model.py:* kv/probe.py:* kv/proof.py:*
        kv/shares.py:* drafts/curve.py:CONTEXT server/watch/counts.py:* tier/restore.py:MEMORY
        """,
    "Rates, thresholds and lengths that a benchmark has fitted (benchmarks/LOG.md).": """
        drafts/acceptance.py:* drafts/index.py:* drafts/lengths.py:* drafts/text_source.py:*
        drafts/drafting.py:CONTEXT_TOKENS kv/step.py:* engine/decode.py:MOST_FOLLOWING
        engine/sampling.py:MOST_TAKEN_BACK engine/engine.py:CLEAR_STEPS forms/compiler.py:*_BYTES
        prefix/eviction.py:* server/model_caches.py:FEW_CHECKPOINTS tier/agreement.py:CANDIDATES
        tier/restore.py:STATE_SLACK tier/restore.py:AT_ONCE
        """,
    "How often a thread checks and how long it works at a time: decode steps, hang-ups and stops "
    "have guaranteed times.": """
        *:CHECK_SECONDS *:LOOK_SECONDS *:STOP_LOOKS_SECONDS *:PAUSE_SECONDS *:GATHER_SECONDS
        *:WAIT_SECONDS *:REPORT_SECONDS *:HASH_WAIT_SECONDS *:HANG_UP_SECONDS *:CHANGE_SECONDS
        *:IDLE_SECONDS *:SLICE_SECONDS *:ROOM_SECONDS *:LATE_SECONDS *:ACCEPT_SECONDS
        *:SWITCH_SECONDS *:CROWDED_SECONDS *:LAST_WORDS_SECONDS *:LAUNCHER_SECONDS
        *:ATTENDED_SECONDS *:NEXT_SECONDS *:GRACE_SECONDS server/wire.py:*_BYTES
        server/wire.py:DRAIN_SECONDS store/*:PIECE_BYTES *:*AT_ONCE *:TOGETHER *:AT_MOST *:SENT
        *:SENT_AGAIN *:TAKEN *:REST *:SCAN_REST *:LINGER *:SILENT_TOKENS *:UNCHECKED_BYTES
        *:PATIENCE store/agents.py:USED_SECONDS store/identity.py:*_SECONDS
        store/identity.py:SAMPLE_BYTES store/fsck.py:READERS */request_watch.py:*
        */cache_map.py:LEAST_SECONDS */snapshot.py:LEAST_SECONDS server/prompts/worker.py:WORN
        *:DUMP_SECONDS
        """,
    "What a listing, a text or a name shows.": """
        *:*SHOWN *:LISTED* *:_SHOWN_CHARACTERS *:_READABLE_CHARACTERS server/watch/divergence.py:*
        server/normalise.py:BEFORE server/conversation_id.py:* server/watch/last_hour.py:MOST_TIMES
        server/watch/event_log.py:LONGEST
        """,
    "Bounds of algorithms against hostile input, far beyond real schemas, folders and tries.": """
        forms/closed_objects.py:* forms/compiler.py:STACK_BYTES forms/exact.py:_MOST_*
        forms/parameters.py:* forms/schema.py:* prefix/trie.py:MAX_SIBLINGS
        server/api/call_readers.py:MOST_DEEP server/api/call_readers.py:LONGEST_*
        server/models/catalog.py:FOLDER_DEPTH server/forms.py:MOST_WAITING
        store/identity.py:MOST_FILES store/measurements.py:MOST_MODELS
        """,
}


def possible_settings(package: Path = PACKAGE) -> list[str]:
    """The constants outside config.py that no reason covers, as "module:NAME"."""
    patterns = [pattern for text in NOT_SETTINGS.values() for pattern in text.split()]
    return [
        name
        for name in constants(package)
        if not any(fnmatch(name, pattern) for pattern in patterns)
    ]


@functools.cache
def constants(package: Path = PACKAGE) -> list[str]:
    """All numeric constants of modules outside config.py, as "module:NAME"."""
    return [
        f"{file.relative_to(package)}:{name}"
        for file, tree in trees(package).items()
        if file != package / "config.py"
        for name in _numbers(tree)
    ]


@functools.cache
def trees(package: Path = PACKAGE) -> dict[Path, ast.Module]:
    """The modules of the package, parsed once for all tests that read them."""
    return {
        file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(package.rglob("*.py"))
    }


def _numbers(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            pairs = [(target, statement.value)]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = list(zip(target.elts, statement.value.elts, strict=True))
            yield from (
                each.id for each, value in pairs if isinstance(each, ast.Name) and _is_number(value)
            )


def _is_number(value: ast.expr) -> bool:
    """Whether a value is a number, or is computed from numbers and names."""
    if not isinstance(value, ast.Constant | ast.BinOp | ast.UnaryOp):
        return False
    literals = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return bool(literals) and all(type(literal) in (int, float) for literal in literals)
