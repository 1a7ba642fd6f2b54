// The steps that the page shows: for each process its actions, in the order in which it did them.

const data = JSON.parse(document.getElementById("data").textContent);
const KIND = 0, STAGE = 1, MICRO_BATCH = 2, START = 3, END = 4, BYTES = 5, FIELDS = 6;
const F = data.letters.indexOf("F"), B = data.letters.indexOf("B"), I = data.letters.indexOf("I"), W = data.letters.indexOf("W");

class Step {
  constructor({ name, microseconds, lanes }) {
    Object.assign(this, { name, microseconds });
    this.lanes = lanes.map(({ place, stages, spans }) => ({ place, stages, spans: Float64Array.from(spans), count: spans.length / FIELDS }));
    this.where = new Map();
    this.mostBytes = 0;
    this.ofMicroBatch = Array.from({ length: data.microBatches }, () => []);
    this.lanes.forEach(({ spans, count }, rank) => {
      for (let i = 0; i < count; i++) {
        const at = { rank, i };
        this.mostBytes = Math.max(this.mostBytes, spans[i * FIELDS + BYTES]);
        this.where.set(this.key(spans[i * FIELDS + KIND], spans[i * FIELDS + STAGE], spans[i * FIELDS + MICRO_BATCH]), at);
        this.ofMicroBatch[spans[i * FIELDS + MICRO_BATCH]].push(at);
      }
    });
  }
  key(kind, stage, microBatch) { return (stage * data.microBatches + microBatch) * data.letters.length + kind; }
  get({ rank, i }) {
    const spans = this.lanes[rank].spans, o = i * FIELDS;
    return { rank, i, kind: spans[o + KIND], stage: spans[o + STAGE], microBatch: spans[o + MICRO_BATCH], start: spans[o + START], end: spans[o + END], bytes: spans[o + BYTES] };
  }
  find(kind, stage, microBatch) {
    const at = stage >= 0 && stage < data.stages ? this.where.get(this.key(kind, stage, microBatch)) : undefined;
    return at && this.get(at);
  }
  // What makes the input of an action.
  source({ kind, stage, microBatch }) {
    if (kind === F) return this.find(F, stage - 1, microBatch);
    if (kind === W) return this.find(I, stage, microBatch);
    if (stage === data.stages - 1) return this.find(F, stage, microBatch);
    return this.find(B, stage + 1, microBatch) || this.find(I, stage + 1, microBatch);
  }
  // Index of the last action of a process that starts at or before a time; -1 for none.
  before(rank, time) {
    const { spans, count } = this.lanes[rank];
    let low = 0, high = count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle * FIELDS + START] <= time) low = middle + 1; else high = middle;
    }
    return low - 1;
  }
  // How long a process did nothing before an action, and what of it until its input was computed, if another process made that.
  wait(span) {
    const last = span.i ? this.lanes[span.rank].spans[(span.i - 1) * FIELDS + END] : 0;
    const source = this.source(span);
    if (!source || source.rank === span.rank || span.start <= last) return null;
    const made = Math.min(Math.max(source.end, last), span.start);
    return { last, made, source, seconds: span.start - last };
  }
}
