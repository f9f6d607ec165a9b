// The block map: a cell for each block of one layer group, on a canvas, since there may be many thousands.

import { bytes, count, h, plural, render } from "./dom.js";

export const STATES = {
  r: ["running", "held by one running request"],
  R: ["running, shared", "held by a running request and used by others"],
  c: ["cached", "kept for the next request of one agent"],
  C: ["cached, shared", "one copy for several agents"],
  p: ["pinned", "kept whatever else needs room"],
  P: ["pinned, shared", "kept, one copy for several agents"],
  o: ["of others", "in use by owners of other keys"],
  f: ["free", "allocated and empty"],
};
const TALLEST = 300;
const SMALLEST = 5;
const LARGEST = 18;

const box = document.getElementById("map");
const canvas = box.querySelector("canvas");
const line = document.getElementById("block");
const COLOURS = 8;
let shown = { group: null, map: null, selection: null, cursor: null, byAgent: false };
let cell = LARGEST;
let columns = 1;

/** Draw a group of the map. `onSelect({segment})` or null: a person has chosen what to mark. */
export function drawBlocks(map, group, selection, onSelect, byAgent) {
  shown = { ...shown, map, group, selection, onSelect, byAgent, kinds: byAgent && group ? agentKinds(map, group) : null };
  if (shown.cursor !== null && (!group || shown.cursor >= group.blocks)) shown.cursor = null;
  box.setAttribute("aria-label", group ? `Block map of ${group.name}: ${summary(group)}` : "Block map: no pool");
  layOut();
  paint();
  describe();
}

export function counts(group) {
  const found = {};
  for (const letter of group.states) found[letter] = (found[letter] || 0) + 1;
  return found;
}

/** By the number of an owner whose blocks are whose: a letter of STATES, s where several use them, or the number of a colour. */
function agentKinds(map, group) {
  const users = group.owners.map((owner) => new Set([...(owner.segment === null ? [] : map.users[owner.segment]), ...owner.running]));
  const blocks = new Map();
  for (const place of group.owned) if (place >= 0 && users[place].size === 1) blocks.set([...users[place]][0], (blocks.get([...users[place]][0]) || 0) + 1);
  // Agents with most blocks get a colour of their own.
  const most = [...blocks.keys()].sort((a, b) => blocks.get(b) - blocks.get(a)).slice(0, COLOURS).sort((a, b) => a - b);
  const places = users.map((set) => (set.size > 1 ? "s" : set.size && most.includes([...set][0]) ? String(most.indexOf([...set][0])) : "o"));
  return { places, names: most.map((agent) => map.names[agent]) };
}

/** How a block is coloured: by its state or by its agent. */
const kindOf = (i) => {
  const { group, kinds } = shown;
  return kinds && group.owned[i] >= 0 ? kinds.places[group.owned[i]] : group.states[i].toLowerCase();
};

const summary = (group) =>
  Object.entries(counts(group)).map(([letter, n]) => `${count(n)} ${STATES[letter][0]}`).join("; ") || "no block is allocated yet";

function layOut() {
  const width = box.clientWidth;
  const n = shown.group ? shown.group.blocks : 0;
  cell = LARGEST;
  while (cell > SMALLEST && Math.ceil(n / Math.floor(width / cell)) * cell > TALLEST) cell -= 1;
  columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.max(1, Math.ceil(n / columns));
  const ratio = window.devicePixelRatio || 1;
  const size = [Math.round(columns * cell * ratio), Math.round(rows * cell * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  canvas.style.setProperty("width", `${columns * cell}px`);
  canvas.style.setProperty("height", `${rows * cell}px`);
}

function paint() {
  const { group, selection, cursor } = shown;
  const pen = canvas.getContext("2d");
  const ratio = window.devicePixelRatio || 1;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  if (!group) return;
  const css = getComputedStyle(box);
  const colours = Object.fromEntries([..."rcpof"].map((letter) => [letter, css.getPropertyValue(`--block-${letter}`)]));
  colours.s = css.getPropertyValue("--shared");
  for (let i = 0; i < COLOURS; i++) colours[i] = css.getPropertyValue(`--agent-${i}`);
  const marked = selection && markedOwners();
  const gap = cell > 9 ? 2 : 1;
  const side = cell - gap;
  for (let i = 0; i < group.blocks; i++) {
    const letter = group.states[i];
    const [x, y] = [(i % columns) * cell, Math.floor(i / columns) * cell];
    pen.globalAlpha = marked && !marked.has(group.owned[i]) ? 0.16 : 1;
    pen.fillStyle = colours[kindOf(i)];
    rounded(pen, x, y, side, side > 8 ? 3 : 1);
    if (letter !== letter.toLowerCase()) {
      // Shared: a light core, so that it is not told by colour alone.
      pen.fillStyle = css.getPropertyValue("--block-core");
      const core = Math.max(2, Math.round(side * 0.36));
      rounded(pen, x + (side - core) / 2, y + (side - core) / 2, core, core / 2);
    }
  }
  pen.globalAlpha = 1;
  if (cursor !== null) {
    pen.strokeStyle = css.getPropertyValue("--ink");
    pen.lineWidth = 2;
    pen.strokeRect((cursor % columns) * cell, Math.floor(cursor / columns) * cell, side, side);
  }
}

function rounded(pen, x, y, side, radius) {
  pen.beginPath();
  pen.roundRect(x, y, side, side, radius);
  pen.fill();
}

/** The owners of the group that hold something of the selected agent or segment. */
function markedOwners() {
  const { map, group, selection } = shown;
  const found = new Set();
  group.owners.forEach((owner, i) => {
    const isIn = selection.segment !== undefined ? owner.segment === selection.segment
      : owner.running.includes(selection.agent) || (owner.segment !== null && map.users[owner.segment].has(selection.agent));
    if (isIn) found.add(i);
  });
  // Of what has no block here nothing is marked.
  return found.size ? found : null;
}

/** The block under the cursor, in words. */
function describe() {
  const { group, map, cursor } = shown;
  if (!group || cursor === null) {
    render(line, [group ? `${plural(group.blocks, "block")} of 256 tokens, ${bytes(group.bytes_per_block)} each. Choose one to see whose it is.` : ""]);
    return;
  }
  const letter = group.states[cursor];
  const owner = group.owned[cursor] < 0 ? null : group.owners[group.owned[cursor]];
  const segment = owner && owner.segment !== null ? map.trie[owner.segment] : null;
  const users = segment ? [...map.users[owner.segment]].map((i) => map.names[i]) : [];
  const running = owner ? owner.running.map((i) => map.names[i]).filter((name) => !users.includes(name)) : [];
  render(line, [
    h("b", {}, `Block ${count(cursor)}`), `: ${STATES[letter][0]}, ${STATES[letter][1]}. `,
    segment ? `Of the tokens ${count(segment.start)} to ${count(segment.end)}. ` : "",
    users.length ? `Used by ${names(users)}. ` : segment ? "No agent continues from it. " : "",
    running.length ? `Held by a request of ${names(running)}. ` : "",
    segment && segment.by ? `Computed for ${map.label(segment.by)}.` : "",
  ]);
}

const names = (all) => (all.length > 6 ? `${all.slice(0, 6).join(", ")} and ${all.length - 6} more` : all.join(", "));

function goTo(block) {
  shown.cursor = Math.max(0, Math.min(shown.group.blocks - 1, block));
  const top = Math.floor(shown.cursor / columns) * cell;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + cell > box.scrollTop + box.clientHeight) box.scrollTop = top + cell - box.clientHeight;
  paint();
  describe();
}

/** Mark what the block under the cursor belongs to. */
function choose() {
  const { group, cursor, onSelect } = shown;
  const owner = cursor === null || group.owned[cursor] < 0 ? null : group.owners[group.owned[cursor]];
  onSelect(owner && owner.segment !== null ? { segment: owner.segment } : null);
}

canvas.onclick = (event) => {
  if (!shown.group) return;
  const at = Math.floor(event.offsetY / cell) * columns + Math.min(columns - 1, Math.floor(event.offsetX / cell));
  if (at >= shown.group.blocks) return;
  goTo(at);
  choose();
};

box.onkeydown = (event) => {
  if (!shown.group || !shown.group.blocks) return;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  if (event.key in steps) goTo(shown.cursor === null ? 0 : shown.cursor + steps[event.key]);
  else if (event.key === "Home") goTo(0);
  else if (event.key === "End") goTo(shown.group.blocks - 1);
  else if (event.key === "Enter" || event.key === " ") choose();
  else if (event.key === "Escape") {
    shown.cursor = null;
    shown.onSelect(null);
  } else return;
  event.preventDefault();
};

const redraw = () => (layOut(), paint());
new ResizeObserver(redraw).observe(box);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

/** What the colours mean, with how many blocks have each. */
export function legend() {
  const { group, kinds } = shown;
  if (!group) return [];
  const entry = (kind, isShared, name, n, title) =>
    h("span", { key: name, class: `key key-${kind}${isShared ? " is-shared" : ""}`, title }, h("i", { "aria-hidden": "true" }), name, " ", h("b", {}, count(n)));
  if (!kinds) {
    const found = counts(group);
    return Object.keys(STATES).filter((letter) => found[letter]).map((letter) =>
      entry(letter.toLowerCase(), letter !== letter.toLowerCase(), STATES[letter][0], found[letter], STATES[letter][1]));
  }
  const found = {};
  for (let i = 0; i < group.blocks; i++) found[kindOf(i)] = (found[kindOf(i)] || 0) + 1;
  const named = kinds.names.map((name, i) => [String(i), name]).concat([["s", "several agents"], ["o", "others"], ["f", "free"]]);
  return named.filter(([kind]) => found[kind]).map(([kind, name]) => entry(kind, kind === "s", name, found[kind], ""));
}
