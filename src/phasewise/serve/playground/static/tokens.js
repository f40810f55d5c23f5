// An answer's tokens: each a span coloured by its origin. They are added a few at a time, however fast they come: the
// layout of a long answer costs more than its tokens.

import { later } from "/playground/frames.js";

const PAUSE = 50; // milliseconds
const WORDS = {
  prefill: "prefill: drawn after the prompt's last row",
  decode: "decode: drawn in a step",
  accepted: "drafted, and accepted",
  forced: "forced: nothing else was left to say",
  denoised: "denoised: final in a step of diffusion",
};

export class Tokens {
  counts = {};
  #waiting = [];
  #drawing = false;
  #here = null;

  /** `box` holds the spans, `about` says what is known of the one that is pointed at. */
  constructor(box, about) {
    this.box = box;
    this.about = about;
    box.addEventListener("mouseover", (event) => this.#show(event.target.closest(".t")));
    box.addEventListener("keydown", (event) => this.#step(event));
  }

  get total() {
    return Object.values(this.counts).reduce((sum, n) => sum + n, 0);
  }

  add(entries) {
    for (const entry of entries) this.counts[entry.origin] = (this.counts[entry.origin] ?? 0) + 1;
    this.#waiting.push(...entries);
    if (!this.#drawing) {
      this.#drawing = true;
      later(() => this.#draw(), PAUSE);
    }
  }

  #draw() {
    this.#drawing = false;
    const fragment = document.createDocumentFragment();
    for (const { token, origin, probability } of this.#waiting.splice(0)) {
      if (!token) continue;
      const span = document.createElement("span");
      span.className = `t ${origin}`;
      span.textContent = token;
      span.dataset.probability = probability;
      fragment.append(span);
    }
    this.box.append(fragment);
  }

  #step(event) {
    const moves = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
    const ends = { Home: "firstElementChild", End: "lastElementChild" };
    let next = null;
    if (event.key in moves) next = this.#here ? this.#here[moves[event.key]] : this.box.firstElementChild;
    else if (event.key in ends) next = this.box[ends[event.key]];
    else return;
    event.preventDefault();
    if (next) this.#show(next);
  }

  #show(span) {
    if (!span) return;
    this.#here?.classList.remove("here");
    this.#here = span;
    span.classList.add("here");
    const origin = span.className.split(" ")[1];
    const percent = (100 * Number(span.dataset.probability)).toPrecision(3);
    this.about.textContent = `${JSON.stringify(span.textContent)} · ${WORDS[origin] ?? origin} · probability ${percent} %`;
  }
}
