// A chat with the default model over /v1/chat/completions. It lives in this tab alone.

import { stream } from "./api.js";
import { count, h, render } from "./dom.js";

const $ = (id) => document.getElementById(id);
const [form, input, log, send, clear, note] = ["chat", "chat-input", "chat-log", "chat-send", "chat-clear", "chat-note"].map($);
let messages = [];
let running = null;

function draw() {
  log.hidden = clear.hidden = !messages.length;
  render(log, messages.map(({ role, content, failed }, i) =>
    h("div", { key: i, class: `message is-${role}` }, h("b", {}, role === "user" ? "You" : "Model"),
      h("p", { class: failed ? "error" : "" }, failed || content || "…"))));
  log.scrollTop = log.scrollHeight;
  render(send, [running ? "Stop" : "Send"]);
}

async function ask(text) {
  const reply = { role: "assistant", content: "" };
  const sent = [...messages.filter((message) => !message.failed), { role: "user", content: text }];
  messages = [...sent, reply];
  running = new AbortController();
  draw();
  const begun = performance.now();
  let first = null;
  try {
    const body = { model: "default_model", messages: sent, stream: true, stream_options: { include_usage: true } };
    await stream("v1/chat/completions", body, running.signal, ({ choices, usage, error }) => {
      if (error) throw new Error(error.message || error);
      const text = choices && choices[0] && choices[0].delta && choices[0].delta.content;
      if (text) first ??= performance.now();
      reply.content += text || "";
      const details = usage && usage.prompt_tokens_details;
      if (usage) render(note, [`${count(details ? details.cached_tokens : 0)} of ${count(usage.prompt_tokens)} prompt tokens were cached; first token after ${Math.round((first ?? performance.now()) - begun)} ms.`]);
      draw();
    });
  } catch (failure) {
    if (failure.name !== "AbortError") reply.failed = failure.message;
  }
  running = null;
  draw();
}

form.onsubmit = (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = input.value.trim();
  input.value = "";
  if (text) ask(text);
};

input.onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) form.requestSubmit();
};

clear.onclick = () => {
  if (running) running.abort();
  messages = [];
  render(note, []);
  draw();
  input.focus();
};
