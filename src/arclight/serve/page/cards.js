// One card for each code: who is paid, how much, and whether it was read whole. A sticker pasted over a shop's code reads
// without errors too, so no verdict here says that a payment goes to the right one.

import { element, money, printable } from "./words.js";

const SIZES = { UMI: "Micro business", UKE: "Small business", UME: "Medium business", UBE: "Large business" };

// The verdict on a code and the colour that goes with it, on the card and on the photo.
export function verdict(code) {
  if (code.text === null) return { tone: "warn", kind: "QR code", word: "Not read" };
  if (code.kind === "qris" && code.problems.length === 0) return { tone: "plain", kind: "QRIS", word: "Read without errors" };
  if (code.kind === "qris") return { tone: "warn", kind: "QRIS", word: "Check this code" };
  if (code.kind === "emvco") return { tone: "warn", kind: "Payment code", word: "Not QRIS" };
  if (code.problems.length > 0) return { tone: "bad", kind: "Payment code", word: "Invalid" };
  return { tone: "plain", kind: "QR code", word: "Not a payment code" };
}

// What a text that is no payment code is for, by how it begins.
function purpose(text) {
  const beginnings = [
    [/^https?:/i, "A web address"], [/^wifi:/i, "Access to a Wi-Fi network"], [/^(begin:vcard|mecard:)/i, "A contact"],
    [/^mailto:/i, "An e-mail address"], [/^(tel|sms|smsto):/i, "A phone number"], [/^geo:/i, "A place on the map"],
  ];
  return beginnings.find(([start]) => start.test(text))?.[1] ?? "A text";
}

export function card(code, number) {
  const { tone, kind, word } = verdict(code);
  const flow = code.payload ? (code.payload.is_dynamic ? ", one payment" : ", reusable") : "";
  const header = element("p", {
    class: "kind",
    children: [
      element("span", { class: "number", text: number }),
      element("span", { text: kind + flow }),
      element("span", { class: "verdict", text: word }),
    ],
  });
  const body = code.payload ? payment(code.payload) : explanation(code, tone);
  return element("li", {
    class: "card", "data-tone": tone, "data-number": number, tabindex: "-1",
    children: [header, ...body, code.text === null ? undefined : problems(code.problems), code.payload || tone === "bad" ? raw(code.text) : undefined],
  });
}

function payment(payload) {
  const place = [payload.city, payload.postal_code].filter(Boolean).join(" ");
  const amount = payload.amount === null ? "The payer types it" : money(payload.amount, payload.currency);
  return [
    element("h3", { class: "merchant", text: printable(payload.merchant_name) }),
    element("p", { class: "place", text: printable(place) + (payload.country === "ID" ? "" : `, ${printable(payload.country)}`) }),
    element("p", {
      class: "amount", "data-open": String(payload.amount === null),
      children: [element("span", { text: "Amount" }), element("b", { text: amount })],
    }),
    element("dl", { class: "facts", children: facts(payload).flatMap(([label, value, style]) => [
      element("dt", { text: label }),
      element("dd", { text: printable(value), ...(style ? { class: style } : {}) }),
    ]) }),
    element("p", { class: "explain compare", text: "A code pasted over the shop's own would read without errors too." }),
  ];
}

// [label, value, style] of what the payload says beyond name, place and amount.
function facts(payload) {
  const more = payload.additional ?? {};
  const accounts = (payload.accounts ?? []).filter((account) => account.guid && account.tag !== "51");
  return [
    ["Merchant ID (NMID)", payload.nmid, "nmid digits"],
    ["Code type", payload.is_dynamic ? "Dynamic" : "Static", "flow"],
    ["Tip", tip(payload.tip, payload.currency)],
    ["Merchant size", SIZES[payload.criteria] ?? payload.criteria],
    ["Category code", payload.mcc, "digits"],
    ["Acquirer", accounts.map((account) => account.guid).join(", "), "digits"],
    ["Bill", more.bill_number, "digits"],
    ["Reference", more.reference_label, "digits"],
    ["Terminal", more.terminal_label, "digits"],
    ["Purpose", more.purpose],
  ].filter(([, value]) => value);
}

function tip(value, currency) {
  if (!value) return "";
  if (value.kind === "prompt") return "The payer decides";
  return value.kind === "percentage" ? `${value.value} %` : money(value.value, currency);
}

function explanation(code, tone) {
  if (code.text === null) {
    return [
      element("h3", { text: "Found, but not readable" }),
      element("p", { class: "explain", text: "Go closer, hold still, and avoid reflections on the code." }),
    ];
  }
  if (tone === "bad") {
    return [
      element("h3", { text: "Do not pay with this code" }),
      element("p", { class: "explain", text: "It looks like a payment code, but its content breaks the standard. It may be damaged or altered." }),
    ];
  }
  return [
    element("h3", { text: purpose(code.text) }),
    element("p", { class: "explain", text: "Arclight shows what the code says and never opens it." }),
    element("code", { class: "said", text: printable(code.text) }),
  ];
}

function problems(list) {
  if (list.length === 0) return undefined;
  const lines = list.map((problem) => element("li", { text: printable(problem) }));
  return element("ul", { class: "problems", "aria-label": "Problems", children: lines });
}

function raw(text) {
  const copy = element("button", { type: "button", class: "quiet copy", text: "Copy" });
  copy.addEventListener("click", async () => {
    const done = await copied(text);
    copy.textContent = done ? "Copied" : "Select the text and copy it";
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });
  return element("details", { class: "raw", children: [
    element("summary", { text: "Text of the code" }),
    element("code", { class: "said", text: printable(text) }),
    copy,
  ] });
}

// The clipboard is closed to pages without HTTPS (other than localhost).
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
