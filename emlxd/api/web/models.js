// The left side: memory, and each model with its state, slots, speed and buttons.

import { Refused, getJson, postJson } from "./api.js";
import { byId, bytes, make, setText } from "./dom.js";

const SAMPLES = 60;
const MAX_PIPS = 32;
const SVG = "http://www.w3.org/2000/svg";

const cards = new Map();

/** Takes a new reading and shows it. Gives what `/admin/status` said, or less where that is not allowed. */
export async function refresh() {
  const status = await readStatus();
  const now = performance.now() / 1000;
  const models = status.models;
  showMemory(status.memory, models);
  const loaded = models.filter((model) => model.state === "loaded").length;
  setText(byId("models-text"), models.length ? `${loaded} of ${models.length} loaded` : "none configured");
  for (const name of cards.keys()) {
    if (!models.some((model) => model.name === name)) {
      cards.get(name).element.remove();
      cards.delete(name);
    }
  }
  for (const model of models) {
    if (!cards.has(model.name)) cards.set(model.name, new Card(model.name));
    const card = cards.get(model.name);
    card.update(model, now, status.operator);
    byId("model-list").append(card.element);
  }
  return status;
}

async function readStatus() {
  try {
    return { operator: true, ...(await getJson("/admin/status")) };
  } catch (error) {
    if (!(error instanceof Refused) || ![403, 404].includes(error.status)) throw error;
  }
  const ready = await getJson("/ready").catch(() => ({ models: {} }));
  const served = (await getJson("/v1/models")).data;
  const adapters = (name) => served.filter((model) => model.parent === name).map((model) => model.id);
  const kind = (name) => served.find((model) => model.id === name)?.kind;
  const states = Object.entries(ready.models);
  const found = states.length ? states : served.filter((model) => !model.parent).map((model) => [model.id]);
  const models = found.map(([name, state]) => ({ name, state, kind: kind(name), aliases: [], adapters: adapters(name) }));
  return { operator: false, models };
}

function showMemory(memory, models) {
  setText(byId("memory-text"), memory ? `${bytes(memory.counted)} of ${bytes(memory.budget)}` : "–");
  if (!memory) return;
  const { budget, counted } = memory;
  const free = budget - counted;
  setText(byId("memory-free"), free >= 0 ? `${bytes(free)} free for more models` : `${bytes(-free)} over the budget`);
  const bar = byId("memory-bar");
  bar.setAttribute("aria-label", `${Math.round((100 * counted) / budget)}% of the memory budget is taken`);
  bar.replaceChildren(...models.filter((model) => model.memory).map((model) => {
    const part = make("span", { title: `${model.name}: ${bytes(model.memory.total)}` });
    part.style.flexBasis = `${(100 * model.memory.total) / Math.max(budget, counted)}%`;
    return part;
  }));
}

class Card {
  constructor(name) {
    this.name = name;
    this.rates = [];
    this.last = null;
    this.state = make("p", { class: "state" });
    this.error = make("p", { class: "error" });
    this.button = make("button", { onclick: () => this.toggle() });
    this.slots = make("div", { class: "slots", "aria-hidden": "true" });
    this.requests = make("span", { class: "number" });
    this.memory = make("span", { class: "number" });
    this.rate = make("b");
    this.line = svg("path", { class: "line" });
    this.area = svg("path", { class: "area" });
    const chart = svg("svg", { viewBox: `0 0 ${SAMPLES - 1} 30`, preserveAspectRatio: "none", "aria-hidden": "true" });
    chart.append(this.area, this.line);
    this.spark = make("div", { class: "spark" }, chart, make("p", { class: "rate" }, this.rate, make("small", {}, "tokens/s")));
    this.facts = make("div", { class: "facts" }, this.requests, this.memory);
    this.element = make("li", { class: "card" },
      make("div", { class: "row" }, make("div", {}, make("p", { class: "name" }, name), this.state), this.button),
      this.error, this.spark, this.slots, this.facts);
  }

  update(model, now, operator) {
    const loaded = model.state === "loaded";
    this.state.dataset.state = model.state ?? "unknown";
    setText(this.state, describe(model));
    setText(this.error, model.error ?? "");
    this.error.hidden = !model.error;
    this.loaded = loaded;
    this.button.hidden = !operator || !["loaded", "unloaded", "failed"].includes(model.state);
    setText(this.button, loaded ? "Unload" : "Load");
    this.button.setAttribute("aria-label", `${loaded ? "Unload" : "Load"} ${this.name}`);
    this.spark.hidden = this.slots.hidden = this.facts.hidden = !loaded || !operator;
    this.showSlots(model.slots ?? 0, model.running ?? 0, model.waiting ?? 0);
    setText(this.memory, model.memory ? bytes(model.memory.total) : "");
    this.measure(model.tokens ?? 0, now);
  }

  showSlots(slots, running, waiting) {
    const shown = Math.min(slots, MAX_PIPS);
    while (this.slots.children.length > shown) this.slots.lastChild.remove();
    while (this.slots.children.length < shown) this.slots.append(make("i"));
    [...this.slots.children].forEach((pip, place) => pip.classList.toggle("busy", place < running));
    setText(this.requests, `${running} of ${slots} slots in use` + (waiting ? `, ${waiting} waiting` : ""));
  }

  /** The speed since the last reading; a count that went back is that of a new worker. */
  measure(tokens, now) {
    const rate = this.last && tokens >= this.last.tokens ? (tokens - this.last.tokens) / (now - this.last.now) : 0;
    this.last = { tokens, now };
    this.rates = [...this.rates, rate].slice(-SAMPLES);
    setText(this.rate, rate >= 100 ? rate.toFixed(0) : rate.toFixed(1));
    const top = Math.max(1, ...this.rates);
    const from = SAMPLES - this.rates.length;
    const points = this.rates.map((value, place) => `${from + place} ${(29 - (27 * value) / top).toFixed(2)}`);
    this.line.setAttribute("d", `M0 29L${from} 29L${points.join("L")}`);
    this.area.setAttribute("d", `M${from} 30L${points.join("L")}L${SAMPLES - 1} 30Z`);
  }

  async toggle() {
    this.button.disabled = true;
    try {
      await postJson(`/admin/models/${encodeURI(this.name)}/${this.loaded ? "unload" : "load"}`);
    } catch (error) {
      setText(this.error, error.message);
      this.error.hidden = false;
    }
    this.button.disabled = false;
  }
}

function describe(model) {
  const words = { loaded: "Loaded", loading: "Loading", unloaded: "Not loaded", failed: "Failed" };
  const state = words[model.state] ?? model.state ?? "Configured";
  const use = { embedding: ", for embeddings", rerank: ", for ranking" }[model.kind] ?? "";
  const called = model.aliases.length ? `, also called ${model.aliases.join(", ")}` : "";
  const adapters = model.adapters.length ? `; with adapters as ${model.adapters.join(", ")}` : "";
  return state + use + called + adapters;
}

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
