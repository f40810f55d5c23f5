// The conversation: prompts and the answers beside one another; the first of them is what the next message goes on from.

import { Answer } from "/playground/answer.js";

export class Talk {
  #messages = [];
  #running = [];

  constructor(list, lives, announcer) {
    this.list = list;
    this.lives = lives;
    this.announcer = announcer;
  }

  get busy() {
    return this.#running.length > 0;
  }

  clear() {
    this.stop();
    this.#messages = [];
    this.list.replaceChildren();
  }

  stop() {
    for (const answer of this.#running) answer.stop();
  }

  /** Ask every model of `models`, at once. Resolves when all have ended. */
  async send(prompt, mode, models, settings) {
    const turn = this.list.appendChild(document.createElement("li"));
    turn.className = "turn";
    const asked = turn.appendChild(document.createElement("p"));
    asked.className = "asked";
    asked.textContent = prompt;
    const beside = turn.appendChild(document.createElement("div"));
    beside.className = "answers";
    const answers = models.map((model, i) => {
      const announce = i ? () => {} : (text) => this.announcer.push(text);
      return new Answer(beside, model, this.lives, announce);
    });
    this.#running = answers;
    this.announcer.say(`Asking ${models.join(" and ")}`);
    const messages = [...this.#messages, { role: "user", content: prompt }];
    const [path, body] = mode === "chat" ? ["/v1/chat/completions", { messages }] : ["/v1/completions", { prompt }];
    turn.scrollIntoView({ block: "nearest" });
    await Promise.all(answers.map((answer) => answer.run(path, { ...body, ...settings })));
    this.#running = [];
    const [first] = answers;
    if (mode === "chat" && first.text) this.#messages = [...messages, { role: "assistant", content: first.text }];
    this.announcer.flush();
    const ends = answers.map((answer) => `${answer.model}: ${answer.state}, ${answer.tokens.total} tokens`);
    this.announcer.say(ends.join("; "));
  }
}
