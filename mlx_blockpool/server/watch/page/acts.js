// Changes to agents and models, each after a question, and the question for the key.

import { call } from "./api.js";
import { render, h } from "./dom.js";

const dialog = document.getElementById("question");
const form = dialog.querySelector("form");
const title = document.getElementById("question-title");
const text = document.getElementById("question-text");
const field = document.getElementById("question-field");
const label = document.getElementById("question-label");
const input = document.getElementById("question-input");
const error = document.getElementById("question-error");
const yes = document.getElementById("question-yes");
const said = document.getElementById("said");

/** Ask, and do `act(typed)` where the answer is yes. The dialog stays open with the error where that fails. */
export function ask({ heading, words, confirm, isDangerous = false, fieldLabel = null, act }) {
  render(title, [heading]);
  render(text, [words]);
  render(yes, [confirm]);
  render(error, []);
  yes.className = isDangerous ? "danger" : "primary";
  field.hidden = fieldLabel === null;
  render(label, [fieldLabel || ""]);
  input.value = "";
  input.required = fieldLabel !== null;
  form.onsubmit = async (event) => {
    event.preventDefault();
    yes.disabled = true;
    try {
      announce(await act(input.value.trim()));
      dialog.close();
    } catch (failure) {
      render(error, [failure.message]);
    } finally {
      yes.disabled = false;
    }
  };
  dialog.showModal();
  (fieldLabel === null ? yes : input).focus();
}

document.getElementById("question-no").onclick = () => dialog.close();

/** Say what was done, in a line that goes after a while. */
export function announce(words) {
  render(said, words ? [words] : []);
  said.classList.toggle("shown", Boolean(words));
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => announce(""), words ? 6000 : 1e9);
}

// -- agents ------------------------------------------------------------------------------------------------------------

const path = (agent, act) => `v1/agents/${encodeURIComponent(agent.name)}${act ? `/${act}` : ""}`;

export const AGENT_ACTS = {
  pin: (agent) => ({
    heading: `Pin ${agent.shown}?`,
    words: "Its cached prompt stays in memory, up to half of the pool, and on disk, whatever else needs room.",
    confirm: "Pin",
    act: async () => {
      const done = await call(path(agent, "pin"), "POST", {});
      return done.pinned_in_memory ? `${agent.shown} is pinned.` : `${agent.shown} is pinned on disk; memory has no more room for pins.`;
    },
  }),
  unpin: (agent) => ({
    heading: `Unpin ${agent.shown}?`,
    words: "Its cached prompt may be evicted again, like any other.",
    confirm: "Unpin",
    act: async () => (await call(path(agent, "unpin"), "POST", {}), `${agent.shown} is no longer pinned.`),
  }),
  save: (agent) => ({
    heading: `Save ${agent.shown} to disk?`,
    words: "Its cached prompt is written to the store at once, with its unfinished block. A restart continues from its last token.",
    confirm: "Save",
    act: async () => (await call(path(agent, "save"), "POST", {}), `${agent.shown} is on disk.`),
  }),
  fork: (agent) => ({
    heading: `Fork ${agent.shown}?`,
    words: "A second agent continues from the same place. Both share all blocks until they go on.",
    confirm: "Fork",
    fieldLabel: "Name of the new agent",
    act: async (name) => (await call(path(agent, "fork"), "POST", { to: name }), `${name} is a fork of ${agent.shown}.`),
  }),
  delete: (agent) => ({
    heading: `Delete ${agent.shown}?`,
    words: "Its name is removed, with the blocks and records that no other agent uses. This cannot be undone.",
    confirm: "Delete",
    isDangerous: true,
    act: async () => {
      const done = await call(path(agent, ""), "DELETE");
      return `${agent.shown} is deleted${done.clean === false ? ", but not all of its records are gone" : ""}.`;
    },
  }),
};

// -- models ------------------------------------------------------------------------------------------------------------

export const MODEL_ACTS = {
  load: (model) => ({
    heading: `Load ${model.id}?`,
    words: "It waits in the same queue as requests, and may take the place of a loaded model. Nothing cached is lost.",
    confirm: "Load",
    act: async () => (await call("admin/load", "POST", { model: model.id, wait: false }), `${model.id} will be loaded.`),
  }),
  unload: (model) => ({
    heading: `Unload ${model.id}?`,
    words: "Requests that are here already finish first. What is cached is written to disk, and the next request loads the model again.",
    confirm: "Unload",
    isDangerous: true,
    act: async () => (await call("admin/unload", "POST", { model: model.id, wait: false }), `${model.id} will be unloaded.`),
  }),
};

/** The button of an act. */
export const button = (name, what, questions, after) =>
  h("button", { type: "button", class: name === "delete" ? "quiet danger" : "quiet", onclick: () => ask(withRefresh(questions[name](what), after)) },
    name[0].toUpperCase() + name.slice(1));

const withRefresh = (question, after) => ({
  ...question,
  act: async (typed) => {
    const words = await question.act(typed);
    after();
    return words;
  },
});

// -- the key -----------------------------------------------------------------------------------------------------------

const keyDialog = document.getElementById("key");

/** Ask for the server's key until there is one. */
export function askForKey(isWrong) {
  const typed = document.getElementById("key-input");
  render(document.getElementById("key-error"), isWrong ? ["The server does not know that key."] : []);
  typed.value = "";
  keyDialog.oncancel = (event) => event.preventDefault();
  if (!keyDialog.open) keyDialog.showModal();
  typed.focus();
  return new Promise((resolve) => {
    keyDialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      if (!typed.value) return;
      keyDialog.close();
      resolve(typed.value);
    };
  });
}
