// Lives of requests, put together from the event stream: by number, the times of their stages (seconds of the server).

const KEPT = 200;

export class Lives extends EventTarget {
  #all = new Map();

  clear() {
    this.#all.clear();
  }

  hear({ number, what, at, worker, ...more }) {
    const life = this.#all.get(number) ?? { number, breaks: [], by: {} };
    this.#all.set(number, life);
    if (what === "preempted") life.breaks.push([at, null]);
    else if (what === "resumed" && life.breaks.length) life.breaks.at(-1)[1] = at;
    else life[what] = at;
    life.by[what] = worker;
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

/** What a life is made of: [phase, from, to, whose doing]; what is under way ends `now`. */
export function phases(life, now) {
  const end = life.left ?? now;
  const found = [];
  const add = (phase, from, to, by) => from !== undefined && to > from && found.push([phase, from, to, by]);
  add("queue", life.queued, life.admitted ?? end);
  add("prefill", life.admitted, life.first_token ?? end, life.by.admitted);
  if (life.first_token === undefined) return found;
  if (life.sent === undefined) add("decode", life.first_token, end, life.by.first_token);
  else {
    add("handoff", life.sent, life.owned ?? end, life.by.sent);
    add("decode", life.owned, end, life.by.owned);
  }
  for (const [from, to] of life.breaks) add("queue", from, to ?? end);
  return found;
}
