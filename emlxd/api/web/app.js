// The page's start: tabs, theme, key, and the clock that refreshes what is shown.

import { Refused, key } from "./api.js";
import * as chat from "./chat.js";
import * as config from "./config.js";
import { byId, setText } from "./dom.js";
import * as models from "./models.js";

const EVERY = 1000; // milliseconds
const NO_CHAT = ["embedding", "rerank"];
const TABS = ["models", "chat", "config"];

function startTabs() {
  for (const name of TABS) byId(`tab-${name}`).addEventListener("click", () => openTab(name));
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const shown = TABS.filter((name) => byId(`tab-${name}`).offsetParent);
    const place = shown.indexOf(document.body.dataset.tab);
    const next = shown[(place + step + shown.length) % shown.length];
    openTab(next);
    byId(`tab-${next}`).focus();
  });
}

function openTab(name) {
  document.body.dataset.tab = name;
  for (const each of TABS) {
    byId(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    byId(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  if (name === "config") config.refresh();
}

function startTheme() {
  const root = document.documentElement;
  const saved = localStorage.getItem("emlxd.theme");
  if (saved) root.dataset.theme = saved;
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("emlxd.theme", root.dataset.theme);
  });
}

let declined = false; // the key dialog was closed without a key

function startKey() {
  const dialog = byId("key-dialog");
  byId("key-form").addEventListener("submit", () => {
    declined = false;
    key.set(byId("key").value.trim());
    byId("key").value = "";
    tick();
  });
  dialog.addEventListener("cancel", () => (declined = true));
  byId("key-cancel").addEventListener("click", () => {
    declined = true;
    dialog.close();
  });
  byId("unlock").addEventListener("click", () => dialog.showModal());
}

function showHealth(state, text) {
  byId("health").dataset.state = state;
  setText(byId("health"), text);
  byId("unlock").hidden = state !== "locked";
}

async function tick() {
  try {
    const status = await models.refresh();
    const chats = status.models.filter((model) => !NO_CHAT.includes(model.kind));
    chat.offer(chats.flatMap((model) => [model.name, ...model.adapters]));
    const down = status.models.filter((model) => model.state === "failed").length;
    const loading = status.models.some((model) => model.state === "loading");
    showHealth(down ? "failed" : loading ? "loading" : "ready", down ? `${down} failed` : loading ? "loading" : "ready");
    if (status.operator) config.showReload(status);
    byId("tab-config").hidden = !status.operator;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    const locked = error.status === 401;
    showHealth(locked ? "locked" : "away", locked ? "a key is needed" : "not reachable");
    if (!locked || declined || byId("key-dialog").open) return;
    setText(byId("key-note"), key.get() ? error.message : "It is kept until this tab is closed.");
    byId("key-dialog").showModal();
  }
}

async function keepTime() {
  for (;;) {
    if (!document.hidden) await tick();
    await new Promise((resolve) => setTimeout(resolve, EVERY));
  }
}

startTheme();
startTabs();
startKey();
config.start();
chat.start();
keepTime();
