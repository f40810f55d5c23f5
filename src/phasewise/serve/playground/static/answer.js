// One answer: asked for, streamed into a card of its own, with its counters and its life.

import { ask } from "/playground/api.js";
import { later } from "/playground/frames.js";
import { events } from "/playground/sse.js";
import { draw, seconds } from "/playground/timeline.js";
import { Tokens } from "/playground/tokens.js";

const PAUSE = 150; // milliseconds between two looks at the counters

function make(parent, tag, name = "", text = "") {
  const made = parent.appendChild(document.createElement(tag));
  made.className = name;
  made.textContent = text;
  return made;
}

export class Answer {
  text = "";
  state = "asking"; // then streaming, and done, stopped or failed

  /** `lives` are told of by the event stream, `announce` is what a screen reader is told. */
  constructor(parent, model, lives, announce) {
    this.model = model;
    this.lives = lives;
    this.announce = announce;
    this.card = make(parent, "article", "answer");
    this.card.setAttribute("aria-label", `Answer of ${model}`);
    make(this.card, "h3", "", model);
    const box = make(this.card, "div", "text");
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Tokens; arrow keys step through them");
    const about = make(this.card, "p", "about");
    about.setAttribute("aria-live", "polite");
    this.tokens = new Tokens(box, about);
    this.numbers = make(this.card, "dl");
    this.abort = new AbortController();
    this.#become("asking");
  }

  async run(path, body) {
    this.began = performance.now();
    try {
      const asked = { ...body, model: this.model, stream: true, provenance: true, stream_options: { include_usage: true } };
      const reply = await ask(path, asked, this.abort.signal);
      this.#follow(Number(reply.headers.get("x-request-numbers")));
      this.#become("streaming");
      for await (const { data } of events(reply.body)) {
        if (data !== "[DONE]") this.#hear(JSON.parse(data));
      }
      this.#become(this.finish ? "done" : "failed", "the connection broke before the answer was complete");
    } catch (error) {
      if (this.abort.signal.aborted) this.#become("stopped");
      else this.#become("failed", error.message);
    }
  }

  stop() {
    this.abort.abort();
  }

  #hear(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const text = choice.text ?? choice.delta?.content ?? "";
    this.text += text;
    this.announce(text);
    if (choice.provenance?.length) {
      this.last = performance.now();
      this.first ??= this.last;
      this.at_first ??= choice.provenance.length;
      this.tokens.add(choice.provenance);
      this.#count();
    }
  }

  #become(state, why = "") {
    this.state = this.card.dataset.state = state;
    this.card.setAttribute("aria-busy", String(state === "asking" || state === "streaming"));
    if (state === "failed") {
      const said = make(this.card, "p", "failed", why);
      said.setAttribute("role", "alert");
    }
    if (state === "stopped") make(this.card, "p", "note", "stopped");
    this.#count();
  }

  /** Counters, a few times a second. */
  #count() {
    if (this.counting) return;
    this.counting = true;
    later(() => {
      this.counting = false;
      const { counts, total } = this.tokens;
      const rate = this.last > this.first ? ((total - this.at_first) * 1000) / (this.last - this.first) : null;
      const shown = [["tokens", total]];
      if (this.first) shown.push(["first token", seconds((this.first - this.began) / 1000)]);
      if (rate) shown.push(["tokens/s", rate.toFixed(1)]);
      for (const origin of ["accepted", "forced", "denoised"]) if (counts[origin]) shown.push([origin, counts[origin]]);
      if (this.usage) shown.push(["prompt tokens", this.usage.prompt_tokens]);
      if (this.finish) shown.push(["ended by", this.finish]);
      this.numbers.replaceChildren();
      for (const [name, value] of shown) {
        const pair = make(this.numbers, "div");
        make(pair, "dt", "", name);
        make(pair, "dd", "", String(value));
      }
    }, PAUSE);
  }

  /** The life of this request, as the event stream tells it. */
  #follow(number) {
    if (!number) return;
    const svg = this.card.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
    svg.classList.add("life");
    const words = make(this.card, "p", "note");
    const show = (life) => {
      words.textContent = draw(svg, life) ?? words.textContent;
    };
    if (this.lives.get(number)) show(this.lives.get(number));
    this.lives.addEventListener(String(number), (event) => show(event.detail));
  }
}
