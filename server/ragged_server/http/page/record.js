// One sample: its values, its tokens in a row, and all that the chosen token has.

import { get } from "/page/api.js";
import { count, h, percent, plural, reveal } from "/page/dom.js";

const WINDOW = 256;
const NAMES = { candidate: "Candidate set", topk: "Sampler’s top-K", teacher_topk: "Teacher’s top-K" };
const FLAGS = ["support missing", "support overflowed", "log-prob missing", "head missing", "teacher missing"];
// Bars under a token of the row.
const MINI = 6;
const SHOWN_CHIPS = 48;
const LONG_TEXT = 90;

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");

/** Return a number in few digits, as people write it. */
function digits(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return count(value);
  return Math.abs(value) < 1e-3 && value ? value.toExponential(2) : Number(value.toPrecision(5)).toString();
}

export class RecordView {
  constructor(root, fail) {
    this.root = root;
    this.fail = fail;
    this.asked = 0;
    this.sequence = null;
    root.addEventListener("keydown", (event) => this.onKey(event));
  }

  say(text) {
    this.sequence = null;
    this.root.replaceChildren(h("p", { class: "empty" }, text));
  }

  empty() {
    const url = location.origin;
    this.sequence = null;
    this.root.replaceChildren(h("div", { class: "empty" },
      h("p", {}, h("strong", {}, "No samples yet.")),
      h("p", {}, "Push some, and they appear here as soon as they are on disk:"),
      h("pre", { tabindex: "0" }, `ragged push ${url} DATASET\nragged convert --from vllm rollouts.jsonl - | ragged push ${url} -`)));
  }

  /** Show a sample, from a token on; without one, from where tokens are scored. */
  async show(sequence, start = null) {
    if (sequence === this.sequence && (start === null || start === this.data.start)) return;
    const asked = (this.asked += 1);
    try {
      const from = start === null ? "" : `start=${start}&`;
      const data = await get(`/v1/browse/${sequence}?${from}count=${WINDOW}`);
      if (asked !== this.asked) return;
      Object.assign(this, { data, sequence });
      this.fail(null);
    } catch (error) {
      if (asked === this.asked) this.fail(error);
      return;
    }
    this.draw();
  }

  draw() {
    const { data } = this;
    const text = (value) => (value === null ? "–" : typeof value === "number" ? digits(value) : String(value));
    const scalars = Object.entries(data.record).filter(([name, value]) => name !== "sample_id" && value !== null);
    const isLong = ([, value]) => text(value).length > LONG_TEXT;
    const { token, target, ...others } = data.lengths;
    const lengths = [plural(token, "token"), `${count(target)} scored`, ...Object.entries(others).map(([axis, n]) => `${axis} ${count(n)}`)].join(" · ");
    // The place of each scored token among the targets of the window.
    this.targetOf = new Map();
    data.scored.forEach((is, i) => { if (is) this.targetOf.set(i, this.targetOf.size); });
    this.tokens = h("div", {
      class: "tokens", role: "listbox", "aria-orientation": "horizontal", tabindex: "0",
      "aria-label": "Tokens; arrow keys go from one scored token to the next",
      onclick: (event) => {
        const cell = event.target.closest("[data-place]");
        if (cell) this.choose(Number(cell.dataset.place));
      },
    }, data.ids.map((id, i) => this.cell(id, i)));
    this.panel = h("div", { class: "panel", "aria-live": "polite" });
    this.root.replaceChildren(
      h("header", {},
        h("h3", {}, data.record.sample_id),
        h("p", { class: "muted" }, `sequence ${count(data.sequence)} · ${lengths}`),
        h("dl", { class: "facts" }, scalars.filter((entry) => !isLong(entry)).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, text(value))))),
        scalars.filter(isLong).map(([name, value]) => h("details", {}, h("summary", {}, name), h("pre", { tabindex: "0" }, pretty(String(value)))))),
      ...[this.pager()].filter(Boolean), this.tokens, this.legend(), this.panel);
    const first = this.targetOf.keys().next();
    if (!first.done) this.choose(first.value, false);
    else this.panel.replaceChildren(h("p", { class: "empty" }, data.ids.length ? "No token of this window is scored." : "This sample has no tokens."));
  }

  pager() {
    const { start, ids, lengths } = this.data;
    if (lengths.token <= WINDOW) return null;
    const end = start + ids.length;
    const go = (to) => () => this.show(this.sequence, Math.max(0, to)).then(() => this.tokens.focus({ preventScroll: true }));
    return h("div", { class: "window" },
      h("button", { type: "button", disabled: start === 0, onclick: go(start - WINDOW) }, "Earlier"),
      h("span", { class: "muted" }, `tokens ${count(start)} – ${count(end - 1)} of ${count(lengths.token)}`),
      h("button", { type: "button", disabled: end >= lengths.token, onclick: go(end) }, "Later"));
  }

  legend() {
    const parts = ["plain: context", "framed: scored"];
    if (this.data.axes.candidate) parts.push("number: size of the candidate set (∞: full vocabulary)");
    if (this.distribution()) parts.push("bars: likeliest ids, the sampled one in colour");
    return h("p", { class: "muted small legend" }, parts.join(" · "));
  }

  /** Return the first of heads and sets that has log-probs: [axis, ids, log-probs]. */
  distribution() {
    for (const axis of ["topk", "candidate", "teacher_topk"]) {
      const found = parts(this.data.axes[axis]);
      if (found?.ids && found.logProbs) return found;
    }
    return null;
  }

  text(id) {
    return this.data.texts[id];
  }

  cell(id, place) {
    const target = this.targetOf.get(place);
    const text = this.text(id);
    const shown = h("span", { class: text === undefined ? "text id" : "text" }, text === undefined ? String(id) : visible(text));
    const attributes = {
      class: target === undefined ? "token" : "token scored", role: "option", id: `token-${place}`, "data-place": place,
      "aria-selected": "false", title: `token ${this.data.start + place}, id ${id}`,
    };
    if (target === undefined) return h("span", attributes, shown);
    const size = this.data.axes.candidate?.counts[target];
    const mini = h("span", { class: "mini", "aria-hidden": "true" });
    const found = this.distribution();
    if (found) {
      const ranked = rank(found.ids[target], found.logProbs[target]).slice(0, MINI);
      mini.append(...ranked.map(([other, p]) => h("span", { class: other === id ? "sampled" : "", "--part": String(Math.max(0.06, p)) })));
    }
    return h("span", attributes, shown, mini,
      size === undefined ? null : h("span", { class: "size", "aria-label": size ? `set of ${size}` : "full vocabulary" }, size ? count(size) : "∞"));
  }

  /** Choose a token and show what it has. */
  choose(place, isFocused = true) {
    this.tokens.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
    const cell = this.tokens.children[place];
    if (!cell) return;
    cell.setAttribute("aria-selected", "true");
    this.tokens.setAttribute("aria-activedescendant", cell.id);
    this.place = place;
    if (isFocused) reveal(this.tokens, cell);
    this.panel.replaceChildren(...this.details(place));
  }

  details(place) {
    const { data } = this;
    const id = data.ids[place];
    const target = this.targetOf.get(place);
    const text = this.text(id);
    const title = h("h4", {}, text === undefined ? `id ${id}` : h("span", { class: "quoted" }, visible(text)),
      h("span", { class: "muted" }, ` token ${count(data.start + place)}${text === undefined ? "" : `, id ${id}`}`));
    if (target === undefined) return [title, h("p", { class: "empty" }, "Context: this token is not scored.")];
    const facts = [["target", count(data.first_target + target)]];
    for (const [name, values] of Object.entries(data.targets)) {
      if (name === "target_flags") facts.push([name, flags(values[target])]);
      else if (name.endsWith("log_probs") && values[target] !== null) facts.push([name, `${digits(values[target])} (${percent(Math.exp(values[target]))})`]);
      else facts.push([name, digits(values[target])]);
    }
    const axes = Object.entries(data.axes).sort(([a], [b]) => (a === "candidate") - (b === "candidate"));
    return [
      title,
      h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      h("div", { class: "axes" }, axes.map(([axis, values]) => this.axis(axis, values, target, id))),
    ];
  }

  axis(name, values, target, sampled) {
    const size = values.counts[target];
    const { ids, logProbs } = parts(values) ?? {};
    const label = NAMES[name] ?? name;
    const head = (note) => h("div", { class: "figcaption" }, h("h5", {}, label), h("span", { class: "muted" }, note));
    if (!size) {
      const full = name === "candidate" && !((data) => data && data[target] & 3)(this.data.targets.target_flags);
      return h("section", {}, head(full ? "the full vocabulary" : "none"));
    }
    const cut = ids ? size - ids[target].length : 0;
    const more = cut > 0 ? h("p", { class: "muted small" }, `and ${count(cut)} more`) : null;
    if (ids && logProbs) {
      const ranked = rank(ids[target], logProbs[target]);
      const mass = ranked.reduce((sum, [, p]) => sum + p, 0);
      return h("section", {}, head(`${plural(size, "id")}, mass ${percent(Math.min(1, mass))}${cut > 0 ? " shown" : ""}`),
        h("ol", { class: "bars" }, ranked.map(([id, p]) => this.bar(id, p, id === sampled))), more);
    }
    if (ids) {
      const listed = ids[target].slice(0, SHOWN_CHIPS);
      if (ids[target].includes(sampled) && !listed.includes(sampled)) listed.push(sampled);
      const rest = size - listed.length;
      return h("section", {}, head(plural(size, "id")),
        h("ul", { class: "chips" }, listed.map((id) => h("li", { class: id === sampled ? "sampled" : null, title: `id ${id}` }, this.label(id)))),
        rest > 0 ? h("p", { class: "muted small" }, `and ${count(rest)} more`) : null);
    }
    const lists = Object.entries(values.columns).map(([column, all]) => h("li", {}, `${column}: ${all[target].map(digits).join(", ")}`));
    return h("section", {}, head(plural(size, "element")), h("ul", {}, lists), more);
  }

  bar(id, p, isSampled) {
    return h("li", { class: isSampled ? "sampled" : null, title: `id ${id}` },
      h("span", { class: "what" }, this.label(id), isSampled ? h("span", { class: "hidden" }, " (sampled)") : null),
      h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: "fill", "--part": String(Math.min(1, p)) })),
      h("span", { class: "number" }, percent(p)));
  }

  label(id) {
    const text = this.text(id);
    return text === undefined ? h("span", { class: "id" }, String(id)) : h("span", { class: "quoted" }, visible(text));
  }

  onKey(event) {
    if (event.target !== this.tokens) return;
    const places = [...this.targetOf.keys()];
    const at = places.findLastIndex((place) => place <= this.place);
    const next = {
      ArrowRight: places[at + 1], ArrowLeft: places[places[at] === this.place ? at - 1 : at],
      Home: places[0], End: places.at(-1),
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.choose(next);
  }
}

/** Return the ids and log-probs among the columns of an axis. */
function parts(axis) {
  if (!axis) return null;
  const find = (end) => Object.entries(axis.columns).find(([name]) => name.endsWith(end))?.[1];
  return { ids: find("_ids"), logProbs: find("_log_probs") };
}

/** Return [id, probability], likeliest first. */
function rank(ids, logProbs) {
  return ids.map((id, i) => [id, logProbs[i] === null ? 0 : Math.exp(logProbs[i])]).sort((a, b) => b[1] - a[1]);
}

function flags(bits) {
  return FLAGS.filter((_, i) => bits & (1 << i)).join(", ") || "none";
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
