// A card for each model of the server, with what was measured of it when it was exported.

import { peek } from "./server.js";
import { element, milliseconds } from "./words.js";

const TASKS = { detect: "finds objects in photos", language: "generates text", embedding: "gives vectors of texts", tensors: "computes tensors" };

const RUNTIMES = { onnxruntime: "ONNX Runtime", openvino: "OpenVINO", "openvino-bf16": "OpenVINO in bfloat16", torch: "torch", inductor: "AOTInductor" };

// Show the models, and return them; where the server demands a key that nobody has given yet, they stay hidden, and null is returned.
export async function showModels(section, list) {
  const answer = await peek("/models");
  if (!answer.ok) return null;
  const models = await answer.json();
  list.replaceChildren(...models.map(card));
  section.hidden = false;
  return models;
}

// How requests share the cores, in a sentence.
function sharing({ requests, threads, measured }) {
  const cores = threads === 1 ? "one thread each" : `${threads} threads each`;
  const rates = measured.map((one) => `${one.requests_per_s} with ${one.requests} at once`).join(", ");
  return `Computes ${requests === 1 ? "one request" : `${requests} requests`} at once, on ${cores}${rates ? ` (requests per second: ${rates})` : ""}.`;
}

function card({ name, version, task, precision, runtime, proof, pool, batch }) {
  const lines = proof.length ? [...proof] : ["Nothing was recorded of this program when it was exported."];
  if (pool) lines.push(sharing(pool));
  if (batch) lines.push(`Computes up to ${batch.rows} rows of waiting requests together: ${milliseconds(batch.together_ms)} here, where one takes ${milliseconds(batch.one_ms)}.`);
  return element("li", { class: "model", children: [
    element("h3", { text: name }),
    element("p", { class: "what", text: `${TASKS[task] ?? task}, ${precision === "unknown" ? "precision unknown" : precision}${runtime ? `, in ${RUNTIMES[runtime] ?? runtime}` : ""}, version ${version}` }),
    element("ul", { class: "proof", children: lines.map((text) => element("li", { text })) }),
  ] });
}
