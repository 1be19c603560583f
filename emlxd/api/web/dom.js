// Elements from values. Text always goes in as text: nothing on this page parses HTML.

export const byId = (id) => document.getElementById(id);

/** `make("p", { class: "note" }, "text", child)`; properties that begin with "on" are listeners. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function copyButton(text) {
  const button = make("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    setText(button, copied ? "Copied" : "Not allowed");
    setTimeout(() => setText(button, "Copy"), 1500);
  });
  return button;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) {
    count /= 1024;
    place += 1;
  }
  return `${count.toFixed(place > 0 && count < 100 ? 1 : 0)} ${units[place]}`;
}
