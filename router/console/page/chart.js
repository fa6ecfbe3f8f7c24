// Line chart of the last five minutes, in SVG.

import { svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 110;
const LEFT = 48;
const BOTTOM = 16;
const TOP = 8;
const SPAN_S = 300;

export class Chart {
  // `lines` are pairs of a CSS class and a function that returns the value of a point, or null. `write` formats a value. The
  // vertical axis ends at `least` or above.
  constructor(box, title, lines, write, least) {
    this.box = box;
    this.least = least;
    this.title = title;
    this.lines = lines;
    this.write = write;
  }

  show(points) {
    if (!points.length) return;
    const last = points.at(-1).at;
    const values = points.flatMap((point) => this.lines.map(([, value]) => value(point))).filter((it) => it !== null);
    const most = nice(Math.max(this.least, ...values));
    const width = Math.max(WIDTH, this.box.clientWidth);
    const x = (at) => LEFT + (width - LEFT - 4) * (1 - (last - at) / SPAN_S);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
    this.box.replaceChildren(
      svg(
        "svg",
        { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": this.text(points.at(-1)) },
        ...[0, most].flatMap((value) => [
          svg("line", { class: "axis", x1: LEFT, x2: width - 4, y1: y(value), y2: y(value) }),
          svg("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, this.write(value)),
        ]),
        svg("text", { x: LEFT, y: HEIGHT - 2 }, "5 min ago"),
        svg("text", { x: width - 4, y: HEIGHT - 2, "text-anchor": "end" }, "now"),
        ...this.lines.map(([kind, value]) => svg("path", { class: `line ${kind}`, d: path(points, value, x, y) })),
      ),
    );
  }

  text(point) {
    const said = this.lines.map(([kind, value]) => `${kind} ${value(point) === null ? "none" : this.write(value(point))}`);
    return `${this.title}, the last five minutes. Now: ${said.join(", ")}.`;
  }
}

function path(points, value, x, y) {
  let isDown = false;
  return points
    .map((point) => {
      const it = value(point);
      if (it === null) {
        isDown = false;
        return "";
      }
      const command = isDown ? "L" : "M";
      isDown = true;
      return `${command}${x(point.at).toFixed(1)} ${y(it).toFixed(1)}`;
    })
    .join("");
}

function nice(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return power * [1, 2, 5, 10].find((it) => it * power >= most);
}

