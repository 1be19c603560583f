// The configuration tab: what is in force, and how the last reload went.

import { getJson, postJson } from "./api.js";
import { byId, make, setText } from "./dom.js";

export function start() {
  byId("reload-now").addEventListener("click", async () => {
    byId("reload-now").disabled = true;
    await postJson("/admin/reload").catch(() => {}); // what went wrong is in the status
    byId("reload-now").disabled = false;
    await refresh();
  });
}

export async function refresh() {
  const text = byId("config-text");
  try {
    const [settings, status] = await Promise.all([getJson("/admin/config"), getJson("/admin/status")]);
    text.replaceChildren(...yaml(settings, ""));
    showReload(status);
  } catch (error) {
    setText(text, error.message);
  }
}

/** What `/admin/status` says of the last reload: nothing until there was one. */
export function showReload({ config, last_reload: last, needs_restart: waiting = [] }) {
  setText(byId("config-path"), config ?? "");
  byId("reload-flag").hidden = !last?.error;
  const box = byId("reload");
  const shown = JSON.stringify([last, waiting]);
  if (box.shown === shown) return;
  box.shown = shown;
  box.classList.toggle("bad", Boolean(last?.error));
  box.replaceChildren();
  if (last) {
    box.append(
      make("h2", {}, last.error ? "The last reload failed" : "Last reload"),
      make("p", { class: "muted" }, new Date(last.at * 1000).toLocaleString() + (last.error ? ". What was in force stays in force." : "")),
      make("pre", {}, last.error ?? changes(last.plan)));
  }
  if (waiting.length) box.append(make("p", {}, `Changed in the file, in force after a restart: ${waiting.join(", ")}`));
}

const WORDS = { add: "added", drop: "removed", replace: "loaded anew", retune: "changed in place", settings: "settings" };

function changes(plan) {
  const found = Object.entries(WORDS).filter(([what]) => plan[what]?.length).map(([what, word]) => `${word}: ${plan[what].join(", ")}`);
  return found.join("\n") || "Nothing had changed.";
}

/** A value as YAML in nodes, keys marked. What it gives is text for people, not for a parser. */
function yaml(value, indent) {
  return Object.entries(value).flatMap(([key, inner]) => {
    const head = Array.isArray(value) ? [`${indent}- `] : [indent, make("span", { class: "key" }, key), ": "];
    if (inner === null || typeof inner !== "object") return [...head, scalar(inner), "\n"];
    if (!Object.keys(inner).length) return [...head, Array.isArray(inner) ? "[]" : "{}", "\n"];
    if (!Array.isArray(value)) return [...head.slice(0, -1), ":\n", ...yaml(inner, `${indent}  `)];
    const [, ...rest] = yaml(inner, `${indent}  `);
    return [...head, ...rest];
  });
}

const scalar = (value) => (typeof value === "string" && !/^[\w./~-]+$/.test(value) ? JSON.stringify(value) : String(value));
