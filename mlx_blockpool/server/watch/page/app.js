// Asks the server for its figures, sooner where an event says that something changed, and draws them.

import "./chat.js";
import { announce, askForKey } from "./acts.js";
import { call, events, forgetKey, hasKey, withKeys } from "./api.js";
import { drawBlocks, legend } from "./blocks.js";
import { bytes, h, plural, render } from "./dom.js";
import * as panels from "./panels.js";
import { drawTree, treeNote, usersOf } from "./tree.js";

// Milliseconds between two looks at the blocks while requests run, and while none does, and between two looks at the figures.
const BUSY = 500;
const IDLE = 800;
const FIGURES = 800;
// After a change, the least time from one look to the next: at the blocks, and at the rest.
const BLOCKS_SOON = 300;
const REST_SOON = 600;
// Between two looks at what has not changed, as far as events and the map tell.
const UNCHANGED = 5000;
// To measure an agent takes the server time: with many of them it is done less often.
const PER_AGENT = 20;
const $ = (id) => document.getElementById(id);
const state = {
  cache: null, map: null, agents: null, models: null, requests: [], avoidable: [], sortedBy: "Used", hour: [], hits: {}, health: null,
  group: 0, model: null, selection: null, openAgent: null, openRequest: null, explained: {}, showsAll: false, showsRequests: false,
  lost: null, speed: { tokens: null, prompt: null }, counts: [], preempted: 0, live: false, byAgent: false,
};

withKeys(askForKey);

// -- what the server says ----------------------------------------------------------------------------------------------

// What may have changed since it was asked for, and when all of it was taken for changed; when agents were measured.
const changed = { requests: true, agents: true, models: true, since: -Infinity };
let measured = -Infinity;

async function lookAtBlocks() {
  const query = state.model ? `?model=${encodeURIComponent(state.model)}` : "";
  const map = withNames(await call(`v1/cache/map${query}`));
  const isNew = !state.map || signature(map) !== signature(state.map);
  if (isNew) Object.assign(changed, { requests: true, agents: true });
  if (isNew) rest.soon();
  state.map = map;
}

/** What the map says about requests and agents, without their progress. */
const signature = (map) => JSON.stringify([map.agents, map.pinned, map.models, map.requests.map((request) => [request.agent, request.state])]);

/** The figures each time, and the rest where something has changed. */
async function lookAtRest() {
  const now = performance.now();
  if (!state.live || now - changed.since >= UNCHANGED) Object.assign(changed, { requests: true, agents: true, models: true, since: now });
  const wanted = { cache: "v1/cache" };
  if (changed.requests) Object.assign(wanted, { explain: "v1/cache/explain", hour: "v1/cache/hour" });
  if ((changed.models || (state.models && state.models.change)) && !(state.models && state.models.rejected)) wanted.models = "admin/models";
  if (changed.agents && now - measured >= PER_AGENT * (state.agents ? state.agents.agents.length : 0)) [wanted.agents, measured] = ["v1/agents", now];
  Object.assign(changed, { requests: false, models: false, agents: changed.agents && !wanted.agents });
  try {
    take(Object.fromEntries(await Promise.all(Object.entries(wanted).map(async ([name, path]) => [name, await (name === "models" ? lookAtModels(path) : call(path))]))));
  } catch (failure) {
    changed.since = -Infinity;
    throw failure;
  }
}

/** The models, or why the server does not show them to this key. */
async function lookAtModels(path) {
  try {
    return await call(path);
  } catch (failure) {
    if (failure.status !== 403) throw failure;
    return { models: [], change: null, rejected: failure.message };
  }
}

function take({ cache, agents, explain, hour, models }) {
  state.cache = { ...cache, ...(cache.models || {})[state.map && state.map.model] };
  state.health = cache.health;
  measure(state.cache.engine || {});
  if (agents) agents.agents.forEach(withSizes);
  Object.assign(state, agents && { agents }, models && { models }, explain && { requests: explain.requests, avoidable: explain.avoidable, hour: hour.minutes, hits: hour.agents });
}

/** Agents by their names as people read them, and the agents of each segment. */
function withNames(map) {
  map.label = (name) => (name === null ? null : name === "anonymous" ? "requests without an agent" : name.replace(/~([0-9a-f]{4})[0-9a-f]{8}$/, " $1").replaceAll("\u001f", "/"));
  map.names = map.agents.map(map.label);
  map.users = usersOf(map.trie);
  map.keys = map.trie.map((segment, i) => `${segment.start} ${[...map.users[i]].map((agent) => map.agents[agent]).sort()}`);
  return map;
}

function withSizes(agent) {
  agent.memory ??= { own_bytes: 0, shared_bytes: 0 };
  agent.disk ??= { own_bytes: 0, shared_bytes: 0 };
  return agent;
}

/** Tokens per second from the last few counts, and how many requests were preempted within a minute. */
function measure(engine) {
  const now = performance.now();
  const latest = { now, tokens: engine.tokens || 0, prompt: engine.prompt_tokens || 0, out: engine.swapped_out || 0 };
  if (state.counts.length && latest.tokens < state.counts.at(-1).tokens) state.counts = [];
  state.counts = [...state.counts.filter((count) => now - count.now < 60000), latest];
  const before = state.counts.find((count) => now - count.now < 4000);
  const elapsed = (now - before.now) / 1000;
  if (elapsed > 0.5) state.speed = { tokens: (latest.tokens - before.tokens) / elapsed, prompt: (latest.prompt - before.prompt) / elapsed };
  state.preempted = latest.out - state.counts[0].out;
}

// -- what people choose ------------------------------------------------------------------------------------------------

/** Mark an agent or a segment of the map. Their numbers change from map to map; names and keys do not. */
function select(selection) {
  const { map } = state;
  if (!selection) state.selection = null;
  else state.selection = selection.agent === undefined ? { key: map.keys[selection.segment] } : { name: map.agents[selection.agent] };
  draw();
}

function selected(map) {
  const { selection } = state;
  if (!selection) return null;
  const [agent, segment] = [map.agents.indexOf(selection.name), map.keys.indexOf(selection.key)];
  return agent >= 0 ? { agent } : segment >= 0 ? { segment } : null;
}

function openAgent(name, number) {
  state.openAgent = name;
  select(name === null || number < 0 ? null : { agent: number });
}

async function openRequest(key, request) {
  state.openRequest = key;
  draw();
  if (key === null || !request.id) return;
  // The text of a prompt is for the agent that sent it.
  const headers = request.agent ? { "X-Agent-Id": latin1(request.agent) } : {};
  try {
    state.explained[key] = await call(`v1/cache/explain/${encodeURIComponent(request.id)}`, "GET", undefined, headers);
  } catch (failure) {
    announce(failure.message);
  }
  draw();
}

/** A header's value has bytes, of which the server makes UTF-8 again. */
const latin1 = (text) => String.fromCharCode(...new TextEncoder().encode(text));

// -- drawing -----------------------------------------------------------------------------------------------------------

function draw() {
  const { map } = state;
  render($("alarms"), panels.alarms(state));
  render($("state"), [state.lost ? "no connection" : state.health && state.health.status !== "ok" ? state.health.status : state.live ? "live" : "connected"]);
  $("state").className = `pill ${state.lost ? "is-bad" : state.health && state.health.status !== "ok" ? "is-bad" : "is-good"}`;
  $("forget").hidden = !hasKey();
  if (!map) return;
  document.title = `${map.requests.length ? `${map.requests.length} · ` : ""}${map.model || "no model"} · mlx-blockpool`;
  render($("serving"), [map.model || "no model is loaded"]);
  render($("tiles"), panels.tiles(state));
  drawGroups();
  const selection = selected(map);
  const group = map.groups[state.group] || map.groups[0] || null;
  drawBlocks(map, group, selection, select, state.byAgent);
  render($("legend"), legend());
  render($("tree"), drawTree(map, selection, select, draw));
  render($("tree-note"), [treeNote(map)]);
  render($("running"), panels.running(map));
  const batch = map.requests.filter((request) => request.state === "decode").length;
  render($("running-note"), [batch > 1 ? `batch of ${batch}` : ""]);
  if (!state.agents || !state.models) return;
  const listed = withNew(state.agents.agents, map);
  render($("agent-table"), panels.agents({ ...state, selection, listed, open: state.openAgent, onOpen: openAgent, onSort: (name) => ((state.sortedBy = name), draw()), onShowAll: () => ((state.showsAll = !state.showsAll), draw()), refresh }));
  const own = listed.reduce((sum, agent) => sum + agent.memory.own_bytes, 0);
  render($("agents-note"), listed.length ? [`${plural(listed.length, "agent")}${own ? `, ${bytes(own)} of their own` : ""}`] : []);
  render($("requests"), panels.requests({ ...state, listed: state.requests, open: state.openRequest, onOpen: openRequest, onShowRequests: () => ((state.showsRequests = !state.showsRequests), draw()) }));
  render($("misses"), panels.misses(state.avoidable));
  render($("misses-note"), [state.avoidable.length ? `last ${state.avoidable.length}, by cause` : ""]);
  render($("connect"), panels.connect(state.cache.clients, copy));
  render($("models"), panels.models({ found: state.models, refresh }));
}

async function copy(name, command) {
  try {
    await navigator.clipboard.writeText(command);
    announce(`The line for ${name} is copied.`);
  } catch {
    announce("The browser does not let this page copy. Select the line and copy it.");
  }
}

/** The agents, with those whose first turn has not ended. */
function withNew(listed, map) {
  const known = new Set(listed.map((agent) => agent.name));
  const names = new Set(map.requests.map((request) => request.agent).filter((name) => name !== null && !known.has(name)));
  return [...listed, ...[...names].map((name) => withSizes({ name, isNew: true, tokens: null, used: "", loaded: true, pinned: false, running: 1, waiting: 0 }))];
}

function drawGroups() {
  const choices = [
    ...state.map.models.length > 1 ? state.map.models.map((name) => [name, name === state.map.model, () => ((state.model = name), refresh())]) : [],
    ...state.map.groups.length > 1 ? state.map.groups.map((group, i) => [group.name, i === Math.min(state.group, state.map.groups.length - 1), () => ((state.group = i), draw())]) : [],
  ];
  render($("colours"), [["by state", false], ["by agent", true]].map(([name, isIt]) =>
    h("button", { type: "button", key: name, class: "choice", "aria-pressed": state.byAgent === isIt ? "true" : "false", onclick: () => ((state.byAgent = isIt), draw()) }, name)));
  render($("groups"), choices.length ? choices.map(([name, isChosen, choose]) =>
    h("button", { type: "button", key: name, class: "choice", "aria-pressed": isChosen ? "true" : "false", onclick: choose }, name))
    : [h("p", { class: "note" }, state.map.groups[0] ? state.map.groups[0].name : "")]);
}

// -- the loop ----------------------------------------------------------------------------------------------------------

/** Look again and again, with pauses that wake() ends. */
class Loop {
  constructor(look, pause, least) {
    Object.assign(this, { look, pause, least, timer: null });
    this.began = 0;
    this.lost = null;
    this.wake = () => {};
  }

  async run() {
    for (;;) {
      if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      this.began = performance.now();
      try {
        await this.look();
        this.lost = null;
      } catch (failure) {
        this.lost = failure.message;
      }
      state.lost = blocks.lost || rest.lost;
      draw();
      // At most half of the time is spent on looking, however slowly the server answers.
      const took = performance.now() - this.began;
      const timer = setTimeout(() => this.wake(), Math.max(took, this.pause() - took));
      await new Promise((resolve) => (this.wake = resolve));
      clearTimeout(timer);
    }
  }

  /** Look again, but not sooner after the last look than `least`. */
  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.wake(), Math.max(0, this.began + this.least - performance.now()));
  }
}

const blocks = new Loop(lookAtBlocks, () => (state.map && state.map.requests.length ? BUSY : IDLE), BLOCKS_SOON);
const rest = new Loop(lookAtRest, () => FIGURES, REST_SOON);

/** Look again at once, at everything. */
function refresh() {
  changed.since = measured = -Infinity;
  blocks.wake();
  rest.wake();
}

/** What an event tells of is looked at soon after it comes. */
async function follow() {
  for (;;) {
    let wait;
    try {
      wait = await events(() => (state.live = true), hear);
    } catch {
      // The figures are asked for again and again anyway.
    }
    state.live = false;
    await new Promise((resolve) => setTimeout(resolve, wait || 3000));
  }
}

function hear(kind) {
  if (kind.endsWith("_progress")) return;
  if (kind.startsWith("model_")) changed.models = true;
  Object.assign(changed, { requests: true, agents: true });
  blocks.soon();
  rest.soon();
}

$("forget").onclick = forgetKey;
blocks.run();
rest.run();
follow();
