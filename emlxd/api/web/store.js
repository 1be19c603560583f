// Conversations in this browser's storage, the newest first.

const PLACE = "emlxd.conversations";
const MOST = 50;

export function conversations() {
  try {
    const found = JSON.parse(localStorage.getItem(PLACE));
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

/** Keeps `conversation` in front of the others; the oldest go when the storage is full. */
export function keep(conversation) {
  const others = conversations().filter((other) => other.id !== conversation.id);
  write([conversation, ...others].slice(0, MOST));
}

export const forget = (id) => write(conversations().filter((other) => other.id !== id));
export const forgetAll = () => write([]);

function write(list) {
  for (let count = list.length; count >= 0; count -= 1) {
    try {
      localStorage.setItem(PLACE, JSON.stringify(list.slice(0, count)));
      return;
    } catch {
      // Full, or turned off: the loop tries with one less.
    }
  }
}
