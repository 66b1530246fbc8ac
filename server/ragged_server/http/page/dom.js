// Elements, numbers and times as text.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: h("p", {class: "muted"}, "text", child, …). Text is never parsed as HTML. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Make an SVG element. */
export function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

/** 1234567 → "1,234,567" */
export const count = (n) => whole.format(n);

/** 1234567 → "1.23 M" */
export function compact(n, unit = "") {
  const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, letter] of steps) {
    if (Math.abs(n) >= size) return `${short.format(n / size)} ${letter}${unit}`;
  }
  return unit ? `${short.format(n)} ${unit}` : short.format(n);
}

export const bytes = (n) => compact(n, "B");

export function percent(share) {
  if (share > 0 && share < 0.0001) return "<0.01 %";
  return `${(100 * share).toFixed(share >= 0.0995 || share === 0 ? 0 : share >= 0.001 ? 1 : 2)} %`;
}

/** Seconds → "4 s", "3 min", "2 h", "5 d" */
export function age(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Scroll a list, and nothing around it, until one of its children is seen. */
export function reveal(list, child) {
  const [outer, inner] = [list.getBoundingClientRect(), child.getBoundingClientRect()];
  if (inner.top < outer.top) list.scrollTop -= outer.top - inner.top;
  else if (inner.bottom > outer.bottom) list.scrollTop += inner.bottom - outer.bottom;
}

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
