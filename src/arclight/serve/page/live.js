// Pictures of a camera or a video file, each sent once the last one has been answered: at the pace of answers, never in a queue.

const MOST_PIXELS = 1280; // of a picture's longer side
const PATIENCE_MS = 250; // between two tries where the server is full and does not say for how long

export class Live {
  // send(blob, signal) gives the server's response; onAnswer gets each answer, and onEnd "stopped", "ended" or an error's sentence, and
  // the last picture that was answered.
  constructor({ video, send, onAnswer, onEnd }) {
    Object.assign(this, { video, send, onAnswer, onEnd, run: null, asked: null, address: null, last: null });
    this.canvas = document.createElement("canvas");
  }

  get running() {
    return this.run !== null;
  }

  async watchCamera() {
    const wanted = { video: { facingMode: "environment", width: { ideal: 1280 } } };
    const asked = (this.asked = {});
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia(wanted);
    } catch (error) {
      if (asked !== this.asked) return;
      this.asked = null;
      throw error;
    }
    if (asked !== this.asked) return stream.getTracks().forEach((track) => track.stop()); // stopped while the browser asked
    this.asked = null;
    return this.watch((video) => { video.srcObject = stream; });
  }

  async watchFile(file) {
    this.asked = null;
    return this.watch((video) => { video.src = this.address = URL.createObjectURL(file); });
  }

  stop() {
    const waits = this.asked !== null;
    this.asked = null;
    if (this.run) this.end("stopped");
    else if (waits) this.onEnd("stopped", null);
  }

  async watch(open) {
    if (this.run) this.end("stopped");
    const run = (this.run = new AbortController());
    const { video } = this;
    this.last = null;
    open(video);
    try {
      await video.play();
    } catch (error) {
      return run === this.run && this.end(error.name === "AbortError" ? "stopped" : "This browser cannot play this video.");
    }
    video.onended = () => { if (run === this.run) this.end("ended"); };
    let frames = 0;
    while (run === this.run) {
      await shown();
      const picture = await this.picture();
      if (run !== this.run) break;
      if (!picture) { await pause(50); continue; } // the first has not come
      const begun = performance.now();
      try {
        const response = await this.send(picture, run.signal);
        const answer = await response.json();
        if (run !== this.run) break;
        if (response.ok) {
          this.last = picture;
          this.onAnswer(answer, { frames: ++frames, spent: performance.now() - begun });
        } else if (response.status === 429 || response.status === 503) await pause(response.headers.get("Retry-After") * 1000 || PATIENCE_MS);
        else return this.end(answer.error);
      } catch (error) {
        if (run === this.run) this.end("The server did not answer. Check that it is still running, then try again.");
      }
    }
  }

  // The picture that is shown now, JPEG.
  picture() {
    const { video, canvas } = this;
    const scale = Math.min(1, MOST_PIXELS / Math.max(video.videoWidth, video.videoHeight));
    canvas.width = Math.round(video.videoWidth * scale);
    canvas.height = Math.round(video.videoHeight * scale);
    if (!canvas.width || !canvas.height) return null;
    canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.85));
  }

  end(reason) {
    if (!this.run) return;
    const { run, video } = this;
    this.run = null;
    run.abort();
    video.onended = null;
    video.pause();
    video.srcObject?.getTracks().forEach((track) => track.stop());
    video.srcObject = null;
    video.removeAttribute("src");
    if (this.address) URL.revokeObjectURL(this.address);
    this.address = null;
    this.onEnd(reason, this.last);
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Waits while the page is hidden: nobody looks at the answers.
function shown() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", () => resolve(), { once: true });
  });
}
