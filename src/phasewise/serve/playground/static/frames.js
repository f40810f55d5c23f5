// What can wait a little, a few things in every frame: layout costs by the answer, and twenty of them would drop frames.

const EACH = 4; // things done in one frame
const waiting = [];

function run() {
  for (const work of waiting.splice(0, EACH)) work();
  if (waiting.length) requestAnimationFrame(run);
}

/** Do it in a frame to come, not before `pause` milliseconds; first come, first served. */
export function later(work, pause) {
  setTimeout(() => waiting.push(work) === 1 && requestAnimationFrame(run), pause);
}
