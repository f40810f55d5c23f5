// What is on the page, put together.

import { announcer } from "/playground/announce.js";
import { chats, key, models } from "/playground/api.js";
import { Charts } from "/playground/charts.js";
import { Feed } from "/playground/feed.js";
import { Lives } from "/playground/lives.js";
import { Talk } from "/playground/talk.js";

const $ = (id) => document.getElementById(id);
const lives = new Lives();
const charts = new Charts($("lanes"), $("lives"), lives);
const feed = new Feed();
const talk = new Talk($("turns"), lives, announcer($("said")));
let limit = 0;

// ---- the engine
const bytes = (n) => (n < 1 << 20 ? `${(n / 1024).toFixed(0)} KiB` : `${(n / (1 << 20)).toFixed(1)} MiB`);
feed.addEventListener("link", ({ detail }) => {
  $("link").dataset.state = detail.state;
  $("link").textContent = detail.words;
});
feed.addEventListener("hello", ({ detail }) => {
  limit = detail.kv_limit_bytes;
  lives.clear();
  charts.clear();
  $("scope").textContent = detail.scope === "own" ? "This key sees its own requests; steps are for keys that may read metrics." : "";
});
feed.addEventListener("step", ({ detail }) => {
  $("running").textContent = detail.running;
  $("waiting").textContent = detail.waiting;
  $("kv").textContent = `${bytes(detail.kv_bytes)} of ${bytes(limit)}, prefix cache ${bytes(detail.prefix_bytes)}`;
  $("kv-meter").value = limit ? detail.kv_bytes / limit : 0;
  charts.hear(detail);
});
feed.addEventListener("request", ({ detail }) => {
  lives.hear(detail);
  charts.ask();
});
feed.addEventListener("dropped", ({ detail }) => {
  $("scope").textContent = `${detail.count} events were lost: this page was too slow.`;
});

// ---- who asks
async function enter() {
  try {
    const names = await models();
    $("access").hidden = true;
    $("model").textContent = names[0];
    $("first").replaceChildren(...names.map((name) => new Option(name, name)));
    $("second").replaceChildren(new Option("nothing", ""), ...names.map((name) => new Option(name, name)));
    if (!(await chats())) document.querySelector("[name=mode][value=completion]").checked = true;
    feed.open();
  } catch (error) {
    $("link").textContent = error.message;
    if (error.status === 401) {
      $("access").hidden = false;
      $("key").focus();
    } else {
      setTimeout(enter, 2000);
    }
  }
}
$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  enter();
});

// ---- what is asked
function number(id) {
  const field = $(id);
  return field.value === "" ? undefined : Number(field.value);
}
async function send() {
  const prompt = $("prompt").value;
  if (!prompt.trim() || talk.busy) return;
  const chosen = [$("first").value, $("second").value].filter(Boolean);
  $("prompt").value = "";
  $("empty").hidden = true;
  $("stop").disabled = false;
  if (document.activeElement === $("send")) $("stop").focus(); // what is disabled has no focus, nor a way back
  $("send").disabled = true;
  const mode = document.querySelector("[name=mode]:checked").value;
  await talk.send(prompt, mode, chosen, { temperature: number("temperature"), max_tokens: number("tokens") });
  $("send").disabled = false;
  if (document.activeElement === $("stop")) $("prompt").focus();
  $("stop").disabled = true;
}
$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("compose").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && talk.stop());
$("stop").addEventListener("click", () => talk.stop());
$("clear").addEventListener("click", () => {
  talk.clear();
  $("empty").hidden = false;
  $("prompt").focus();
});
enter();
