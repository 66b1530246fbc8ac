// The page: asks for the status each second, draws it, and handles key, theme and shortcuts.

import { get, key, Refused } from "/page/api.js";
import { Browser } from "/page/browser.js";
import { age } from "/page/dom.js";
import { drawOverview, drawShards, History } from "/page/overview.js";

const EVERY_MS = 1000;
const SHARDS_EVERY_S = 10;
const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

const byId = (id) => document.getElementById(id);
const history = new History();
const browser = new Browser(showProblem);
let shardsAt = -Infinity;
let since = 0; // when the server was heard last

function showState(kind, text) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text;
  state.dataset.kind = kind;
}

function showBanner(text) {
  byId("banner").hidden = !text;
  if (text && byId("banner").textContent !== text) byId("banner").textContent = text;
}

/** Show what a request of the sample browser ran into; null: nothing any more. */
function showProblem(error) {
  if (error === null) return;
  if (error instanceof Refused && (error.status === 401 || error.status === 403)) askForKey(error);
  else if (error instanceof Refused) showBanner(`The server refused: ${error.message}`);
}

function askForKey(error) {
  const dialog = byId("key-dialog");
  byId("key-button").hidden = false;
  if (dialog.open || dialog.dataset.declined) return;
  byId("key-forget").hidden = !key.get();
  byId("key-why").textContent = key.get()
    ? `The server does not take this key: ${error.message}` : "This server asks for a key with the scope “read”.";
  dialog.showModal();
}

function drawStatus(status) {
  const { server, store } = status;
  since = Date.now();
  document.title = `${server.dataset} – ragged server`;
  byId("dataset").textContent = server.dataset;
  byId("subtitle").textContent = `version ${server.version} · up ${age(Date.now() / 1000 - server.started_s)}`;
  byId("footer").textContent = store ? `log ${store.log_id} · ${location.host}` : location.host;
  document.body.classList.remove("stale");
  document.body.classList.toggle("alive", store !== null);
  if (store === null) {
    showState("wait", server.not_ready ?? "starting");
    showBanner("The server is starting: it reads its log. This page goes on by itself.");
    return;
  }
  if (store.failure) {
    showState("bad", "no writes");
    showBanner(`The server takes no samples: ${store.failure}`);
  } else {
    showState(server.not_ready ? "wait" : "good", server.not_ready ?? "ready");
    const upkeep = store.upkeep_failure;
    showBanner(upkeep ? `Samples are taken, but segments are not sealed or removed: ${upkeep}` : "");
  }
  history.add(performance.now() / 1000, store);
  drawOverview(status, history);
  browser.update(store);
  if (performance.now() / 1000 - shardsAt > SHARDS_EVERY_S) {
    shardsAt = performance.now() / 1000;
    get("/v1/shards?count=50").then((data) => drawShards(data, store), showProblem);
  }
}

async function poll() {
  try {
    drawStatus(await get("/v1/status"));
  } catch (error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      showState("wait", "key needed");
      showBanner("");
      askForKey(error);
    } else if (error instanceof Refused) {
      showState("bad", `status ${error.status}`);
      showBanner(`The server refused: ${error.message}`);
    } else {
      showState("bad", "no answer");
      document.body.classList.add("stale");
      showBanner(`The server does not answer${since ? `; the figures are ${age((Date.now() - since) / 1000)} old` : ""}. Trying again …`);
    }
  }
}

async function run() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme-button").textContent = THEMES[name];
  byId("theme-button").setAttribute("aria-label", `Theme: ${name === "auto" ? "as the system" : name}`);
  localStorage.setItem("ragged.theme", name);
}

byId("theme-button").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const now = document.documentElement.dataset.theme ?? "auto";
  setTheme(names[(names.indexOf(now) + 1) % names.length]);
});

byId("key-button").addEventListener("click", () => {
  byId("key").value = key.get();
  byId("key-forget").hidden = !key.get();
  byId("key-dialog").showModal();
});
byId("key-form").addEventListener("submit", () => {
  key.set(byId("key").value.trim());
  delete byId("key-dialog").dataset.declined;
  poll().then(() => browser.latest());
});
byId("key-forget").addEventListener("click", () => {
  key.forget();
  byId("key").value = "";
  byId("key-dialog").close();
});
byId("key-dialog").addEventListener("cancel", () => { byId("key-dialog").dataset.declined = "yes"; });
byId("help-button").addEventListener("click", () => byId("help-dialog").showModal());

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, textarea, select")) return;
  const does = {
    "/": () => byId("jump-to").select(), j: () => browser.step(1), k: () => browser.step(-1),
    "[": () => browser.turn(1), "]": () => browser.turn(-1), l: () => browser.latest(),
    "?": () => byId("help-dialog").showModal(),
  }[event.key];
  if (!does) return;
  event.preventDefault();
  does();
});

setTheme(localStorage.getItem("ragged.theme") in THEMES ? localStorage.getItem("ragged.theme") : "auto");
run();
