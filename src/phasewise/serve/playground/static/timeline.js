// One request's life as a picture with words: queue, prefill, hand-off, decode, each as long as it took.

import { phases } from "/playground/lives.js";

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 600;

function element(name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

export const seconds = (s) => (s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(2)} s`);

export function draw(svg, life) {
  const from = life.queued;
  const to = life.left ?? life.owned ?? life.first_token ?? life.admitted ?? from;
  if (from === undefined || to <= from) return;
  const parts = phases(life, to);
  const x = (at) => ((at - from) / (to - from)) * WIDTH;
  const bars = parts.map(([phase, a, b]) =>
    element("rect", { class: `fill-${phase}`, x: x(a), y: 2, width: Math.max(1.5, x(b) - x(a)), height: 16, rx: 2 }),
  );
  const where = (worker) => (worker && worker !== "engine" ? ` (${worker})` : "");
  const words = parts.map(([phase, a, b, worker]) => `${phase} ${seconds(b - a)}${where(worker)}`).join(" · ");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Life of request ${life.number}: ${words}`);
  svg.replaceChildren(...bars);
  return `request ${life.number}: ${words}${life.cached_tokens ? ` · ${life.cached_tokens} prompt tokens cached` : ""}`;
}
