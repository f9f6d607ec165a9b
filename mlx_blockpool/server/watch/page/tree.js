// The cached prefixes as conversations: tokens run from left to right, each agent has a row, and what several share spans their rows.

import { count, h, plural, short } from "./dom.js";

const ROW = 26;
const FIRST = 24;
let showsAll = false;

/** Sets of agents by segment, from where the agents' last turns end. */
export function usersOf(trie) {
  const users = trie.map((segment) => new Set(segment.ends));
  for (let i = trie.length - 1; i >= 0; i--) {
    if (trie[i].parent !== null) for (const agent of users[i]) users[trie[i].parent].add(agent);
  }
  return users;
}

/** Where each bar lies, and the agent of each row. */
function layOut(trie, users) {
  const children = trie.map(() => []);
  const roots = [];
  trie.forEach((segment, i) => users[i].size && (segment.parent === null ? roots : children[segment.parent]).push(i));
  const bars = [];
  const rows = [];
  const place = (i) => {
    const bar = { i, row: rows.length };
    bars.push(bar);
    for (const child of children[i].sort((a, b) => users[b].size - users[a].size)) place(child);
    for (const agent of trie[i].ends) rows.push({ agent });
    bar.rows = rows.length - bar.row;
  };
  for (const root of roots.sort((a, b) => users[b].size - users[a].size)) place(root);
  return { bars, rows };
}

export function drawTree(map, selection, onSelect, again) {
  const { bars, rows } = layOut(map.trie, map.users);
  const longest = Math.max(256, ...map.trie.filter((_, i) => map.users[i].size).map((segment) => segment.end));
  const most = showsAll ? rows.length : FIRST;
  const running = new Set(map.requests.map((request) => request.agent));
  if (!rows.length) return [h("p", { class: "empty" }, map.requests.length ? "A conversation appears here when its first turn has ended." : "No conversation is cached yet. The first request begins one.")];
  const percent = (tokens) => `${(100 * tokens) / longest}%`;
  return [
    h("div", { class: "tree", style: { height: `${Math.min(rows.length, most) * ROW}px` } },
      h("div", { class: "bars", role: "list", "aria-label": "Stretches of cached prompts" },
        bars.filter((bar) => bar.row < most).map((bar) => {
          const segment = map.trie[bar.i];
          const n = map.users[bar.i].size;
          const height = Math.min(bar.rows, most - bar.row);
          const isOnDisk = segment.in_memory < (segment.end - segment.start) / 2;
          const isChosen = selection && (selection.segment === bar.i || (selection.agent !== undefined && map.users[bar.i].has(selection.agent)));
          const words = `Tokens ${count(segment.start)} to ${count(segment.end)}: ${n > 1 ? `shared by ${n} agents` : `of ${[...map.users[bar.i]].map((i) => map.names[i])}`}` +
            `; ${count(segment.in_memory)} in memory, ${count(segment.on_disk)} on disk`;
          return h("div", { role: "listitem", key: map.keys[bar.i] },
            h("button", {
              type: "button", title: words, "aria-label": words, "aria-pressed": isChosen ? "true" : "false",
              class: `bar${n > 1 ? " is-shared" : ""}${isOnDisk ? " is-on-disk" : ""}`,
              onclick: () => onSelect(selection && selection.segment === bar.i ? null : { segment: bar.i }),
              style: { left: percent(segment.start), width: `calc(${percent(segment.end - segment.start)} - 2px)`, top: `${bar.row * ROW}px`, height: `${height * ROW - 2}px` },
            }, h("span", { class: "length" }, short(segment.end - segment.start)), n > 1 && h("span", { class: "sharers" }, ` shared by ${n}`)));
        })),
      h("ol", { class: "rows", "aria-label": "Agents" }, rows.slice(0, most).map((row) =>
        h("li", { key: map.names[row.agent], class: running.has(map.agents[row.agent]) ? "is-running" : "" },
          h("button", {
            type: "button", class: "name", title: `${map.names[row.agent]}: ${count(map.tokens[row.agent])} tokens`, "aria-pressed": selection && selection.agent === row.agent ? "true" : "false",
            onclick: () => onSelect(selection && selection.agent === row.agent ? null : { agent: row.agent }),
          }, map.names[row.agent]), h("span", {}, short(map.tokens[row.agent])))))),
    rows.length > FIRST && h("button", { type: "button", class: "quiet", onclick: () => ((showsAll = !showsAll), again()) },
      showsAll ? "Show fewer" : `Show all ${count(rows.length)} agents`),
  ];
}

/** What sharing saves, in one sentence. */
export function treeNote(map) {
  if (map.users.every((users) => !users.size)) return "";
  let [once, each, onDisk] = [0, 0, 0];
  map.trie.forEach((segment, i) => {
    once += segment.in_memory;
    onDisk += segment.on_disk;
    each += segment.in_memory * Math.max(1, map.users[i].size);
  });
  const unused = map.trie.filter((_, i) => !map.users[i].size).reduce((sum, segment) => sum + segment.end - segment.start, 0);
  if (!once) return onDisk ? `${short(onDisk)} tokens on disk` : "";
  const saved = each > once ? `${short(once)} tokens in memory serve as ${short(each)}` : `${short(once)} tokens in memory`;
  const rest = unused ? `; ${short(unused)} tokens of earlier turns` : "";
  return `${saved}${rest}${map.left_out ? `; ${plural(map.left_out, "stretch", "stretches")} not shown` : ""}`;
}
