// The page: a photo or the pictures of a video come in by any door, go to /detect, and the answer is shown; texts are written on.

import { offerCamera, TROUBLE } from "./camera.js";
import { card, verdict } from "./cards.js";
import { Live } from "./live.js";
import { ask } from "./server.js";
import { showModels } from "./models.js";
import { Stage } from "./stage.js";
import { count, element, milliseconds } from "./words.js";
import { offerText } from "./writer.js";

const part = (id) => document.getElementById(id);
const stage = new Stage({
  frame: part("frame"), photo: part("photo"), moving: part("moving"), overlay: part("overlay"), unseen: part("unseen"),
  onSeen: (visible) => { seen = visible; leaveBlank(); },
});
const CAN_WATCH = Boolean(navigator.mediaDevices?.getUserMedia);
const COMPARE = "Compare the name with the shop in front of you before you pay.";
let seen = true; // whether this browser can show the photo
let request = null; // the AbortController of the photo being read
let latest = null; // the latest photo, for another try

// States: start, busy, live, done, error.
function enter(state, summary, advice = "", { retry = false } = {}) {
  document.body.dataset.state = state;
  part("work").hidden = state === "start";
  part("work").setAttribute("aria-busy", String(state === "busy"));
  part("summary").textContent = summary;
  part("advice").textContent = advice;
  part("again").hidden = !retry;
  part("cards").replaceChildren(...(state === "busy" ? [element("li", { class: "ghost", "aria-hidden": "true" })] : []));
  part("timing").textContent = "";
  leaveBlank();
}

// A file that is no photo leaves nothing to look at: its error stands alone.
function leaveBlank() {
  part("work").dataset.blank = String(document.body.dataset.state === "error" && !seen);
}

// Send a picture to be read.
const send = (picture, signal) => {
  const headers = { "Content-Type": picture.type.startsWith("image/") ? picture.type : "application/octet-stream" };
  return ask("/detect", { method: "POST", body: picture, headers, signal });
};

async function read(photo) {
  live.stop();
  request?.abort();
  const mine = (request = new AbortController());
  latest = photo;
  stage.show(photo);
  enter("busy", "Reading the photo", "Looking for codes.");
  try {
    const response = await send(photo, mine.signal);
    const answer = await response.json();
    if (response.ok && part("models").hidden) meetModels(); // now that there is a key
    if (response.ok) show(answer);
    else enter("error", "This photo was not read", answer.error, { retry: response.status === 429 || response.status >= 500 });
  } catch (error) {
    if (mine.signal.aborted) return;
    console.warn(error);
    enter("error", "The server did not answer", "Check that it is still running, then try again.", { retry: true });
  }
  part("summary").focus({ preventScroll: true });
}

function show({ image, boxes, codes, milliseconds: spent }) {
  const advice = codes.some((code) => code.payload) ? COMPARE : "";
  const unread = codes.filter((code) => code.text === null).length;
  if (codes.length === 0) enter("done", "No code found", "Go closer so that the code fills more of the picture, and avoid blur and reflections.");
  else enter("done", `${count(codes.length, "code")} found${unread ? `, ${unread} not readable` : ""}`, advice);
  part("cards").replaceChildren(...codes.map((code, index) => card(code, index + 1)));
  mark(codes, image);
  part("timing").textContent =
    `${image.width} × ${image.height} px · ${milliseconds(spent.total)} ` +
    `(open ${milliseconds(spent.decode)}, find ${milliseconds(spent.detect)}, read ${milliseconds(spent.scan)})`;
}

function mark(codes, image) {
  stage.mark(codes.map((code, index) => ({ corners: code.corners_px, tone: verdict(code).tone, number: index + 1 })), image);
}

// Watching: cards and words change only when other codes are seen, so that they can be read.

let known = null; // the codes of the cards, as text

const live = new Live({
  video: part("moving"), send,
  onAnswer({ image, codes }, { frames, spent }) {
    mark(codes, image);
    part("timing").textContent = `${count(frames, "picture")} · ${image.width} × ${image.height} px · ${milliseconds(spent)} each`;
    const texts = JSON.stringify(codes.map((code) => code.text));
    if (texts === known) return;
    known = texts;
    part("summary").textContent = codes.length ? `${count(codes.length, "code")} in sight` : "Watching";
    part("advice").textContent = codes.some((code) => code.payload) ? COMPARE : codes.length ? "" : "Show a code to the camera, or play a video with one.";
    part("cards").replaceChildren(...codes.map((code, index) => card(code, index + 1)));
  },
  onEnd(reason, picture) {
    part("stop").hidden = true;
    part("live").hidden = !CAN_WATCH;
    if (picture) stage.freeze(picture);
    if (reason === "stopped" || reason === "ended") {
      document.body.dataset.state = "done";
      part("summary").textContent = reason === "ended" ? "The video has ended" : "No longer watching";
    } else enter("error", "This was not watched to the end", reason);
  },
});

async function watch(begin) {
  request?.abort();
  live.stop();
  markSample(null);
  known = null;
  stage.watch();
  enter("live", "Watching", "");
  part("stop").hidden = false;
  part("live").hidden = true;
  try {
    await begin();
  } catch (error) { // the camera did not start
    part("stop").hidden = true;
    part("live").hidden = !CAN_WATCH;
    enter("error", "The camera cannot be watched", TROUBLE[error.name] ?? "The camera did not start. Choose a photo instead.");
  }
}

function light(number) {
  stage.light(number);
  for (const item of part("cards").children) item.dataset.lit = String(Number(item.dataset.number) === number);
}

function numberOf(target) {
  return Number(target.closest?.(".card")?.dataset.number) || null;
}

// Doors

function take(files) {
  if (!files?.length) return;
  markSample(null);
  if (files[0].type.startsWith("video/")) watch(() => live.watchFile(files[0]));
  else read(files[0]);
}

function markSample(button) {
  for (const other of document.querySelectorAll("[data-sample]")) other.setAttribute("aria-current", String(other === button));
}

part("choose").addEventListener("click", () => part("file").click());
for (const input of [part("file"), part("capture")]) {
  input.addEventListener("change", () => {
    take(input.files);
    input.value = ""; // so that the same file can be chosen again
  });
}
for (const button of document.querySelectorAll("[data-sample]")) {
  button.addEventListener("click", async () => {
    markSample(button);
    read(await (await fetch(button.dataset.sample)).blob());
  });
}
part("retry").addEventListener("click", () => read(latest));
document.addEventListener("paste", (event) => take(event.clipboardData?.files));

let depth = 0; // dragenter and dragleave come for every element on the way
document.addEventListener("dragenter", () => { part("drop").hidden = ++depth === 0; });
document.addEventListener("dragleave", () => { part("drop").hidden = --depth <= 0; });
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  depth = 0;
  part("drop").hidden = true;
  take(event.dataTransfer?.files);
});

offerCamera(
  {
    button: part("camera"), dialog: part("camera-dialog"), viewfinder: part("viewfinder"), shutter: part("shutter"),
    close: part("camera-close"), trouble: part("camera-trouble"), capture: part("capture"),
  },
  (photo) => take([photo]),
);

part("live").hidden = !CAN_WATCH;
part("live").addEventListener("click", () => watch(() => live.watchCamera()));
part("stop").addEventListener("click", () => live.stop());

// A card and its mark on the photo light up together.

part("cards").addEventListener("pointerover", (event) => light(numberOf(event.target)));
part("cards").addEventListener("pointerleave", () => light(null));
part("cards").addEventListener("focusin", (event) => light(numberOf(event.target)));
part("overlay").addEventListener("pointermove", (event) => light(stage.at(event)));
part("overlay").addEventListener("pointerleave", () => light(null));
part("overlay").addEventListener("click", (event) => {
  const number = stage.at(event);
  if (number) part("cards").querySelector(`[data-number="${number}"]`).focus();
});

// Which programs answer

async function meetModels() {
  const models = await showModels(part("models"), part("models-list"));
  part("give-key").hidden = models !== null;
  if (models === null) return;
  const named = (task) => models.filter((model) => model.task === task).map((model) => model.name);
  document.body.dataset.photos = String(named("detect").length > 0);
  document.querySelector(".start").hidden = named("detect").length === 0;
  offerText(
    {
      section: part("writer"), form: part("writer-form"), model: part("writer-model"), prompt: part("prompt"), write: part("write"),
      halt: part("writer-stop"), written: part("written"), note: part("writer-note"),
    },
    named("language"),
  );
}

part("give-key").addEventListener("click", async () => {
  if ((await ask("/models")).ok) await meetModels();
});

try {
  const health = await (await fetch("/health")).json();
  part("health").dataset.ready = String(health.ready);
  part("health-text").textContent = `${health.program}, ${health.precision}`;
  await meetModels();
} catch {
  part("health").dataset.ready = "false";
  part("health-text").textContent = "No connection";
}
