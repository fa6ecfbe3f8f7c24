// Creation and update of DOM elements, and formatting of numbers.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// Returns a new element. `properties` become attributes, except that functions become event listeners.
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function row(...cells) {
  return el("tr", {}, ...cells.map((cell) => el("td", {}, cell)));
}

export function table(caption, columns, rows) {
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...columns.map((it) => el("th", { scope: "col" }, it)))),
      el("tbody", {}, ...rows),
    ),
  );
}

// Returns a bar that is filled to `value` percent.
export function meter(value, properties = {}) {
  const fill = el("i");
  fill.style.width = `${value}%`;
  return el("span", { class: "meter", ...properties }, fill);
}

// Sets the text of an element only if it changes, because screen readers would otherwise read it again.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Replaces the children of `parent` by `wanted`. Children that stay are not moved, so that the focus is kept.
export function keep(parent, wanted) {
  const kept = new Set(wanted);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  let next = parent.firstChild;
  for (const child of wanted) {
    if (child === next) next = next.nextSibling;
    else parent.insertBefore(child, next);
  }
}

export function count(number) {
  return number.toLocaleString("en");
}

// Formats a duration. A no-break space keeps the number and its unit on one line.
export function seconds(value) {
  if (value === null || value === undefined) return "unknown";
  if (value === 0) return "0\u00a0s";
  if (value < 0.0995) return `${(value * 1000).toPrecision(2)}\u00a0ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)}\u00a0ms`;
  if (value < 100) return `${value.toPrecision(3)}\u00a0s`;
  return `${Math.round(value)}\u00a0s`;
}

export function ago(value) {
  const whole = Math.max(0, Math.round(value));
  return whole < 120 ? `${whole} s ago` : `${Math.round(whole / 60)} min ago`;
}

export function percent(part, whole) {
  return whole ? Math.round((100 * part) / whole) : 0;
}

export const short = (id) => id.slice(0, 8);
