// Lives of requests, put together from the event stream: by number, the times of their stages (seconds of the server).

const KEPT = 200;

export class Lives extends EventTarget {
  #all = new Map();

  clear() {
    this.#all.clear();
  }

  hear({ number, what, at, ...more }) {
    const life = this.#all.get(number) ?? { number, breaks: [] };
    this.#all.set(number, life);
    if (what === "preempted") life.breaks.push([at, null]);
    else if (what === "resumed" && life.breaks.length) life.breaks.at(-1)[1] = at;
    else life[what] = at;
    Object.assign(life, more);
    if (this.#all.size > KEPT) this.#all.delete(this.#all.keys().next().value);
    this.dispatchEvent(new CustomEvent(String(number), { detail: life }));
  }

  get(number) {
    return this.#all.get(number);
  }

  /** The latest `count` of them, oldest first. */
  latest(count) {
    return [...this.#all.values()].slice(-count);
  }
}

/** What a life is made of: [phase, from, to]; what is under way ends `now`. */
export function phases(life, now) {
  const end = life.left ?? now;
  const found = [];
  const add = (phase, from, to) => from !== undefined && to > from && found.push([phase, from, to]);
  add("queue", life.queued, life.admitted ?? end);
  add("prefill", life.admitted, life.first_token ?? end);
  if (life.first_token === undefined) return found;
  if (life.sent === undefined) add("decode", life.first_token, end);
  else {
    add("handoff", life.sent, life.owned ?? end);
    add("decode", life.owned, end);
  }
  for (const [from, to] of life.breaks) add("queue", from, to ?? end);
  return found;
}
