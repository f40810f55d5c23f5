// The event stream of the server, taken up again whenever it breaks. Nothing is asked for at intervals.

import { ask } from "/playground/api.js";
import { events } from "/playground/sse.js";

const FIRST = 500;
const LONGEST = 8000; // milliseconds between two tries

export class Feed extends EventTarget {
  #tries = 0;
  #abort = new AbortController();

  open() {
    this.#abort.abort();
    this.#abort = new AbortController();
    this.#run(this.#abort.signal);
  }

  async #run(signal) {
    while (!signal.aborted) {
      try {
        const reply = await ask("/events", null, signal);
        this.#tries = 0;
        this.#say("open", "live");
        for await (const { kind, data } of events(reply.body)) {
          this.dispatchEvent(new CustomEvent(kind, { detail: JSON.parse(data) }));
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) {
          this.#say("closed", "an API key is needed");
          return;
        }
      }
      if (signal.aborted) return;
      const wait = Math.min(LONGEST, FIRST * 2 ** this.#tries++);
      this.#say("closed", "connection lost, trying again");
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  #say(state, words) {
    this.dispatchEvent(new CustomEvent("link", { detail: { state, words } }));
  }
}
