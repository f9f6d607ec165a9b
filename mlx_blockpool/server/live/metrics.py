"""GET /metrics: the counts and figures of a server as Prometheus reads them.

A scrape reads what others have counted, on the socket's thread: it never waits for the generation thread, and models may be
loaded meanwhile. A figure with vLLM's meaning has vLLM's name, so that dashboards and load generators made for vLLM show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from ... import __version__
from ..model import LoadedModel
from ..ranked.condition import RankCondition
from .tally import Buckets, Tally

PATH = "/metrics"

Value = float | Buckets
# The values of a metric, each with the values of its own labels.
Samples = Iterable[tuple[tuple[str, ...], Value]]


@dataclass(frozen=True)
class ModelFigures:
    """The figures of one model. `report`: its figures of GET /v1/cache; `served`: None while it is not loaded."""

    name: str
    tally: Tally
    report: dict[str, Any]
    served: LoadedModel | None

    @property
    def store(self) -> dict[str, Any]:
        return self.report.get("store") or {}

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.report.get("groups") or []


@dataclass(frozen=True)
class Figure:
    """A metric of each model, or of the server. `labels`: beside vLLM's model_name, which those of models have."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    read: Callable[[Any], Samples]
    labels: tuple[str, ...]

    @property
    def shown_name(self) -> str:
        """The name under which queries find it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def family(self, is_of_model: bool) -> Any:
        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
        return kinds[self.kind](self.name, self.help, labels=[*(["model_name"] if is_of_model else []), *self.labels])


def gauge(name: str, help: str, read: Callable[[Any], Samples], *labels: str) -> Figure:
    return Figure(name, "gauge", help, read, labels)


def counter(name: str, help: str, read: Callable[[Any], Samples], *labels: str) -> Figure:
    return Figure(name, "counter", help, read, labels)


def histogram(name: str, help: str, read: Callable[[Any], Samples], *labels: str) -> Figure:
    return Figure(name, "histogram", help, read, labels)


def one(value: Value) -> Samples:
    return [((), value)]


def each(values: Iterable[tuple[str, Value]]) -> Samples:
    return [((name,), value) for name, value in values]


def blocks_by_state(model: ModelFigures) -> Samples:
    return [((g["group"], state), g[state]) for g in model.groups for state in ("free", "held", "evictable")]


def of_groups(name: str) -> Callable[[ModelFigures], Samples]:
    return lambda model: [((group["group"],), group[name]) for group in model.groups]


def of_store(name: str) -> Callable[[ModelFigures], Samples]:
    return lambda model: one(model.store.get(name, 0)) if model.store else ()


def usage(model: ModelFigures) -> Samples:
    held = sum(group["held"] * group["bytes_per_block"] for group in model.groups)
    return one(held / model.report["pool_bytes"]) if model.report.get("pool_bytes") else ()


def bytes_by_tier(model: ModelFigures) -> Iterator[tuple[tuple[str, ...], Value]]:
    if "known_bytes" in model.report:
        yield ("memory",), model.report["known_bytes"]
    if model.store:
        yield ("disk",), model.store["model_bytes"]


def limits_by_tier(model: ModelFigures) -> Iterator[tuple[tuple[str, ...], Value]]:
    if "pool_bytes" in model.report:
        yield ("memory",), model.report["pool_bytes"]
    if model.store:
        yield ("disk",), min(model.store["store_bytes"], model.store["store_model_bytes"])


def agents(model: ModelFigures) -> Samples:
    noted = None if model.served is None else model.served.agents
    return () if noted is None else one(len(noted.noted))


def pins(model: ModelFigures) -> Samples:
    noted = None if model.served is None else model.served.agents
    timed = model.report.get("pinned", {}).get("pins")
    return [*([] if timed is None else [(("breakpoint",), timed)]), *([] if noted is None else [(("agent",), len(noted.pinned))])]


def of_tally(read: Callable[[Tally], Value]) -> Callable[[ModelFigures], Samples]:
    return lambda model: one(read(model.tally))


def by_label(read: Callable[[Tally], dict[str, Any]]) -> Callable[[ModelFigures], Samples]:
    # A copy: the generation thread may add a name meanwhile.
    return lambda model: each(read(model.tally).copy().items())


def of_ranks(read: Callable[[RankCondition], Value]) -> Callable[[Any], Samples]:
    return lambda server: each((str(rank.rank), read(rank)) for rank in server.turns.condition.ranks)


OF_MODELS: tuple[Figure, ...] = (
    gauge("vllm:num_requests_running", "Requests that have their caches.", of_tally(lambda t: t.num_running)),
    gauge("vllm:num_requests_waiting", "Requests that wait to start or to go on.", of_tally(lambda t: t.num_waiting)),
    gauge("vllm:kv_cache_usage_perc", "Share of the pool that sequences hold, 0 to 1.", usage),
    counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up.", of_tally(lambda t: t.queried)),
    counter("vllm:prefix_cache_hits", "Tokens of prompts that were cached.", of_tally(lambda t: sum(t.hits.values()))),
    counter("vllm:num_preemptions", "Sequences that gave their blocks to others.", of_tally(lambda t: t.swaps["out"])),
    counter("vllm:prompt_tokens", "Tokens of the prompts of started requests.", of_tally(lambda t: t.prompt_tokens)),
    counter("vllm:generation_tokens", "Tokens that were generated.", of_tally(lambda t: t.generated_tokens)),
    counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted, by source.", by_label(lambda t: t.drafted), "source"),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were accepted, by source.",
        by_label(lambda t: t.accepted),
        "source",
    ),
    counter(
        "vllm:request_success",
        "Requests that have ended: stop, length, abort or error.",
        by_label(lambda t: t.ended),
        "finished_reason",
    ),
    histogram(
        "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", of_tally(lambda t: t.first_token)
    ),
    histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.", of_tally(lambda t: t.between_tokens)),
    histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", of_tally(lambda t: t.whole)),
    histogram("vllm:request_queue_time_seconds", "From a request's arrival to its start.", of_tally(lambda t: t.queued)),
    gauge("blockpool_blocks", "Blocks by layer group: free, held by sequences, or evictable.", blocks_by_state, "group", "state"),
    gauge("blockpool_pinned_blocks", "Blocks that may not be evicted.", of_groups("pinned"), "group"),
    counter("blockpool_evicted_blocks", "Blocks that were evicted.", of_groups("evicted"), "group"),
    counter("blockpool_copied_blocks", "Shared blocks that were copied before a write.", of_groups("copied"), "group"),
    gauge("blockpool_cached_bytes", "Bytes of cached prefixes in memory, and of records on disk.", bytes_by_tier, "tier"),
    gauge("blockpool_limit_bytes", "The most bytes that may be cached in a tier.", limits_by_tier, "tier"),
    counter("blockpool_hit_tokens", "Cached tokens of prompts by the tier that had them.", by_label(lambda t: t.hits), "tier"),
    counter("blockpool_misses", "Requests of which not all was cached, by cause.", by_label(lambda t: t.misses), "cause"),
    counter("blockpool_missed_tokens", "Tokens of prompts to compute, by cause.", by_label(lambda t: t.missed_tokens), "cause"),
    counter("blockpool_swaps", "Sequences preempted (out) and resumed (in).", by_label(lambda t: t.swaps), "direction"),
    counter("blockpool_restores", "Restores from disk that have ended.", of_tally(lambda t: t.num_restores)),
    counter("blockpool_restored_tokens", "Tokens that were restored from disk.", of_tally(lambda t: t.restored_tokens)),
    counter("blockpool_restored_bytes", "Bytes that were restored from disk.", of_tally(lambda t: t.restored_bytes)),
    counter("blockpool_store_written_bytes", "Bytes written to the store since the model was loaded.", of_store("written_bytes")),
    counter("blockpool_store_read_bytes", "Bytes read from the store since the model was loaded.", of_store("read_bytes")),
    gauge("blockpool_store_queue_bytes", "Bytes that wait for the store's writer.", of_store("queued_bytes")),
    gauge("blockpool_store_pending_records", "Records that wait to be copied out of the pool.", of_store("pending")),
    counter(
        "blockpool_decode_attends",
        "Attention of batches by decode path, per layer and step.",
        lambda model: each((model.report.get("decode_paths") or {}).items()),
        "path",
    ),
    gauge(
        "blockpool_decode_path_drift_ratio",
        "Seconds for each token of a decode step on a path: the last 64 steps over the last 4096. 1: as before.",
        lambda model: each((path, drift.ratio) for path, drift in model.tally.drifts.copy().items()),
        "path",
    ),
    histogram(
        "blockpool_step_seconds", "Seconds of a step: a chunk of prefill, or one of decode.", by_label(lambda t: t.steps), "kind"
    ),
    counter("blockpool_forced_tokens", "Generated tokens that forms forced.", of_tally(lambda t: t.forced_tokens)),
    counter("blockpool_jumps", "Times that tokens forced by a form were computed together.", of_tally(lambda t: t.jumps)),
    counter("blockpool_verifications", "Forwards that verified drafts.", of_tally(lambda t: t.verifications)),
    gauge("blockpool_agents", "Agents with a cached turn.", agents),
    gauge("blockpool_pins", "Prefixes that stay, by what keeps them: an agent's pin or a breakpoint.", pins, "kind"),
    gauge("blockpool_model_loaded", "Whether the model is loaded.", lambda model: one(model.served is not None)),
)

OF_SERVER: tuple[Figure, ...] = (
    gauge("blockpool_info", "The version of mlx-blockpool.", lambda server: each([(__version__, 1)]), "version"),
    counter(
        "blockpool_model_changes",
        "Models loaded, unloaded and swapped, and failures of that.",
        lambda server: each(server.registry.counts.copy().items()),
        "change",
    ),
    counter(
        "blockpool_forms",
        "Forms of requests: compiled, compiled before (cached), or refused by the compiler.",
        lambda server: each(server.forms.counts.items()),
        "result",
    ),
    counter(
        "blockpool_generation_stalls", "Times without progress for a second or longer.", lambda server: one(server.health.stalls)
    ),
    counter("blockpool_generation_stalled_seconds", "Seconds of such times.", lambda server: one(server.health.stalled_seconds)),
    counter(
        "blockpool_generation_restarts", "How often the generation thread began anew.", lambda server: one(server.health.restarts)
    ),
    gauge(
        "blockpool_generation_stall_seconds",
        "Seconds since the last progress while requests wait; 0 without any.",
        lambda server: one(server.health.seconds_stalled(server.has_waiting)),
    ),
    counter(
        "blockpool_rank_exchanges",
        "Exchanges of several ranks.",
        lambda server: one(server.turns.condition.num_exchanges) if server.turns.condition.ranks else (),
    ),
    gauge("blockpool_rank_memory_bytes", "Memory that mlx has left on a rank.", of_ranks(lambda rank: rank.free_bytes), "rank"),
    gauge("blockpool_rank_store_takes", "Whether a rank's disk takes records now.", of_ranks(lambda rank: rank.takes), "rank"),
    gauge(
        "blockpool_rank_store_error",
        "The error of a rank's disk, as a number of errno; 0: none.",
        of_ranks(lambda rank: rank.problem),
        "rank",
    ),
)


def exposition(generator: Any, accept: str | None) -> tuple[str, bytes]:
    """Content type and body of a scrape, in the format that the client accepts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(generator))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept or "")
    return content_type, encode(registry)


class Collector:
    """The metrics of one server, for a registry."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def collect(self) -> Iterator[Metric]:
        models = models_of(self._generator)
        for figure in OF_MODELS:
            family = figure.family(is_of_model=True)
            for model in models:
                add(family, figure.read(model), model.name)
            yield family
        for figure in OF_SERVER:
            family = figure.family(is_of_model=False)
            add(family, figure.read(self._generator))
            yield family


def models_of(generator: Any) -> list[ModelFigures]:
    """The models that were loaded or requested until now."""
    registry = generator.registry
    loaded = {served.events.model: served for served in registry.loaded.values()}
    found = []
    for name, events in registry.log.models.items():
        served = loaded.get(name)
        found.append(ModelFigures(name, events.tally, {} if served is None else served.report, served))
    return found


def add(family: Any, samples: Samples, *first: str) -> None:
    """Add samples, whose labels begin with `first`, to a family."""
    for labels, value in samples:
        if isinstance(value, Buckets):
            family.add_metric([*first, *labels], list(cumulative(value)), value.sum)
        else:
            family.add_metric([*first, *labels], float(value))


def cumulative(buckets: Buckets) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip([*map(str, buckets.bounds), "+Inf"], list(buckets.counts), strict=True):
        total += count
        yield bound, float(total)
