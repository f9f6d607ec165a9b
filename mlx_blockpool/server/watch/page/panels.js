// The figures, running requests, agents, last requests, models and alarms, as descriptions of elements.

import { AGENT_ACTS, MODEL_ACTS, button } from "./acts.js";
import { hasKey } from "./api.js";
import { ago, bytes, count, h, plural, seconds, share, short } from "./dom.js";

const MOST_AGENTS = 30;
const MOST_REQUESTS = 8;
const CAUSES = {
  all: "everything was cached", longer: "the rest is new", new: "nothing like it was cached", differs: "the text differs",
  evicted: "was evicted", "on disk": "faster to compute than to read", "no checkpoint": "no checkpoint in between", "no room": "no room next to it",
  draft: "unknown to the draft", "other namespace": "computed by another model", "other salt": "another cache_salt", "not told": "mlx-lm's own cache",
};

const NO_MODEL = "no model is loaded";

// -- figures -----------------------------------------------------------------------------------------------------------

/** A bar of parts: [class, size, words]. */
function meter(parts, whole, words) {
  return h("div", { class: "meter", role: "img", "aria-label": words },
    parts.filter(([, size]) => size > 0).map(([kind, size]) =>
      h("i", { key: kind, class: `part-${kind}`, style: { width: `${Math.min(100, (100 * size) / (whole || 1))}%` } })));
}

const tile = (name, value, note, ...more) =>
  h("div", { class: "tile", key: name }, h("h2", {}, name), h("p", { class: "value" }, value), more, h("p", { class: "note" }, note));

export function tiles({ cache, map, hour, speed }) {
  return [memory(cache, map), disk(cache), reuse(cache, hour), saved(cache), firstToken(hour), activity(map, speed)];
}

// In how many bits the pool holds keys and values.
function held(bits) {
  if (!bits) return "";
  if (bits.keys === bits.values) return `, ${bits.keys}-bit`;
  return `, ${[[bits.keys, "keys"], [bits.values, "values"]].filter(([size]) => size).map(([size, name]) => `${size}-bit ${name}`).join(" and ")}`;
}

/** The machine's memory, with the weights and the pool in it. */
function memory(cache, map) {
  if (!cache || !cache.backend) return tile("Memory", "–", NO_MODEL);
  if (cache.pool_bytes === undefined) return tile("Memory", bytes(cache.known_bytes), "this model is not in the pool");
  const sizes = { r: 0, p: 0, c: 0, o: 0, f: 0 };
  for (const group of map ? map.groups : []) for (const letter of group.states) sizes[letter.toLowerCase()] += group.bytes_per_block;
  const words = [[sizes.r, "running"], [sizes.p, "pinned"], [sizes.c, "cached"], [sizes.o, "of others"]]
    .filter(([size]) => size).map(([size, name]) => `${bytes(size)} ${name}`).join(", ") || "nothing is cached yet";
  const blocks = Object.entries(sizes);
  const pool = `${bytes(cache.used_bytes)} of ${bytes(cache.pool_bytes)}${held(cache.kv_bits)}`;
  const machine = cache.memory;
  const weights = `${bytes(machine.weights_bytes)} of weights`;
  const rest = machine.active_bytes - machine.weights_bytes - blocks.reduce((sum, [, size]) => sum + size, 0);
  return tile("Memory", [bytes(machine.active_bytes), h("small", {}, ` of ${bytes(machine.total_bytes)}`)], `${weights}; ${words}`,
    meter([["w", machine.weights_bytes], ...blocks, ["d", rest]], machine.total_bytes, `${weights}, pool ${pool}: ${words}`),
    h("p", { class: "speed" }, `pool ${pool}`));
}

function disk(cache) {
  if (!cache || !cache.backend) return tile("Disk", "–", NO_MODEL);
  const store = cache.store;
  if (store === undefined) return tile("Disk", "–", "this model's prefixes are not stored");
  if (store === null) return tile("Disk", "off", "nothing outlives the process; start without --no-store");
  const used = store.bytes + store.quarantine_bytes;
  const restoring = store.restoring.reduce((sum, job) => sum + job.tokens - job.done, 0);
  const note = restoring ? `reading ${count(restoring)} tokens back`
    : store.queued_bytes ? `writing ${bytes(store.queued_bytes)}`
      : `${plural(store.records, "record")}${store.restored_tokens ? `; ${short(store.restored_tokens)} tokens restored` : ""}`;
  return tile("Disk", [bytes(used), h("small", {}, ` of ${bytes(store.store_bytes)}`)], note,
    meter([["p", Math.min(store.pinned_bytes, used)], ["c", used - Math.min(store.pinned_bytes, used)]], store.store_bytes, `${share(used, store.store_bytes)} of the budget`));
}

function reuse(cache, hour) {
  const prompt = hour.reduce((sum, minute) => sum + minute.prompt_tokens, 0);
  const cached = hour.reduce((sum, minute) => sum + minute.cached_tokens, 0);
  const isOlder = cache && cache.prompt_tokens > prompt;
  const all = isOlder ? `; ${share(cache.cached_tokens, cache.prompt_tokens)} since the start` : "";
  return tile("Reused in the last hour", share(cached, prompt), prompt ? `${short(cached)} of ${short(prompt)} prompt tokens${all}` : "no prompt yet",
    chart(hour, (minute) => (minute.prompt_tokens ? minute.cached_tokens / minute.prompt_tokens : null), 1, "c",
      (minute) => `${share(minute.cached_tokens, minute.prompt_tokens)} of ${count(minute.prompt_tokens)} prompt tokens`));
}

function saved(cache) {
  const all = cache && cache.seconds_saved;
  if (!all) return tile("Prefill saved", "–", NO_MODEL);
  return tile("Prefill saved", [seconds(all.since_start), h("small", {}, " since the start")],
    "cached tokens at the measured speed",
    h("p", { class: "speed" }, `${seconds(all.since_installation)} since installation`));
}

function firstToken(hour) {
  const known = hour;
  const middle = median(known.flatMap((minute) => Array(minute.requests).fill(minute.ttft.median)));
  const slowest = Math.max(0, ...known.map((minute) => minute.ttft.p95));
  return tile("First token, last hour", known.length ? seconds(middle) : "–",
    known.length ? `median of ${plural(known.reduce((sum, minute) => sum + minute.requests, 0), "request")}; 95 % within ${seconds(slowest)}` : "no request yet",
    chart(hour, (minute) => minute.ttft.median, Math.max(...known.map((minute) => minute.ttft.median)), "r",
      (minute) => `median ${seconds(minute.ttft.median)}, 95 % within ${seconds(minute.ttft.p95)}`));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

/** A bar for each of the last 60 minutes. */
function chart(hour, value, most, kind, words) {
  const now = Math.floor(Date.now() / 60000);
  const bars = hour.map((minute) => ({ minute, at: 59 - (now - Math.floor(minute.time / 60)), size: value(minute) }))
    .filter((bar) => bar.size !== null && bar.at >= 0 && bar.at < 60);
  return h("svg", { class: `chart chart-${kind}`, viewBox: "0 0 240 28", preserveAspectRatio: "none", role: "img", "aria-label": `${bars.length} minutes with requests in the last hour` },
    h("line", { x1: 0, x2: 240, y1: 27.5, y2: 27.5 }),
    bars.map((bar) => {
      const height = Math.max(1.5, (26 * bar.size) / (most || 1));
      return h("rect", { key: bar.minute.time, x: bar.at * 4, width: 3, y: 27 - height, height }, h("title", {}, `${59 - bar.at} min ago: ${words(bar.minute)}`));
    }));
}

function activity(map, speed) {
  const requests = map ? map.requests : [];
  const waiting = requests.filter((request) => ["waiting", "preempted", "restoring"].includes(request.state)).length;
  return tile("Now", [count(requests.length - waiting), h("small", {}, " running")],
    `${plural(waiting, "request")} waiting`,
    h("p", { class: "speed" }, `${speed.tokens === null ? "–" : Math.round(speed.tokens)} tokens/s written, ${speed.prompt === null ? "–" : short(Math.round(speed.prompt))} read`));
}

// -- running -----------------------------------------------------------------------------------------------------------

const WAITS = { waiting: "waits for its turn", restoring: "reads its prompt back from disk", preempted: "gave its room to others; goes on later" };

export function running(map) {
  if (!map.requests.length) return [h("p", { class: "empty" }, "Nothing is running. Requests appear here while they wait, are read and are answered.")];
  const order = { decode: 0, prefill: 1, restoring: 2, preempted: 3, waiting: 4 };
  const sorted = map.requests.map((request, i) => ({ ...request, key: `${request.agent}-${map.requests.slice(0, i).filter((r) => r.agent === request.agent).length}` }))
    .sort((a, b) => order[a.state] - order[b.state]);
  return [h("ul", { class: "requests" }, sorted.map((request) => {
    const isDecoding = request.state === "decode";
    const [done, whole] = isDecoding ? [request.generated, request.most] : [request.done, request.prompt];
    const words = isDecoding ? `${count(request.generated)} tokens of at most ${count(request.most)}`
      : request.state === "prefill" ? `reads ${count(request.done)} of ${count(request.prompt)} tokens${request.cached ? `, ${count(request.cached)} were cached` : ""}`
        : `${WAITS[request.state]} (${count(request.prompt)} tokens)`;
    return h("li", { key: request.key },
      h("span", { class: "who", title: map.label(request.agent) || "" }, map.label(request.agent) || "no agent"),
      h("span", { class: `chip chip-${request.state}` }, request.state),
      h("span", { class: "when" }, seconds(request.seconds)),
      h("div", { class: "progress", role: "progressbar", "aria-label": `${map.label(request.agent) || "request"}: ${request.state}`, "aria-valuemin": 0, "aria-valuemax": whole, "aria-valuenow": done },
        !isDecoding && h("i", { class: "part-c", style: { width: `${(100 * Math.min(request.cached || 0, done)) / (whole || 1)}%` } }),
        h("i", { class: isDecoding ? "part-r" : "part-q", style: { width: `${(100 * Math.max(0, done - (isDecoding ? 0 : request.cached || 0))) / (whole || 1)}%` } })),
      h("span", { class: "note" }, words));
  }))];
}

// -- agents ------------------------------------------------------------------------------------------------------------

export function agents({ listed, map, hits, selection, open, onOpen, showsAll, onShowAll, sortedBy, onSort, refresh }) {
  if (!listed.length) return [h("p", { class: "empty" }, "No agents yet. Name one with the header X-Agent-Id, or just chat: a conversation is known by how it begins. ", "Five agents to watch: ", h("code", {}, `mlx-blockpool demo --url ${location.origin}`))];
  const bySize = { Tokens: (agent) => agent.tokens || 0, Hits: (agent) => (hits[agent.name] ? hits[agent.name].cached_tokens / hits[agent.name].prompt_tokens : -1), Own: (agent) => agent.memory.own_bytes, "First token": (agent) => (hits[agent.name] ? hits[agent.name].ttft.median : -1) }[sortedBy];
  const sorted = [...listed].sort((a, b) => (bySize ? bySize(b) - bySize(a) : sortedBy === "Agent" ? map.label(a.name).localeCompare(map.label(b.name)) : 0) || b.running + b.waiting - a.running - a.waiting || b.pinned - a.pinned || b.used.localeCompare(a.used) || a.name.localeCompare(b.name));
  const shown = showsAll ? sorted : sorted.slice(0, MOST_AGENTS);
  const whole = ({ memory, disk }) => Math.max(memory.own_bytes + memory.shared_bytes, disk.own_bytes + disk.shared_bytes);
  const largest = Math.max(1, ...shown.map(whole));
  return [
    h("table", {},
      h("thead", {}, h("tr", {}, ["Agent", "Tokens", "Own", "Hits", "Used", "First token"].map((name, i) =>
        h("th", { scope: "col", class: i ? "figure" : "", "aria-sort": sortedBy === name ? (i ? "descending" : "ascending") : null },
          h("button", { type: "button", class: "sort", title: `Sort by ${name.toLowerCase()}`, onclick: () => onSort(name) }, name, i === 2 && h("span", { class: "wide" }, " + shared")))))),
      h("tbody", {}, shown.flatMap((agent) => {
        const number = map.agents.indexOf(agent.name);
        const isOpen = open === agent.name;
        const hit = hits[agent.name];
        // The map is newer.
        const isPinned = number < 0 ? agent.pinned : map.pinned.includes(number);
        const tokens = number < 0 || map.tokens[number] === null || agent.model !== map.model ? agent.tokens : map.tokens[number];
        const states = map.requests.filter((request) => request.agent === agent.name).map((request) => request.state);
        const runs = states.some((state) => !(state in WAITS));
        const isOnDisk = !agent.tokens_in_memory && agent.tokens_on_disk > 0;
        const isGone = agent.loaded && agent.tokens > 0 && agent.tokens_in_memory === 0 && agent.tokens_on_disk === 0;
        const { own_bytes: own, shared_bytes: common } = isOnDisk ? agent.disk : agent.memory;
        const sizes = `${bytes(own)} of its own, ${bytes(common)} shared, ${isOnDisk ? "on disk" : "in memory"}`;
        return [
          h("tr", { key: agent.name, class: selection && selection.agent === number && number >= 0 ? "is-chosen" : "" },
            h("th", { scope: "row" },
              h("button", { type: "button", class: "name", title: agent.shown || agent.name, "aria-expanded": isOpen ? "true" : "false", onclick: () => onOpen(isOpen ? null : agent.name, number) }, map.label(agent.name)),
              runs && h("span", { class: "chip chip-decode" }, "running"),
              states.length > 0 && !runs && h("span", { class: "chip chip-waiting" }, "waiting"),
              isPinned && h("span", { class: "chip chip-pinned" }, "pinned"),
              !agent.loaded && h("span", { class: "chip" }, "not loaded"),
              isOnDisk && h("span", { class: "chip" }, "on disk"),
              isGone && h("span", { class: "chip" }, "not cached")),
            h("td", { class: "figure" }, short(tokens)),
            h("td", { class: "figure sizes", title: sizes }, agent.isNew ? "–" : [bytes(own), h("span", { class: "wide" }, ` + ${bytes(common)}`),
              meter(isOnDisk ? [["d", own + common]] : [["c", own], ["s", common]], largest, sizes)]),
            h("td", { class: "figure" }, hit ? share(hit.cached_tokens, hit.prompt_tokens) : "–"),
            h("td", { class: "figure" }, agent.isNew ? "now" : ago(agent.used).replace(" ago", "")),
            h("td", { class: "figure" }, hit ? seconds(hit.ttft.median) : "–")),
          isOpen && h("tr", { key: `${agent.name} open`, class: "more" }, h("td", { colspan: 6 }, details(agent, isPinned, refresh))),
        ];
      }))),
    sorted.length > MOST_AGENTS && h("button", { type: "button", class: "quiet", onclick: onShowAll }, showsAll ? "Show fewer" : `Show all ${count(sorted.length)}`),
  ];
}

function details(agent, isPinned, refresh) {
  if (agent.isNew) return [h("p", {}, `${agent.name} has its first request. It can be pinned, saved and forked once its first turn has ended.`)];
  const by = agent.by === "content" ? "known by how its chat begins; the client names no agent" : "named by its client";
  const resumes = agent.resumes_from_memory ? `continues from token ${count(agent.resumes_from_memory)} in memory`
    : agent.resumes_from_disk ? `continues from token ${count(agent.resumes_from_disk)} on disk` : "nothing to continue from";
  return [
    h("p", {}, `${agent.shown}, ${by}. Its next request ${resumes}. In memory ${bytes(agent.memory.own_bytes)} of its own and ${bytes(agent.memory.shared_bytes)} shared; ` +
      `on disk ${bytes(agent.disk.own_bytes)} and ${bytes(agent.disk.shared_bytes)}. Model ${agent.model}; begun ${ago(agent.created)}.`),
    h("div", { class: "acts" }, ["save", "fork", isPinned ? "unpin" : "pin", "delete"].map((name) => button(name, agent, AGENT_ACTS, refresh))),
  ];
}

// -- last requests -----------------------------------------------------------------------------------------------------

export function requests({ listed, explained, map, open, onOpen, showsRequests, onShowRequests }) {
  if (!listed.length) return [h("p", { class: "empty" }, "No requests yet.")];
  return [h("table", {},
    h("thead", {}, h("tr", {}, ["Agent", "Cached", "Why not more", "When"].map((name, i) => h("th", { scope: "col", class: i % 2 ? "figure" : "" }, name)))),
    h("tbody", {}, (showsRequests ? listed : listed.slice(0, MOST_REQUESTS)).flatMap((request, i) => {
      const key = request.id || `${request.time} ${i}`;
      const isOpen = open === key;
      return [
        h("tr", { key },
          h("th", { scope: "row" }, h("button", { type: "button", class: "name", "aria-expanded": isOpen ? "true" : "false", onclick: () => onOpen(isOpen ? null : key, request) }, map.label(request.agent) || "no agent")),
          h("td", { class: "figure sizes" }, request.prompt_tokens === null ? "–" : `${short(request.cached_tokens)} of ${short(request.prompt_tokens)}`,
            request.prompt_tokens !== null && meter([["c", request.cached_tokens]], request.prompt_tokens, `${share(request.cached_tokens, request.prompt_tokens)} cached`)),
          h("td", { class: "cause" }, request.state === "failed" ? "failed" : CAUSES[request.cause] || (request.state === "waiting" ? "waits to start" : request.state)),
          h("td", { class: "figure" }, ago(request.time).replace(" ago", ""))),
        isOpen && h("tr", { key: `${key} open`, class: "more" }, h("td", { colspan: 4 }, explanation(explained[key] || request))),
      ];
    }))),
    listed.length > MOST_REQUESTS && h("button", { type: "button", class: "quiet", onclick: onShowRequests }, showsRequests ? "Show fewer" : `Show all ${count(listed.length)}`)];
}

function explanation(request) {
  const found = request.difference;
  const sides = found && found.line && found.known_line !== null && found.known_line !== undefined;
  return [
    h("p", {}, `${request.why[0].toUpperCase()}${request.why.slice(1)}.`),
    sides && h("div", { class: "sides" },
      h("figure", {}, h("figcaption", {}, `Cached, at token ${count(found.position)}`), h("pre", {}, marked(found.known_line, found.line))),
      h("figure", {}, h("figcaption", {}, "This request"), h("pre", {}, marked(found.line, found.known_line)))),
    found && !sides && found.line && h("figure", {}, h("figcaption", {}, `From token ${count(found.position)} on`), h("pre", {}, found.line)),
    found && found.normaliser && h("p", { class: "advice" }, "Start the server with ", h("code", {}, `--normalise ${found.normaliser}`), " to keep this line the same."),
  ];
}

/** A line with what differs from the other one marked. */
function marked(line, other) {
  const most = Math.min(line.length, other.length);
  let [start, end] = [0, 0];
  while (start < most && line[start] === other[start]) start += 1;
  while (end < most - start && line[line.length - 1 - end] === other[other.length - 1 - end]) end += 1;
  return [line.slice(0, start), h("mark", {}, line.slice(start, line.length - end)), line.slice(line.length - end)];
}

// -- avoidable misses --------------------------------------------------------------------------------------------------

const ADVICE = {
  differs: "Keep the beginning of prompts the same; open the request above to see the line, or start with --normalise.",
  evicted: "Raise --pool-bytes, or pin the agent.",
  "on disk": "Computing was faster than reading: a faster disk would change that.",
  "no checkpoint": "The model continues from checkpoints alone: raise --pool-bytes, so that more of them stay.",
  "no room": "Raise --pool-bytes, or let fewer agents run at once.",
  "other salt": "Give each request of an agent the same cache_salt.",
};

export function misses(listed) {
  if (!listed.length) return [h("p", { class: "empty" }, "None. Requests whose prompts were computed again, although that can be avoided, are kept here.")];
  const causes = new Map();
  for (const { cause, prompt_tokens: all, cached_tokens: cached } of listed) {
    const found = causes.get(cause) || { requests: 0, tokens: 0 };
    causes.set(cause, { requests: found.requests + 1, tokens: found.tokens + all - cached });
  }
  return [h("ul", { class: "misses" }, [...causes].sort(([, a], [, b]) => b.tokens - a.tokens).map(([cause, { requests: n, tokens }]) =>
    h("li", { key: cause }, h("b", {}, CAUSES[cause] || cause), h("span", { class: "figure" }, `${short(tokens)} tokens, ${plural(n, "request")}`), h("p", { class: "note" }, ADVICE[cause] || ""))))];
}

// -- connect -----------------------------------------------------------------------------------------------------------

export function connect(clients, onCopy) {
  const values = { $url: location.origin, $key: hasKey() ? "KEY" : "any" };
  return [h("ul", { class: "clients" }, Object.entries(clients || {}).map(([name, line]) => {
    const command = line.replace(/\$(url|key)/g, (found) => values[found]);
    return h("li", { key: name }, h("b", {}, name),
      h("button", { type: "button", class: "quiet", "aria-label": `Copy the line for ${name}`, onclick: () => onCopy(name, command) }, "Copy"), h("code", { tabindex: "0" }, command));
  }))];
}

// -- models ------------------------------------------------------------------------------------------------------------

const STAGES = {
  draining: "lets running replies finish", checking: "checks its files", saving: "writes cached prefixes to disk",
  loading: "reads its weights", hashing: "names its weights by their content", warming: "runs a first step",
};

export function models({ found, refresh }) {
  const change = found.change;
  if (found.rejected) return [h("p", { class: "note", key: "rejected" }, found.rejected)];
  return [
    change && h("div", { class: "change", role: "status", key: "change" },
      h("p", {}, [change.load && `Loading ${change.load}`, change.unload && `${change.load ? "in place of" : "Unloading"} ${change.unload}`].filter(Boolean).join(" "),
        `: ${STAGES[change.stage] || change.stage}${change.seconds ? `, ${seconds(change.seconds)}` : ""}.`),
      change.weights_bytes ? h("div", { class: "progress", role: "progressbar", "aria-label": "Weights read", "aria-valuemin": 0, "aria-valuemax": change.weights_bytes, "aria-valuenow": change.read_bytes },
        h("i", { class: "part-r", style: { width: `${(100 * change.read_bytes) / change.weights_bytes}%` } })) : null),
    h("table", { key: "models" },
      h("thead", {}, h("tr", {}, ["Model", "Weights", "Pool", ""].map((name, i) => h("th", { scope: "col", class: i ? "figure" : "" }, name || h("span", { class: "hidden" }, "Change"))))),
      h("tbody", {}, found.models.map((model) => h("tr", { key: `${model.id} ${model.adapter || ""}` },
        h("th", { scope: "row" }, model.id, " ",
          h("span", { class: `chip${model.state === "loaded" ? " chip-loaded" : ""}` }, model.state),
          model.waiting > 0 && h("span", { class: "chip chip-waiting" }, `${count(model.waiting)} waiting`)),
        h("td", { class: "figure" }, bytes(model.weights_bytes)),
        h("td", { class: "figure" }, model.pool_bytes === undefined ? "–" : [bytes(model.used_bytes), h("span", { class: "wide" }, ` of ${bytes(model.pool_bytes)}`)]),
        h("td", { class: "figure" }, model.state !== "loading" && button(model.state === "loaded" ? "unload" : "load", model, MODEL_ACTS, refresh)))))),
  ];
}

// -- alarms ------------------------------------------------------------------------------------------------------------

/** What needs a person: [what is wrong, what to do]. */
export function alarms({ cache, agents: listed, models: found, health, lost, preempted, map }) {
  const all = [];
  if (lost) all.push([lost, "These are the last figures that came. The page goes on by itself once the server is back; its log says why it is not."]);
  if (health && health.status === "stalled") all.push([`Nothing was computed for ${seconds(health.seconds_since_progress)} while requests wait.`, "If it stays so, the requests fail with a 503 after two minutes. Look at the server's log for what it does: " + health.doing + "."]);
  if (health && health.status === "unavailable") all.push(["The generation thread has ended.", "Restart the server; cached prefixes on disk come back."]);
  if (health && health.restarts > 0) all.push([`The generation thread was restarted ${plural(health.restarts, "time")}.`, "Requests failed then. The server's log says why."]);
  const store = cache && cache.store;
  if (cache && cache.alarm) all.push(["Almost nothing is reused.", cache.alarm]);
  if (store && store.problem) all.push(["The prompt store does not work at present.", `${store.problem}. Free disk space, or choose another folder with --store-dir.`]);
  if (store && store.quarantine_bytes > 0) all.push([`${bytes(store.quarantine_bytes)} of damaged records were set aside.`, "Run mlx-blockpool store check to see which, and check the disk."]);
  if (preempted > 0) all.push([`${plural(preempted, "request")} gave up their room to others in the last minute.`, "The pool is too small for what runs at once. Raise --pool-bytes, lower max_tokens, or let fewer agents run."]);
  const long = map ? map.requests.filter((request) => request.state === "waiting" && request.seconds > 30).length : 0;
  if (long) all.push([`${plural(long, "request")} waited for more than 30 seconds.`, "The pool or the model is busy. Raise --pool-bytes, or stop agents that need not run."]);
  const refused = listed ? listed.agents.filter((agent) => agent.loaded && agent.pinned && !agent.pinned_in_memory).length : 0;
  if (refused) all.push([`${plural(refused, "pinned agent")} may leave memory.`, "Pins have at most half of the pool; the rest is pinned on disk only. Unpin agents, or raise --pool-bytes."]);
  for (const model of found ? found.models : []) if (model.failure) all.push([`${model.id} could not be loaded.`, model.failure]);
  if (listed && listed.bad && listed.bad.length) all.push([`${plural(listed.bad.length, "file")} of agents cannot be read.`, "Run mlx-blockpool store check --fix."]);
  return [...new Map(all)].map(([what, advice]) => h("div", { class: "alarm", key: what }, h("b", {}, what), " ", advice));
}
