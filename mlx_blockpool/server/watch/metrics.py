"""GET /metrics: the counts and figures of a server as Prometheus reads them.

A scrape reads what others have counted, on the socket's thread: it never waits for the generation
thread, and models may be loaded meanwhile. A figure with vLLM's meaning has vLLM's name, so that
dashboards and load generators made for vLLM show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from ... import __version__
from ..bodies import Json
from ..model import LoadedModel
from .counts import Buckets, ModelCounts

PATH = "/metrics"
FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}

# The value of a figure, or its values by its label or by a tuple of its labels. None where the
# figure does not exist.
Value = float | Buckets
Values = Value | Mapping[Any, Value] | None


@dataclass(frozen=True)
class ModelFigures:
    """The figures of one model.

    `report`: its figures of GET /v1/cache; `served`: None while it is not loaded.
    """

    name: str
    counts: ModelCounts
    report: Json
    served: LoadedModel | None

    @property
    def store(self) -> Json:
        return self.report.get("store") or {}

    @property
    def groups(self) -> list[Json]:
        return self.report.get("groups") or []


@dataclass(frozen=True)
class Figure:
    """A metric of each model, or of the server.

    `read`: of a model or the server; or the name of an attribute of ModelCounts.
    `labels`: its own; those of models have vLLM's model_name too.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    read: str | Callable[[Any], Values]
    labels: tuple[str, ...] = ()

    def family(
        self, subjects: Iterable[tuple[tuple[str, ...], Any]], labels: tuple[str, ...] = ()
    ) -> Metric:
        """The metric with the samples of `subjects`, each with its values of `labels`."""
        family: Any = FAMILIES[self.kind](self.name, self.help, labels=[*labels, *self.labels])
        for common, subject in subjects:
            read = self.read
            values = getattr(subject.counts, read) if isinstance(read, str) else read(subject)
            if not isinstance(values, Mapping):
                values = {} if values is None else {(): values}
            # A copy: the generation thread may add a name meanwhile.
            for own, value in dict(values).items():
                found = [*common, *((own,) if isinstance(own, str) else own)]
                if isinstance(value, Buckets):
                    bounds = [*map(str, value.bounds), "+Inf"]
                    counts = map(float, accumulate(value.counts))
                    family.add_metric(found, list(zip(bounds, counts, strict=True)), value.sum)
                else:
                    family.add_metric(found, float(value))
        return family  # type: ignore[no-any-return]


def by_group(name: str) -> Callable[[ModelFigures], Values]:
    return lambda m: {group["group"]: group[name] for group in m.groups}


def blocks_by_state(m: ModelFigures) -> Values:
    return {
        (g["group"], state): g[state] for g in m.groups for state in ("free", "held", "evictable")
    }


def of_store(name: str) -> Callable[[ModelFigures], Values]:
    return lambda m: m.store.get(name, 0) if m.store else None


def pool_share(m: ModelFigures) -> Values:
    held = sum(group["held"] * group["bytes_per_block"] for group in m.groups)
    return held / m.report["pool_bytes"] if m.report.get("pool_bytes") else None


def by_tier(memory: float | None, disk: float | None) -> Values:
    return {
        tier: figure for tier, figure in (("memory", memory), ("disk", disk)) if figure is not None
    }


def limits(m: ModelFigures) -> Values:
    disk = max(0, m.store["store_bytes"] - m.store["quarantine_bytes"]) if m.store else None
    return by_tier(m.report.get("pool_bytes"), disk)


def agents(m: ModelFigures) -> Values:
    noted = None if m.served is None else m.served.agents
    return None if noted is None else len(noted.noted)


def pins(m: ModelFigures) -> Values:
    noted = None if m.served is None else m.served.agents
    timed = m.report.get("pinned", {}).get("pins")
    return {
        **({} if timed is None else {"breakpoint": timed}),
        **({} if noted is None else {"agent": len(noted.pinned)}),
    }


def by_rank(name: str) -> Callable[[Any], Values]:
    return lambda server: {
        str(rank): getattr(head, name)
        for rank, head in enumerate(server.step_driver.condition.heads)
    }


OF_MODELS: tuple[Figure, ...] = (
    Figure(
        "gauge",
        "vllm:num_requests_running",
        "Requests that have their caches.",
        "num_running",
    ),
    Figure(
        "gauge",
        "vllm:num_requests_waiting",
        "Requests that wait to start or to continue.",
        "num_waiting",
    ),
    Figure(
        "gauge",
        "vllm:kv_cache_usage_perc",
        "Share of the pool that sequences hold, 0 to 1.",
        pool_share,
    ),
    Figure(
        "counter",
        "vllm:prefix_cache_queries",
        "Tokens of prompts that were looked up.",
        "prompt_tokens",
    ),
    Figure(
        "counter",
        "vllm:prefix_cache_hits",
        "Tokens of prompts that were cached.",
        lambda m: sum(m.counts.hits.values()),
    ),
    Figure(
        "counter",
        "vllm:num_preemptions",
        "Sequences that gave their blocks to others.",
        lambda m: m.counts.swaps["out"],
    ),
    Figure(
        "counter",
        "vllm:prompt_tokens",
        "Tokens of the prompts of started requests.",
        "prompt_tokens",
    ),
    Figure(
        "counter",
        "vllm:generation_tokens",
        "Tokens that were generated.",
        "generated_tokens",
    ),
    Figure(
        "counter",
        "vllm:spec_decode_num_draft_tokens",
        "Tokens that were drafted, by source.",
        "drafted",
        ("source",),
    ),
    Figure(
        "counter",
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were accepted, by source.",
        "accepted",
        ("source",),
    ),
    Figure(
        "counter",
        "vllm:request_success",
        "Requests that have ended: stop, length, abort or error.",
        "ended",
        ("finished_reason",),
    ),
    Figure(
        "histogram",
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        "first_token",
    ),
    Figure(
        "histogram",
        "vllm:inter_token_latency_seconds",
        "Between two tokens of a request.",
        "between_tokens",
    ),
    Figure(
        "histogram",
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to its end.",
        "whole",
    ),
    Figure(
        "histogram",
        "vllm:request_queue_time_seconds",
        "From a request's arrival to its start.",
        "queued",
    ),
    Figure(
        "gauge",
        "blockpool_blocks",
        "Blocks by layer group: free, held by sequences, or evictable.",
        blocks_by_state,
        ("group", "state"),
    ),
    Figure(
        "gauge",
        "blockpool_pinned_blocks",
        "Blocks that may not be evicted.",
        by_group("pinned"),
        ("group",),
    ),
    Figure(
        "counter",
        "blockpool_evicted_blocks",
        "Blocks that were evicted.",
        by_group("evicted"),
        ("group",),
    ),
    Figure(
        "counter",
        "blockpool_copied_blocks",
        "Shared blocks that were copied before a write.",
        by_group("copied"),
        ("group",),
    ),
    Figure(
        "gauge",
        "blockpool_cached_bytes",
        "Bytes of cached prefixes in memory, and of records on disk.",
        lambda m: by_tier(m.report.get("known_bytes"), m.store.get("model_bytes")),
        ("tier",),
    ),
    Figure(
        "gauge",
        "blockpool_limit_bytes",
        "The most bytes that may be cached in a tier.",
        limits,
        ("tier",),
    ),
    Figure(
        "counter",
        "blockpool_hit_tokens",
        "Cached tokens of prompts by the tier that had them.",
        "hits",
        ("tier",),
    ),
    Figure(
        "counter",
        "blockpool_misses",
        "Requests of which not all was cached, by cause.",
        "misses",
        ("cause",),
    ),
    Figure(
        "counter",
        "blockpool_missed_tokens",
        "Tokens of prompts to compute, by cause.",
        "missed_tokens",
        ("cause",),
    ),
    Figure(
        "counter",
        "blockpool_swaps",
        "Sequences preempted (out) and resumed (in).",
        "swaps",
        ("direction",),
    ),
    Figure(
        "counter",
        "blockpool_restores",
        "Restores from disk that have ended.",
        "num_restores",
    ),
    Figure(
        "counter",
        "blockpool_restored_tokens",
        "Tokens that were restored from disk.",
        "restored_tokens",
    ),
    Figure(
        "counter",
        "blockpool_restored_bytes",
        "Bytes that were restored from disk.",
        "restored_bytes",
    ),
    Figure(
        "counter",
        "blockpool_store_written_bytes",
        "Bytes written to the store since the model was loaded.",
        of_store("written_bytes"),
    ),
    Figure(
        "counter",
        "blockpool_store_read_bytes",
        "Bytes read from the store since the model was loaded.",
        of_store("read_bytes"),
    ),
    Figure(
        "gauge",
        "blockpool_store_queue_bytes",
        "Bytes that wait for the store's writer.",
        of_store("queued_bytes"),
    ),
    Figure(
        "gauge",
        "blockpool_store_pending_records",
        "Records that wait to be copied out of the pool.",
        of_store("pending"),
    ),
    Figure(
        "counter",
        "blockpool_decode_attends",
        "Attention of batches by decode path, per layer and step.",
        lambda m: m.report.get("decode_paths"),
        ("path",),
    ),
    Figure(
        "gauge",
        "blockpool_decode_path_drift_ratio",
        "Seconds for each token of a decode step on a path: the last 64 steps over the last 4096. "
        "1: as before.",
        lambda m: {path: drift.ratio for path, drift in m.counts.drifts.copy().items()},
        ("path",),
    ),
    Figure(
        "histogram",
        "blockpool_step_seconds",
        "Seconds of a step: a chunk of prefill, or one of decode.",
        "steps",
        ("kind",),
    ),
    Figure(
        "counter",
        "blockpool_forced_tokens",
        "Generated tokens that forms forced.",
        "forced_tokens",
    ),
    Figure(
        "counter",
        "blockpool_jumps",
        "Times that tokens forced by a form were computed together.",
        "jumps",
    ),
    Figure(
        "counter",
        "blockpool_verifications",
        "Forwards that verified drafts.",
        "verifications",
    ),
    Figure("gauge", "blockpool_agents", "Agents with a cached turn.", agents),
    Figure(
        "gauge",
        "blockpool_pins",
        "Prefixes that stay, by what keeps them: an agent's pin or a breakpoint.",
        pins,
        ("kind",),
    ),
    Figure(
        "gauge",
        "blockpool_model_loaded",
        "Whether the model is loaded.",
        lambda m: m.served is not None,
    ),
)

OF_SERVER: tuple[Figure, ...] = (
    Figure(
        "gauge",
        "blockpool_info",
        "The version of mlx-blockpool.",
        lambda server: {__version__: 1},
        ("version",),
    ),
    Figure(
        "counter",
        "blockpool_model_changes",
        "Models loaded, unloaded and swapped, and failures of that.",
        lambda server: server.registry.counts,
        ("change",),
    ),
    Figure(
        "counter",
        "blockpool_forms",
        "Forms of requests: compiled, compiled before (cached), or refused by the compiler.",
        lambda server: server.forms.counts,
        ("result",),
    ),
    Figure(
        "counter",
        "blockpool_generation_stalls",
        "Times without progress for a second or longer.",
        lambda server: server.health.stalls,
    ),
    Figure(
        "counter",
        "blockpool_generation_stalled_seconds",
        "Seconds of such times.",
        lambda server: server.health.stalled_seconds,
    ),
    Figure(
        "counter",
        "blockpool_generation_restarts",
        "How often the generation thread began anew.",
        lambda server: server.health.restarts,
    ),
    Figure(
        "gauge",
        "blockpool_generation_stall_seconds",
        "Seconds since the last progress while requests wait; 0 without any.",
        lambda server: server.health.seconds_stalled(server.has_waiting),
    ),
    Figure(
        "counter",
        "blockpool_rank_exchanges",
        "Exchanges of several ranks.",
        lambda server: (
            server.step_driver.condition.num_exchanges
            if server.step_driver.condition.heads
            else None
        ),
    ),
    Figure(
        "gauge",
        "blockpool_rank_memory_bytes",
        "Memory that mlx has left on a rank.",
        by_rank("free_bytes"),
        ("rank",),
    ),
    Figure(
        "gauge",
        "blockpool_rank_store_takes",
        "Whether a rank's disk takes records now.",
        by_rank("takes"),
        ("rank",),
    ),
    Figure(
        "gauge",
        "blockpool_rank_store_error",
        "The error of a rank's disk, as a number of errno; 0: none.",
        by_rank("problem"),
        ("rank",),
    ),
)


def exposition(generator: Any, accept: str | None) -> tuple[str, bytes]:
    """Content type and body of a scrape, in the format that the client accepts."""
    models = [((figures.name,), figures) for figures in models_of(generator)]
    families = [
        *(figure.family(models, ("model_name",)) for figure in OF_MODELS),
        *(figure.family([((), generator)]) for figure in OF_SERVER),
        *ProcessCollector(registry=None).collect(),
    ]
    encode, content_type = choose_encoder(accept or "")
    # The encoders read nothing else of a registry.
    return content_type, encode(SimpleNamespace(collect=lambda: families))


def models_of(generator: Any) -> Iterator[ModelFigures]:
    """The models that were loaded or requested until now."""
    registry = generator.registry
    loaded = {served.events.model: served for served in registry.loaded.values()}
    for name, events in registry.log.models.items():
        served = loaded.get(name)
        yield ModelFigures(name, events.counts, {} if served is None else served.report, served)
