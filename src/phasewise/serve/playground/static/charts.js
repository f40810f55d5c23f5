// The engine as it is: rows of every worker over the last seconds, and the latest requests. Drawn when something is new.

import { phases } from "/playground/lives.js";

const SPAN = 20; // seconds shown
const ROWS = 14; // requests shown
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

export class Charts {
  #samples = new Map(); // by worker: [at, prefill, decode], oldest first
  #behind = null; // the page's clock less the server's
  #asked = false;
  #last = 0;

  constructor(lanes, requests, lives) {
    this.lanes = lanes;
    this.requests = requests;
    this.lives = lives;
    for (const media of [dark, calm]) media.addEventListener("change", () => this.ask());
    new ResizeObserver(() => this.ask()).observe(lanes);
  }

  clear() {
    this.#samples.clear();
    this.#behind = null;
  }

  /** A step event. */
  hear({ at, lanes }) {
    const late = performance.now() / 1000 - at;
    this.#behind = this.#behind === null ? late : Math.min(this.#behind, late);
    for (const { worker, prefill, decode } of lanes) {
      const samples = this.#samples.get(worker) ?? [];
      this.#samples.set(worker, samples);
      samples.push([at, prefill, decode]);
      while (samples.length && samples[0][0] < at - 2 * SPAN) samples.shift();
    }
    this.ask();
  }

  /** Draw soon, ten times a second at most; who wants little motion gets a picture per second. */
  ask() {
    if (this.#asked) return;
    this.#asked = true;
    const wait = Math.max(0, (calm.matches ? 1000 : 100) - (performance.now() - this.#last));
    setTimeout(() => requestAnimationFrame(() => this.#draw()), wait);
  }

  get #now() {
    return performance.now() / 1000 - (this.#behind ?? 0);
  }

  #draw() {
    this.#asked = false;
    this.#last = performance.now();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const now = this.#now;
    const moving = this.#drawLanes(now, colour);
    this.#drawRequests(now, colour);
    if (moving) this.ask(); // until the last step has left the picture
  }

  #drawLanes(now, colour) {
    const workers = [...this.#samples];
    const [pen, width, height] = canvas(this.lanes, 36 + 56 * Math.max(1, workers.length));
    const tall = (height - 14) / Math.max(1, workers.length);
    const cells = Math.floor(width / 4);
    let moving = false;
    const words = [];
    pen.font = "11px system-ui, sans-serif";
    workers.forEach(([worker, samples], row) => {
      const bins = Array.from({ length: cells }, () => [0, 0]);
      const sums = [0, 0];
      for (const [at, prefill, decode] of samples) {
        const cell = Math.floor(((at - now + SPAN) / SPAN) * cells);
        if (cell < 0) continue;
        moving = true;
        const bin = bins[Math.min(cell, cells - 1)];
        bin[0] += prefill;
        bin[1] += decode;
        sums[0] += prefill;
        sums[1] += decode;
      }
      const most = Math.max(1, ...bins.map(([p, d]) => p + d));
      const floor = row * tall + tall;
      bins.forEach(([prefill, decode], cell) => {
        const scale = (tall - 18) / most;
        pen.fillStyle = colour("decode");
        pen.fillRect(cell * 4, floor - decode * scale, 3, decode * scale);
        pen.fillStyle = colour("prefill");
        pen.fillRect(cell * 4, floor - (decode + prefill) * scale, 3, prefill * scale);
      });
      pen.fillStyle = colour("soft");
      pen.fillText(`${worker}: ${sums[0]} prefill, ${sums[1]} decode rows`, 0, row * tall + 12);
      pen.fillRect(0, floor, width, 1);
      words.push(`${worker}: ${sums[0]} rows of prefill and ${sums[1]} of decode`);
    });
    pen.fillStyle = colour("soft");
    pen.fillText(workers.length ? `last ${SPAN} s` : "no steps yet", 0, height - 1);
    if (!moving || !calm.matches) label(this.lanes, words.length ? `Last ${SPAN} seconds. ${words.join(". ")}` : "No steps yet", !moving);
    return moving;
  }

  #drawRequests(now, colour) {
    const lives = this.lives.latest(ROWS);
    const [pen, width] = canvas(this.requests, 4 + Math.max(3, lives.length) * 12);
    const from = Math.min(now - 2, ...lives.map((life) => life.queued ?? now));
    const to = Math.max(from + 2, ...lives.map((life) => life.left ?? now));
    pen.font = "10px system-ui, sans-serif";
    lives.forEach((life, row) => {
      for (const [phase, a, b] of phases(life, now)) {
        pen.fillStyle = colour(phase);
        pen.fillRect(28 + ((a - from) / (to - from)) * (width - 28), row * 12 + 2, Math.max(1, ((b - a) / (to - from)) * (width - 28)), 9);
      }
      pen.fillStyle = colour("soft");
      pen.fillText(`#${life.number}`, 0, row * 12 + 10);
    });
    const under = lives.filter((life) => life.left === undefined).length;
    label(this.requests, lives.length ? `The latest ${lives.length} requests, ${under} of them under way` : "No requests yet", true);
  }
}

/** A pen for a canvas as sharp as the screen, and its size in CSS pixels. */
function canvas(element, height) {
  const sharp = devicePixelRatio || 1;
  const width = element.clientWidth;
  if (element.height !== Math.round(height * sharp) || element.width !== Math.round(width * sharp)) {
    element.style.height = `${height}px`;
    element.width = Math.round(width * sharp);
    element.height = Math.round(height * sharp);
  }
  const pen = element.getContext("2d");
  pen.setTransform(sharp, 0, 0, sharp, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width, height];
}

function label(element, words, now) {
  if (now && element.getAttribute("aria-label") !== words) element.setAttribute("aria-label", words);
}
