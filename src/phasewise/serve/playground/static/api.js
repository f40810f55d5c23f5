// This server's endpoints. Whatever it refuses becomes an Error with its own words, and `status`.

const KEY = "phasewise.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

export async function ask(path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  const error = new Error(said.error?.message ?? `the server answered ${reply.status}`);
  error.status = reply.status;
  throw error;
}

export async function models() {
  return (await (await ask("/v1/models")).json()).data.map((model) => model.id);
}

export async function chats() {
  return Boolean((await (await ask("/tokenizer_info")).json()).chat_template);
}
