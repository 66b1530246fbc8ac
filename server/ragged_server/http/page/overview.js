// Figures of the whole server, drawn anew with each status.

import { histogram, lineChart, quantile } from "/page/charts.js";
import { age, bytes, compact, count, h, plural } from "/page/dom.js";

const SPAN_S = 300;
const SPANS_S = [60, 120, SPAN_S];
// Rates are taken over so many seconds, so that they do not flicker.
const WINDOW_S = 5;

const byId = (id) => document.getElementById(id);

/** What the server stored over the last minutes, as this page saw it. */
export class History {
  constructor() {
    this.seen = []; // {at, stored, tokens, waiting}, seconds
  }

  add(at, store) {
    const last = this.seen.at(-1);
    // A restarted server counts from 0 again.
    if (last && store.stored < last.stored) this.seen = [];
    this.seen.push({ at, stored: store.stored, tokens: store.tokens, queue: store.queue_bytes });
    while (this.seen[0].at < at - SPAN_S - WINDOW_S) this.seen.shift();
  }

  /** Return the shortest span of an axis that holds what was seen. */
  get span() {
    const seen = this.seen.length ? this.seen.at(-1).at - this.seen[0].at : 0;
    return SPANS_S.find((span) => span >= seen) ?? SPAN_S;
  }

  /** Return increments per second of a counter, ending at each moment seen. */
  rates(name) {
    const now = this.seen.at(-1)?.at;
    const out = [];
    let begin = 0;
    for (let end = 1; end < this.seen.length; end += 1) {
      while (this.seen[end].at - this.seen[begin + 1].at >= WINDOW_S) begin += 1;
      const [from, to] = [this.seen[begin], this.seen[end]];
      out.push({ t: to.at - now, value: (to[name] - from[name]) / (to.at - from.at) });
    }
    return out.filter((point) => point.t >= -SPAN_S);
  }

  values(name) {
    const now = this.seen.at(-1)?.at;
    return this.seen.map((point) => ({ t: point.at - now, value: point[name] })).filter((p) => p.t >= -SPAN_S);
  }
}

/** Return the width within a figure. */
const widthOf = (id) => Math.max(240, byId(id).clientWidth - 32);

function tile(name, value, note, extra = {}) {
  return h("div", { class: "tile", ...extra }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("span", { class: "muted" }, note)));
}

function caption(title, note) {
  return h("figcaption", {}, h("h3", {}, title), h("span", { class: "muted" }, note));
}

export function drawOverview(status, history) {
  const { server, store } = status;
  const records = history.rates("stored").at(-1)?.value ?? 0;
  const tokens = history.rates("tokens").at(-1)?.value ?? 0;
  const now = Date.now() / 1000;
  byId("tiles").replaceChildren(
    tile("Records", count(store.records), store.records ? `sequence ${count(store.oldest_sequence)} – ${count(store.next_sequence - 1)}` : "none yet"),
    tile("Ingest", `${compact(records)}/s`, `${compact(tokens)} tokens/s`),
    tile("On disk", bytes(store.bytes), `${plural(store.shards, "shard")}, ${plural(store.segments, "segment")}`),
    tile("Waiting for disk", bytes(store.queue_bytes), `${plural(store.queue_requests, "request")}; ${bytes(server.in_flight_bytes)} in flight`),
    tile("Policy version", store.policy_version === null ? "–" : count(store.policy_version), store.policy_version === null ? "none seen" : `median ${quantile(store.staleness, 0.5)} behind`),
    tile("Last commit", store.last_commit_s === null ? "–" : age(Math.max(0, now - store.last_commit_s)), store.last_commit_s === null ? "none yet" : `of ${count(store.commits)}`),
    tile("Duplicates", count(store.duplicates), `${plural(store.conflicts, "conflict")} refused`),
    tile("Readers", count(server.waiting + server.reading), `${count(server.waiting)} waiting for samples`),
  );

  const rates = history.rates("stored");
  const peak = Math.max(0, ...rates.map((p) => p.value));
  byId("rate").replaceChildren(
    caption("Ingest rate", `records per second; now ${compact(records)}, peak ${compact(peak)}`),
    lineChart(rates, { span: history.span, width: widthOf("rate"), label: `Records per second over time: now ${compact(records)}, peak ${compact(peak)}` }));

  const queue = history.values("queue");
  const deepest = Math.max(0, ...queue.map((p) => p.value));
  byId("queue").replaceChildren(
    caption("Queue", `bytes that wait for the disk; peak ${bytes(deepest)}`),
    lineChart(queue, { span: history.span, width: widthOf("queue"), label: `Bytes in the queue over time: now ${bytes(store.queue_bytes)}, peak ${bytes(deepest)}` }));

  const sets = store.set_widths.reduce((a, b) => a + b, 0);
  byId("widths").replaceChildren(
    caption("Candidate sets", sets ? `ids per scored token; ${compact(sets)} sets, median ${quantile(store.set_widths, 0.5)}, p99 ${quantile(store.set_widths, 0.99)}` : "ids per scored token"),
    sets ? histogram(store.set_widths, { label: "Candidate sets by size" })
      : h("p", { class: "empty" }, "No candidate sets since the server started."));

  const versions = store.staleness.reduce((a, b) => a + b, 0);
  byId("staleness").replaceChildren(
    caption("Staleness", versions ? `versions behind on arrival; ${compact(versions)} records` : "policy versions behind on arrival"),
    versions ? histogram(store.staleness, { label: "Records by versions behind" })
      : h("p", { class: "empty" }, "No records with a policy version since the server started."));
}

export function drawShards(data, store) {
  const sealed = data.shards.map((shard) => h("tr", {},
    h("td", { class: "name", title: shard.name }, shard.name), h("td", { class: "number" }, count(shard.rows)),
    h("td", { class: "number" }, bytes(shard.bytes)), h("td", {}, shard.age_s === null ? "–" : age(shard.age_s))));
  const note = data.total > data.shards.length ? `the last ${data.shards.length} of ${count(data.total)}` : plural(data.total, "sealed shard");
  byId("shards").replaceChildren(
    h("div", { class: "figcaption" }, h("h3", { id: "shards-title" }, "Shards"),
      h("span", { class: "muted" }, data.total ? `${note}, generation ${data.generation}` : "sealed parts of the dataset")),
    sealed.length
      ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "shards-title" }, h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Name"), h("th", { scope: "col", class: "number" }, "Records"),
          h("th", { scope: "col", class: "number" }, "Size"), h("th", { scope: "col" }, "Age"))),
        h("tbody", {}, sealed)))
      : h("p", { class: "empty" }, store.records
        ? "Nothing is sealed yet: new records are in the open segment, as durable as in a shard."
        : "Nothing is stored yet."));
}
