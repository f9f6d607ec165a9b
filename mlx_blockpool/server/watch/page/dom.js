// Elements from descriptions, and how figures are written. Text is only ever set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** A description of an element. `key` keeps it the same element when its neighbours change. */
export function h(tag, props, ...children) {
  return { tag, props: props || {}, children: children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false) };
}

/** Make the children of an element those that are described. Elements that stay keep their focus and state. */
export function render(parent, described) {
  const keyed = new Map([...parent.childNodes].filter((n) => n.$key !== undefined).map((n) => [n.$key, n]));
  let at = parent.firstChild;
  for (const item of [described].flat(Infinity)) {
    if (item === null || item === undefined || item === false) continue;
    let node = matching(at, item, keyed);
    if (!node) node = create(parent, item);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
    update(node, item);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function matching(at, item, keyed) {
  if (typeof item !== "object") return at && at.nodeType === Node.TEXT_NODE ? at : null;
  if (item.props.key !== undefined) {
    const found = keyed.get(item.props.key);
    return found && found.localName === item.tag ? found : null;
  }
  return at && at.nodeType === Node.ELEMENT_NODE && at.localName === item.tag && at.$key === undefined ? at : null;
}

function create(parent, item) {
  if (typeof item !== "object") return document.createTextNode("");
  const isSvg = item.tag === "svg" || (parent.namespaceURI === SVG && parent.localName !== "foreignObject");
  const node = isSvg ? document.createElementNS(SVG, item.tag) : document.createElement(item.tag);
  if (item.props.key !== undefined) node.$key = item.props.key;
  return node;
}

function update(node, item) {
  if (typeof item !== "object") {
    if (node.data !== String(item)) node.data = String(item);
    return;
  }
  const before = node.$props || {};
  for (const name of Object.keys(before)) if (!(name in item.props)) set(node, name, null, before[name]);
  for (const [name, value] of Object.entries(item.props)) if (name !== "key") set(node, name, value, before[name]);
  node.$props = item.props;
  render(node, item.children);
}

function set(node, name, value, before) {
  if (name.startsWith("on")) node[name] = value;
  else if (name === "style") {
    for (const [property, text] of Object.entries(value || {})) {
      if (!before || before[property] !== text) node.style.setProperty(property, text);
    }
  } else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (before !== value) node.setAttribute(name, value === true ? "" : String(value));
}

// -- figures -----------------------------------------------------------------------------------------------------------

export const count = (n) => (n === null || n === undefined ? "–" : Number(n).toLocaleString("en"));

/** 1,039 or 12.4k. */
export function short(n) {
  if (n === null || n === undefined) return "–";
  return n < 10000 ? count(n) : n < 1e6 ? `${(n / 1e3).toFixed(n < 1e5 ? 1 : 0)}k` : `${(n / 1e6).toFixed(1)}M`;
}

/** As human_bytes() of the terminal writes them. */
export function bytes(n) {
  if (n === null || n === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 999.95 && unit < units.length - 1) [n, unit] = [n / 1000, unit + 1];
  return `${unit === 0 ? n : n.toFixed(1)} ${units[unit]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min` : s < 86400 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export const ago = (time) => `${seconds(Math.max(0, (Date.now() - Date.parse(time)) / 1000))} ago`;

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
