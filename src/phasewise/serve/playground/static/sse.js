// Server-sent events from a fetch's body: unlike EventSource it may carry a key, and it may be a POST.

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = { kind: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) event.kind = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
