// Values as a person reads them.

const RUPIAH = "360";

// "87500" in currency "360" is "Rp 87.500"; digits that are not a plain number are shown as they stand.
export function money(amount, currency) {
  if (!/^\d+(\.\d*)?$/.test(amount)) return printable(amount);
  const [whole, cents = ""] = amount.split(".");
  const grouped = BigInt(whole).toLocaleString("id-ID");
  const fraction = /[1-9]/.test(cents) ? `,${cents.padEnd(2, "0")}` : "";
  return currency === RUPIAH ? `Rp\u00a0${grouped}${fraction}` : `${grouped}${fraction} (currency ${currency})`;
}

// Characters that are invisible or turn the reading direction are spelled out: a code's text must not disguise itself.
export function printable(text) {
  const hidden = /[\u0000-\u0009\u000b-\u001f\u007f-\u00a0\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffc]/g;
  return String(text).replace(hidden, (mark) => `⟨U+${mark.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

export function milliseconds(value) {
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`;
}

export function count(number, noun) {
  return `${number === 0 ? "No" : number} ${noun}${number === 1 ? "" : "s"}`;
}

// An element with text and children; text only ever becomes textContent, so no code can put markup on the page.
export function element(name, { text, children = [], ...attributes } = {}) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  node.append(...children.filter(Boolean));
  return node;
}
