// The list of samples and the choice of one.

import { get } from "/page/api.js";
import { count, h, reveal } from "/page/dom.js";
import { RecordView } from "/page/record.js";

const COUNT = 25;
const byId = (id) => document.getElementById(id);

export class Browser {
  /** fail: called with what went wrong; null when it is over. */
  constructor(fail) {
    this.fail = fail;
    this.first = null; // sequence of the first one listed
    this.records = [];
    this.end = 0;
    this.oldest = 0;
    this.chosen = null;
    this.asked = 0; // only the last question's answer is drawn
    this.view = new RecordView(byId("record"), fail);
    const list = byId("records");
    list.addEventListener("click", (event) => {
      const row = event.target.closest("[data-sequence]");
      if (row) this.choose(Number(row.dataset.sequence));
    });
    list.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) this.step(step);
      else if (event.key === "Home" && this.records.length) this.choose(this.records.at(-1).sequence);
      else if (event.key === "End" && this.records.length) this.choose(this.records[0].sequence);
      else return;
      event.preventDefault();
    });
    byId("older").addEventListener("click", () => this.turn(1));
    byId("newer").addEventListener("click", () => this.turn(-1));
    byId("latest").addEventListener("click", () => this.latest());
    byId("jump").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = byId("jump-to").value.trim();
      if (text === "") this.latest();
      else this.goTo(Number(text));
    });
  }

  /** Tell where the log ends now. */
  update(store) {
    this.end = store.next_sequence;
    this.oldest = store.oldest_sequence;
    if (this.first === null || (!this.records.length && store.records)) this.latest();
    else this.drawBar();
  }

  async latest() {
    await this.load("");
  }

  /** Show a record, in the middle of the list where that is possible. */
  async goTo(sequence) {
    await this.load(Math.max(this.oldest, Math.min(sequence - (COUNT >> 1), this.end - COUNT)), sequence);
  }

  /** Turn a page; the newest are on top, so that the next page is older. */
  async turn(pages) {
    await this.load(Math.max(this.oldest, Math.min((this.first ?? 0) - pages * COUNT, this.end - COUNT)));
  }

  async load(first, wanted = null) {
    const asked = (this.asked += 1);
    try {
      const query = first === "" || first < 0 ? `count=${COUNT}` : `sequence=${first}&count=${COUNT}`;
      const data = await get(`/v1/browse?${query}`);
      if (asked !== this.asked) return;
      this.fail(null);
      Object.assign(this, { records: data.records, end: data.next, oldest: data.oldest });
      this.first = data.records[0]?.sequence ?? data.next;
    } catch (error) {
      if (asked === this.asked) this.fail(error);
      return;
    }
    if (wanted !== null && !this.records.some((record) => record.sequence === wanted)) {
      this.drawBar();
      this.view.say(`There is no sample ${count(wanted)}: the log holds ${count(this.oldest)} – ${count(this.end - 1)}.`);
      return;
    }
    const kept = this.records.some((record) => record.sequence === this.chosen) ? this.chosen : null;
    this.draw();
    const choice = wanted ?? kept ?? this.records.at(-1)?.sequence;
    if (choice === undefined) this.view.empty();
    else this.choose(choice);
  }

  choose(sequence) {
    this.chosen = sequence;
    for (const row of byId("records").children) {
      const is = Number(row.dataset.sequence) === sequence;
      row.setAttribute("aria-selected", String(is));
      if (is) {
        byId("records").setAttribute("aria-activedescendant", row.id);
        reveal(byId("records"), row);
      }
    }
    this.view.show(sequence);
  }

  /** Choose the sample so many rows below, on the next page if need be. */
  async step(rows) {
    const wanted = (this.chosen ?? this.end) - rows;
    if (wanted < this.oldest || wanted >= this.end) return;
    if (this.records.some((record) => record.sequence === wanted)) this.choose(wanted);
    else await this.goTo(wanted);
  }

  draw() {
    const rows = this.records.map((record) => this.row(record)).reverse();
    byId("records").replaceChildren(...rows);
    byId("side").hidden = !rows.length;
    this.drawBar();
  }

  row(record) {
    const note = [
      record.policy_version === null || record.policy_version === undefined ? null : `v${record.policy_version}`,
      record.reward === null || record.reward === undefined ? null : `reward ${Number(record.reward.toPrecision(3))}`,
      record.finish_reason,
    ].filter(Boolean).join(" · ");
    return h("li", {
      role: "option", id: `record-${record.sequence}`, "data-sequence": record.sequence, "aria-selected": "false",
    },
    h("span", { class: "name" }, record.sample_id), h("span", { class: "place" }, count(record.sequence)),
    h("span", { class: "muted" }, `${count(record.tokens)} tokens, ${count(record.targets)} scored`),
    h("span", { class: "muted note" }, note));
  }

  drawBar() {
    const last = this.records.at(-1)?.sequence;
    byId("range").textContent = this.records.length
      ? `${count(this.first)} – ${count(last)} of ${count(this.end - this.oldest)}` : "";
    byId("older").disabled = !this.records.length || this.first <= this.oldest;
    byId("newer").disabled = !this.records.length || last >= this.end - 1;
    const fresh = this.records.length ? this.end - 1 - last : 0;
    byId("latest").textContent = fresh > 0 ? `Latest (${count(fresh)} newer)` : "Latest";
  }
}
