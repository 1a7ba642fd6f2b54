// A text that a language model goes on with, shown as it is written.

import { ask } from "./server.js";
import { element } from "./words.js";

const MOST_TOKENS = 200;

export function offerText({ section, form, model, prompt, write, halt, written, note }, names) {
  section.hidden = names.length === 0;
  model.replaceChildren(...names.map((name) => element("option", { text: name, value: name })));
  model.parentElement.hidden = names.length < 2;
  let request = null;

  form.onsubmit = async (event) => {
    event.preventDefault();
    request?.abort();
    const mine = (request = new AbortController());
    written.textContent = note.textContent = "";
    form.dataset.busy = "true";
    halt.hidden = false;
    const body = { model: model.value, prompt: prompt.value, max_tokens: MOST_TOKENS, temperature: 0.8, stream: true };
    try {
      const response = await ask("/v1/completions", {
        method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal: mine.signal,
      });
      if (!response.ok) throw new Refused((await response.json()).error.message);
      note.textContent = "Writing";
      const finish = await read(response.body, (text) => written.append(text)); // as text, never as markup
      note.textContent = finish === "length" ? `Stopped after ${MOST_TOKENS} tokens` : "The text has ended";
    } catch (error) {
      if (mine.signal.aborted && mine !== request) return; // another one is under way
      if (mine.signal.aborted) note.textContent = "Stopped";
      else note.textContent = error instanceof Refused ? error.message : "The server did not answer. Check that it is still running, then try again.";
    }
    form.dataset.busy = "false";
    halt.hidden = true;
  };
  halt.onclick = () => request?.abort();
}

class Refused extends Error {}

// Reads server-sent events; gives the text of each to onText, and returns why the text ended.
async function read(stream, onText) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", finish = null;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return finish;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const { choices, error } = JSON.parse(data);
      if (error) throw new Refused(error.message);
      for (const choice of choices) {
        onText(choice.text);
        finish = choice.finish_reason ?? finish;
      }
    }
  }
}
