// The conversation: asking, streaming, stopping, asking again, and what is remembered of it.

import { chat } from "./api.js";
import { byId, copyButton, make, setText } from "./dom.js";
import { show } from "./markdown.js";
import { conversations, forget, forgetAll, keep } from "./store.js";

const IDEAS = ["Explain how a KV cache works", "Write a haiku about the sea", "A Python one-liner that reverses words"];

let current = fresh();
let running = null; // AbortController of the answer that streams
let following = true; // whether the log scrolls along

function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), model: "", settings: {}, turns: [] };
}

export function start() {
  const log = byId("log");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(byId("prompt").value.trim());
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask(event.target.value.trim());
  });
  byId("stop").addEventListener("click", stop);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
  });
  log.addEventListener("scroll", () => {
    following = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  });
  byId("toggle-settings").addEventListener("click", () => {
    const form = byId("settings");
    form.hidden = !form.hidden;
    byId("toggle-settings").setAttribute("aria-expanded", String(!form.hidden));
  });
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("settings").addEventListener("input", () => {
    current.settings = Object.fromEntries([...new FormData(byId("settings"))].filter(([, value]) => value));
    remember();
  });
  byId("new-chat").addEventListener("click", () => open({ ...fresh(), settings: current.settings }));
  byId("open-history").addEventListener("click", showHistory);
  byId("history-close").addEventListener("click", () => byId("history-dialog").close());
  byId("history-clear").addEventListener("click", () => {
    forgetAll();
    showHistory();
  });
  open(conversations()[0] ?? current);
}

/** The models that can be chosen; a conversation keeps its own as long as there is one of that name. */
export function offer(names) {
  const select = byId("model");
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  const chosen = select.value || current.model;
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function open(conversation) {
  stop();
  current = conversation;
  for (const field of byId("settings").elements) field.value = current.settings[field.name] ?? "";
  const select = byId("model");
  if ([...select.options].some((option) => option.value === current.model)) select.value = current.model;
  following = true;
  draw();
  if (matchMedia("(pointer: fine)").matches) byId("prompt").focus();
}

function remember() {
  if (current.turns.length) keep(current);
}

function draw() {
  byId("log").replaceChildren(...(current.turns.length ? current.turns.map(drawTurn) : [drawEmpty()]));
  scroll();
}

function drawEmpty() {
  const ideas = IDEAS.map((idea) => make("button", { type: "button", onclick: () => ask(idea) }, idea));
  return make("div", { class: "empty" }, make("p", {}, "What would you like to know?"), make("div", { class: "ideas" }, ...ideas));
}

function drawTurn(turn, place) {
  if (turn.role === "user") {
    return make("article", { class: "turn user", "aria-label": "You" }, make("div", { class: "said" }, turn.text));
  }
  const element = make("article", { class: "turn answer", "aria-label": "The model" });
  if (turn.reasoning) element.append(drawThought(turn));
  const said = make("div", { class: "said" });
  if (turn.text) show(said, turn.text);
  element.append(said);
  if (turn.error) element.append(make("p", { class: "note bad", role: "alert" }, turn.error));
  if (turn !== running?.turn) element.append(drawFoot(turn, place === current.turns.length - 1));
  else element.classList.add("live");
  return element;
}

function drawThought(turn) {
  const inside = make("div", { class: "said" });
  show(inside, turn.reasoning);
  return make("details", { class: "thought" }, make("summary", {}, turn.text ? "Thoughts" : "Thinking"), inside);
}

function drawFoot(turn, isLast) {
  const foot = make("div", { class: "foot" });
  if (turn.text) foot.append(copyButton(() => turn.text));
  if (isLast) foot.append(make("button", { type: "button", class: "quiet", onclick: again }, "Regenerate"));
  foot.append(...facts(turn).map((fact) => make("span", {}, fact)));
  return foot;
}

function facts({ usage, first, seconds, ended }) {
  const found = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    found.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0) found.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    found.push(`first after ${first < 1 ? `${Math.round(first * 1000)} ms` : `${first.toFixed(1)} s`}`);
    found.push(`prompt ${usage.prompt_tokens}` + (cached ? `, ${cached} from cache` : ""));
  }
  const ends = { length: "cut at the token limit", stopped: "stopped" };
  if (ends[ended]) found.push(ends[ended]);
  return found;
}

function ask(text) {
  if (!text || running || !byId("settings").reportValidity()) return;
  byId("prompt").value = "";
  current.turns.push({ role: "user", text });
  following = true;
  answer();
}

function again() {
  current.turns.pop();
  answer();
}

function stop() {
  running?.abort.abort();
}

async function answer() {
  const conversation = current;
  const turn = { role: "assistant", text: "", reasoning: "" };
  const mine = { abort: new AbortController(), turn };
  conversation.model = byId("model").value;
  const body = { model: conversation.model, messages: messages(conversation), ...sampling(conversation.settings) };
  conversation.turns.push(turn);
  running = mine;
  showRunning(true);
  draw();
  const began = performance.now();
  let firstAt = null;
  let lastAt = began;
  try {
    for await (const chunk of chat(body, mine.abort.signal)) {
      turn.usage = chunk.usage ?? turn.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: reasoning } = choice.delta;
      turn.ended = choice.finish_reason ?? turn.ended;
      if (!content && !reasoning) continue;
      lastAt = performance.now();
      firstAt ??= lastAt;
      turn.text += content ?? "";
      turn.reasoning += reasoning ?? "";
      if (current === conversation) redraw(turn);
    }
  } catch (error) {
    if (error.name === "AbortError") turn.ended = "stopped";
    else turn.error = error.message;
  }
  turn.first = ((firstAt ?? lastAt) - began) / 1000;
  turn.seconds = (lastAt - (firstAt ?? lastAt)) / 1000;
  running = null;
  showRunning(false);
  keep(conversation);
  if (current === conversation) draw();
  setText(byId("announce"), turn.error ? "" : turn.text.slice(0, 2000));
}

function messages({ settings, turns }) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const said = turns.filter((turn) => turn.text).map((turn) => ({ role: turn.role, content: turn.text }));
  return [...system, ...said];
}

/** The settings that are set, as numbers where the API has numbers. */
function sampling({ system, stop: stopAt, ...numbers }) {
  const found = Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, Number(value)]));
  return stopAt ? { ...found, stop: [stopAt] } : found;
}

let frame = 0;

/** Once a frame, however fast the words come. */
function redraw(turn) {
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    const element = byId("log").lastElementChild;
    if (turn !== running?.turn || !element) return;
    const thought = element.querySelector(":scope > .thought");
    if (turn.reasoning && !thought) element.prepend(drawThought(turn));
    else if (thought) {
      show(thought.lastElementChild, turn.reasoning);
      setText(thought.firstElementChild, turn.text ? "Thoughts" : "Thinking");
    }
    show(element.querySelector(":scope > .said"), turn.text);
    scroll();
  });
}

function scroll() {
  const log = byId("log");
  if (following) log.scrollTop = log.scrollHeight;
}

function showRunning(on) {
  byId("send").hidden = on;
  byId("stop").hidden = !on;
  byId("log").setAttribute("aria-busy", String(on));
}

function showHistory() {
  const dialog = byId("history-dialog");
  const rows = conversations().map((conversation) => {
    const title = conversation.turns[0]?.text.slice(0, 80) ?? "Empty";
    return make("li", {},
      make("button", { type: "button", class: "quiet open", onclick: () => { dialog.close(); open(conversation); } }, title),
      make("button", { type: "button", class: "quiet danger", "aria-label": `Delete: ${title}`, onclick: () => { forget(conversation.id); showHistory(); } }, "Delete"));
  });
  byId("history-list").replaceChildren(...(rows.length ? rows : [make("li", { class: "muted" }, "Nothing yet.")]));
  byId("history-clear").hidden = !rows.length;
  if (!dialog.open) dialog.showModal();
}
