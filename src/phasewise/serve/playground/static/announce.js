// What a screen reader is told of an answer that streams: whole sentences, not every token.

export function announcer(region) {
  let held = "";
  const say = (words) => {
    const line = document.createElement("p");
    line.textContent = words;
    region.append(line);
    while (region.childElementCount > 20) region.firstElementChild.remove();
  };
  return {
    say,
    push(text) {
      held += text;
      const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => held.lastIndexOf(mark)));
      if (end < 0) return;
      say(held.slice(0, end + 1));
      held = held.slice(end + 1);
    },
    flush() {
      if (held.trim()) say(held);
      held = "";
    },
  };
}
