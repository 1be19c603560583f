// Markdown to elements, for text that nobody vouches for. Links lead to the web or to mail, and
// nothing is loaded; what is not understood stays as it was written.

import { copyButton, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)+ *(?::?-+:?)? *\|? *$/;
const MAX_DEPTH = 12;
const MAX_INLINE = 20000; // characters of one paragraph whose marks are looked for: unclosed ones cost a search each

/** Shows `text` in `element`. Called again with more text, it makes anew only the blocks that changed. */
export function show(element, text) {
  const blocks = split(text.split("\n"));
  const shown = element.shownBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && shown[same] === blocks[same].key) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(build(block, 0));
  element.shownBlocks = blocks.map((block) => block.key);
}

/** Lines as blocks: `{ kind, lines, key }` and what the kind needs. */
function split(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const start = at;
    const block = take(lines, at);
    at = block.end;
    if (block.kind) blocks.push({ ...block, key: `${block.kind}\n${lines.slice(start, at).join("\n")}\n${block.open ?? ""}` });
  }
  return blocks;
}

function take(lines, at) {
  const line = lines[at];
  if (!line.trim()) return { end: at + 1 };
  const fence = FENCE.exec(line);
  if (fence) return takeFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, lines: [heading[2]], end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", lines: [], end: at + 1 };
  if (QUOTE.test(line)) return takeWhile(lines, at, "quote", (next) => QUOTE.test(next), (next) => next.replace(QUOTE, ""));
  if (ITEM.test(line)) return takeList(lines, at);
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) {
    return takeWhile(lines, at, "table", (next) => next.includes("|"), (next) => next);
  }
  return takeWhile(lines, at, "paragraph", (next, place) => place === at || !interrupts(next), (next) => next);
}

const interrupts = (line) =>
  !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

function takeWhile(lines, at, kind, wanted, change) {
  let end = at;
  while (end < lines.length && wanted(lines[end], end)) end += 1;
  return { kind, lines: lines.slice(at, end).map(change), end };
}

function takeFence(lines, at, [, marks, language]) {
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(marks) && !line.trim().replaceAll(marks[0], "");
  while (end < lines.length && !closes(lines[end])) end += 1;
  return { kind: "code", language, lines: lines.slice(at + 1, end), end: Math.min(end + 1, lines.length) };
}

/** A list goes on over blank lines as long as items or deeper lines follow. */
function takeList(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const depth = indent.length;
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const inset = line.search(/\S/);
    if (item && item[1].length <= depth + 1 && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== ordered || item[1].length < depth) break;
      items.push([item[3]]);
    } else if (inset === -1) {
      const next = lines[end + 1] ?? "";
      if (!next.trim() || (!ITEM.test(next) && next.search(/\S/) <= depth)) break;
      items.at(-1).push("");
    } else if (inset > depth) {
      items.at(-1).push(line.slice(Math.min(inset, depth + mark.length + 1)));
    } else if (lines[end - 1].trim() && !interrupts(line)) {
      items.at(-1).push(line);
    } else break;
  }
  return { kind: "list", ordered, start: parseInt(mark, 10), items, lines: [], end };
}

function build(block, depth) {
  switch (block.kind) {
    case "code": return buildCode(block);
    case "rule": return make("hr");
    case "heading": return inline(make(`h${Math.min(block.level + 1, 5)}`), block.lines[0]);
    case "quote": return buildInside(make("blockquote"), block.lines, depth);
    case "table": return buildTable(block.lines);
    case "list": {
      const list = make(block.ordered ? "ol" : "ul", { start: block.ordered && block.start !== 1 && String(block.start) });
      list.append(...block.items.map((lines) => buildInside(make("li"), lines, depth)));
      return list;
    }
    default: return inline(make("p"), block.lines.join("\n"));
  }
}

function buildInside(element, lines, depth) {
  const blocks = depth < MAX_DEPTH ? split(lines) : [{ kind: "paragraph", lines }];
  if (element.tagName === "LI" && blocks[0]?.kind === "paragraph") inline(element, blocks.shift().lines.join("\n"));
  element.append(...blocks.map((block) => build(block, depth + 1)));
  return element;
}

function buildCode({ language, lines }) {
  const text = lines.join("\n");
  return make("div", { class: "block" },
    make("header", {}, make("span", {}, language || "text"), copyButton(() => text)),
    make("pre", { tabindex: "0" }, make("code", {}, text)));
}

function buildTable([head, , ...rows]) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line, tag) => make("tr", {}, ...cells(line).map((cell) => inline(make(tag), cell)));
  return make("div", { class: "table", tabindex: "0" },
    make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((line) => row(line, "td")))));
}

const INLINE = [
  [/^\\([\\`*_{}[\]()#+\-.!|~<>])/, (m) => m[1]],
  [/^(`+)(?!`)([^]*?[^`])\1(?!`)/, (m) => make("code", {}, m[2].trim() || m[2])],
  [/^\*\*(?=\S)([^]*?\S)\*\*/, (m) => inline(make("strong"), m[1])],
  [/^__(?=\S)([^]*?\S)__(?!\w)/, (m) => inline(make("strong"), m[1]), true],
  [/^\*(?=[^\s*])([^]*?[^\s*])\*(?!\*)/, (m) => inline(make("em"), m[1])],
  [/^_(?=[^\s_])([^]*?[^\s_])_(?!\w)/, (m) => inline(make("em"), m[1]), true],
  [/^~~(?=\S)([^]*?\S)~~/, (m) => inline(make("del"), m[1])],
  [/^!?\[([^\]\n]*)\]\(\s*<?([^\s)>]*(?:\([^\s)]*\)[^\s)>]*)*)>?(?:\s+"[^"\n]*")?\s*\)/, (m) => link(m[2], m[1] || m[2], m[0])],
  [/^<((?:https?:\/\/|mailto:)[^\s<>]+)>/, (m) => link(m[1], m[1].replace(/^mailto:/, ""), m[0])],
  [/^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_]/, (m) => link(m[0], m[0], m[0]), true],
  [/^(?: {2,}|\\)\n/, () => make("br")],
];
const SPECIAL = /[\\`*_~![<\n ]|https?:\/\//g;

/** Appends `text` to `element` with its inline marks as elements. */
function inline(element, text) {
  const rest = text.slice(MAX_INLINE);
  text = text.slice(0, MAX_INLINE);
  let plain = "";
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const [node, length] = match(text, at);
    if (node === null) plain += text[at];
    else {
      element.append(plain, node);
      plain = "";
    }
    at += length;
  }
  element.append(plain + rest);
  return element;
}

function match(text, at) {
  const rest = text.slice(at);
  const inWord = at > 0 && /\w/.test(text[at - 1]);
  for (const [pattern, node, startsWord] of INLINE) {
    const found = !(startsWord && inWord) && pattern.exec(rest);
    if (found) return [node(found), found[0].length];
  }
  return [null, 1];
}

/** Only the web and mail: a `javascript:` link is shown as it was written. */
function link(address, text, written) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return written;
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, text);
}
