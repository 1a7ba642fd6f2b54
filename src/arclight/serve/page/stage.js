// The photo with the codes drawn over it, crisp at every pixel density.

import { count } from "./words.js";

const BADGE = 14; // radius, CSS pixels

export class Stage {
  constructor({ frame, photo, moving, overlay, unseen, onSeen }) {
    Object.assign(this, { frame, photo, moving, overlay, unseen, onSeen, shown: photo, marks: [], size: null, lit: null, address: null });
    const observer = new ResizeObserver(() => this.draw());
    for (const picture of [photo, moving]) observer.observe(picture);
  }

  // Show a picture file at once, before the server has seen it; a format this browser cannot show says so.
  show(blob) {
    this.mark([], null);
    this.put(this.photo);
    if (this.address) URL.revokeObjectURL(this.address);
    this.address = URL.createObjectURL(blob);
    this.seen(true);
    this.photo.onload = () => this.seen(true);
    this.photo.onerror = () => this.seen(false);
    this.photo.src = this.address;
  }

  // Show the video, on which marks are drawn from now on.
  watch() {
    this.mark([], null);
    this.put(this.moving);
    this.seen(true);
  }

  // Show a picture of the video, with the marks that were drawn on it.
  freeze(picture) {
    const { marks, size } = this;
    this.show(picture);
    this.mark(marks, size);
  }

  put(shown) {
    this.shown = shown;
    for (const picture of [this.photo, this.moving]) picture.hidden = picture !== shown;
  }

  seen(visible) {
    this.frame.hidden = !visible;
    this.unseen.hidden = visible;
    this.onSeen(visible);
  }

  // marks: [{ corners: [[x, y], ...], tone, number }] in pixels of an image of the given size.
  mark(marks, size) {
    this.marks = marks;
    this.size = size;
    this.lit = null;
    this.overlay.setAttribute("aria-label", `${count(marks.length, "code")} marked on the photo`);
    this.draw();
  }

  light(number) {
    this.lit = number;
    this.draw();
  }

  // The number of the mark under a pointer, or null.
  at(event) {
    const place = this.place();
    if (!place) return null;
    const x = event.offsetX, y = event.offsetY;
    const hit = this.marks.find((mark) => {
      const xs = mark.corners.map((corner) => place.left + corner[0] * place.scale);
      const ys = mark.corners.map((corner) => place.top + corner[1] * place.scale);
      return x >= Math.min(...xs) && x <= Math.max(...xs) && y >= Math.min(...ys) && y <= Math.max(...ys);
    });
    return hit ? hit.number : null;
  }

  // Where the photo lies inside the overlay, CSS pixels, and CSS pixels per image pixel.
  place() {
    if (!this.size) return null;
    const photo = this.shown.getBoundingClientRect(), overlay = this.overlay.getBoundingClientRect();
    return { left: photo.left - overlay.left, top: photo.top - overlay.top, scale: photo.width / this.size.width };
  }

  draw() {
    const density = window.devicePixelRatio || 1;
    const { width, height } = this.overlay.getBoundingClientRect();
    this.overlay.width = Math.round(width * density);
    this.overlay.height = Math.round(height * density);
    const pen = this.overlay.getContext("2d");
    const place = this.place();
    if (!place) return;
    pen.scale(density, density);
    const colours = getComputedStyle(document.documentElement);
    const within = (value, size) => Math.min(Math.max(value, BADGE + 2), size - BADGE - 2);
    for (const mark of this.marks) {
      const corners = mark.corners.map(([x, y]) => [place.left + x * place.scale, place.top + y * place.scale]);
      const colour = colours.getPropertyValue(`--mark-${mark.tone}`).trim();
      drawOutline(pen, corners, colour, mark.number === this.lit);
      drawNumber(pen, within(corners[0][0], width), within(corners[0][1], height), mark.number, colour);
    }
  }
}

function drawOutline(pen, corners, colour, lit) {
  const path = new Path2D();
  corners.forEach(([x, y], index) => (index ? path.lineTo(x, y) : path.moveTo(x, y)));
  path.closePath();
  pen.lineJoin = "round";
  if (lit) {
    pen.fillStyle = colour;
    pen.globalAlpha = 0.18;
    pen.fill(path);
    pen.globalAlpha = 1;
  }
  pen.strokeStyle = "rgb(255 255 255 / .9)";
  pen.lineWidth = lit ? 8 : 6;
  pen.stroke(path);
  pen.strokeStyle = colour;
  pen.lineWidth = lit ? 4 : 3;
  pen.stroke(path);
}

function drawNumber(pen, x, y, number, colour) {
  pen.beginPath();
  pen.arc(x, y, BADGE, 0, 2 * Math.PI);
  pen.fillStyle = colour;
  pen.fill();
  pen.strokeStyle = "rgb(255 255 255 / .95)";
  pen.lineWidth = 2;
  pen.stroke();
  pen.fillStyle = "#fff";
  pen.font = "700 14px -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(String(number), x, y + 0.5);
}
