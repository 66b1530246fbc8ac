// Charts as SVG: a rate over time, and bars of a histogram with buckets that double.

import { compact, count, h, percent, s } from "/page/dom.js";

const HEIGHT = 190;
const PAD = { left: 46, right: 10, top: 12, bottom: 22 };

/** Return round values from 0 to at least `most`. */
function ticks(most) {
  if (!(most > 0)) return [0, 1];
  const rough = most / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((f) => f >= rough);
  const out = [];
  for (let value = 0; value < most + step; value += step) out.push(value);
  return out;
}

/**
 * Draw a rate.
 * points: [{t, value}], seconds before now as t <= 0; span: seconds that the axis shows;
 * width: in pixels, so that text keeps its size.
 */
export function lineChart(points, { span, label, width }) {
  const scale = ticks(Math.max(0, ...points.map((p) => p.value)));
  const most = scale[scale.length - 1];
  const x = (t) => PAD.left + (1 + t / span) * (width - PAD.left - PAD.right);
  const y = (v) => HEIGHT - PAD.bottom - (v / most) * (HEIGHT - PAD.top - PAD.bottom);
  const line = points.map((p, i) => `${i ? "L" : "M"}${x(p.t).toFixed(1)},${y(p.value).toFixed(1)}`).join("");
  const floor = y(0).toFixed(1);
  const area = points.length > 1
    ? `${line}L${x(points.at(-1).t).toFixed(1)},${floor}L${x(points[0].t).toFixed(1)},${floor}Z` : "";
  const parts = width < 420 ? [1, 0.5, 0] : span === 300 ? [1, 0.8, 0.6, 0.4, 0.2, 0] : [1, 0.75, 0.5, 0.25, 0];
  const times = parts.map((part) => Math.round(part * span));
  return s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label, class: "line" },
    scale.map((value) => s("g", { class: "grid" },
      s("line", { x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }),
      s("text", { x: PAD.left - 8, y: y(value) + 4, "text-anchor": "end" }, compact(value)))),
    times.map((time) => s("text", {
      x: x(-time), y: HEIGHT - 4, class: "time",
      "text-anchor": time === 0 ? "end" : time === span ? "start" : "middle",
    }, time === 0 ? "now" : time % 60 ? `−${time} s` : `−${time / 60} min`)),
    s("path", { d: area, class: "area" }),
    s("path", { d: line, class: "stroke" }),
    points.length ? s("circle", { cx: x(points.at(-1).t), cy: y(points.at(-1).value), r: 3.5, class: "dot" }) : null);
}

/** Return the name of a bucket: 0, 1, 2–3, 4–7, … */
export function bucketName(number) {
  if (number < 2) return String(number);
  const low = 2 ** (number - 1);
  return `${count(low)}–${count(2 * low - 1)}`;
}

/** Draw counts by buckets that double; `least` buckets are shown at any rate. */
export function histogram(counts, { label, least = 6 }) {
  const shown = Math.max(least, counts.findLastIndex((n) => n > 0) + 1);
  const kept = counts.slice(0, shown);
  const total = kept.reduce((a, b) => a + b, 0);
  const most = Math.max(1, ...kept);
  const said = kept.map((n, i) => (n ? `${bucketName(i)}: ${count(n)}` : null)).filter(Boolean).join(", ");
  return h("div", { class: "histogram", role: "img", "aria-label": `${label}. ${said || "none"}` },
    kept.map((n, i) => h("div", { class: "bin", title: `${bucketName(i)}: ${count(n)} (${percent(total ? n / total : 0)})` },
      h("span", { class: "share" }, n / total >= 0.005 ? `${Math.round((100 * n) / total)}%` : ""),
      h("span", { class: "column" }, h("span", { class: n ? "fill" : "fill none", "--part": String(n / most) })),
      h("span", { class: "bucket" }, i < 2 ? String(i) : compact(2 ** (i - 1)).replace(" ", "")))));
}

/** Return about the value below which a share of the counted lies: the middle of its bucket. */
export function quantile(counts, share) {
  const total = counts.reduce((a, b) => a + b, 0);
  let seen = 0;
  for (let i = 0; i < counts.length; i += 1) {
    seen += counts[i];
    if (total && seen >= share * total) return bucketName(i);
  }
  return "–";
}
