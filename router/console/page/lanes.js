// Batch slots over the last minute, with one lane per worker: which request was in which slot, and moves between slots.

import { EMPTY, PREFILL, WINDOW_S } from "./cluster.js";
import { $, el, keep, row, say, seconds, short, svg } from "./dom.js";

const TITLE_PX = 18;
const LEAST_SLOTS = 4;
const MOST_ARROWS = 64;
const HEAD_PX = 7;
const NARROW_PX = 420;
const MOST_ROWS = 512;

export class Lanes {
  constructor(cluster, onPick) {
    this.cluster = cluster;
    this.onPick = onPick;
    // Rows of the table by worker, slot and request key.
    this.rows = new Map();
    this.canvas = $("lanes-canvas");
    this.arrows = $("lanes-arrows");
    this.sought = "";
    this.tops = [];
    this.colours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.colours());
    this.canvas.addEventListener("click", (event) => {
      const name = this.at(event.offsetX, event.offsetY);
      if (name) onPick(name);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      this.canvas.title = this.at(event.offsetX, event.offsetY) ?? "";
    });
  }

  colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colour = Object.fromEntries(
      ["decode", "prefill", "yours", "empty", "text", "quiet", "lost", "panel"].map((it) => [it, of(it)]),
    );
    this.hatch = null;
  }

  // Highlights the request with the id `name`, which the user has looked up.
  seek(name) {
    this.sought = name;
  }

  draw() {
    const { lanes } = this.cluster;
    const heights = lanes.map((lane) => this.height(lane));
    const width = this.canvas.clientWidth;
    this.tops = heights.map((_, place) => heights.slice(0, place).reduce((a, it) => a + it.total, 0));
    const height = Math.max(1, heights.reduce((a, it) => a + it.total, 0));
    const pixels = devicePixelRatio || 1;
    this.resize(width, height, pixels);
    const context = this.canvas.getContext("2d");
    context.setTransform(pixels, 0, 0, pixels, 0, 0);
    context.clearRect(0, 0, width, height);
    this.hatch ??= this.hatched(context);
    this.wanted = this.names();
    lanes.forEach((lane, place) => this.lane(context, lane, this.tops[place], heights[place], width));
    this.heights = heights;
    this.drawArrows(width);
  }

  height(lane) {
    const most = Math.max(LEAST_SLOTS - 1, ...lane.slots.keys()) + 1;
    const row = most <= 8 ? 12 : most <= 32 ? 6 : most <= 96 ? 3 : 1.5;
    return { slots: most, row, total: TITLE_PX + most * row + 6 };
  }

  resize(width, height, pixels) {
    const wide = Math.round(width * pixels);
    const high = Math.round(height * pixels);
    if (this.canvas.width === wide && this.canvas.height === high) return;
    this.canvas.width = wide;
    this.canvas.height = high;
    this.canvas.style.height = `${height}px`;
    this.arrows.setAttribute("width", width);
    this.arrows.setAttribute("height", height);
  }

  x(at, width) {
    return width * (1 - (this.cluster.at - at) / WINDOW_S);
  }

  y([place, slot]) {
    const { row } = this.heights[place];
    return this.tops[place] + TITLE_PX + (slot + 0.5) * row;
  }

  lane(context, lane, top, { slots, row }, width) {
    this.title(context, lane, top);
    const band = top + TITLE_PX;
    context.fillStyle = this.colour.empty;
    context.fillRect(0, band, width, slots * row);
    for (const [slot, stretches] of lane.slots) {
      for (const it of stretches) {
        const left = Math.max(0, this.x(it.since, width));
        const right = it.until === null ? width : this.x(it.until, width);
        if (it.phase === EMPTY || right <= 0) continue;
        context.fillStyle = this.fill(it);
        context.fillRect(left, band + slot * row, Math.max(1, right - left), row > 2 ? row - 1 : row);
      }
    }
  }

  title(context, { worker }, top) {
    const { workers, cells } = this.cluster.sections;
    // If several workers share a cell, the state of a single worker is unknown.
    const known = workers?.addresses ? (cells?.[workers.ids.indexOf(worker)] ?? ["gone"]) : ["up"];
    const [state, slots, running, , used, cached] = known;
    const words = [`worker ${short(worker)}`];
    if (state !== "up") words.push(state);
    if (slots && state !== "lost") {
      if (this.canvas.clientWidth > NARROW_PX) words.push(`${running} of ${slots} slots`);
      words.push(`KV ${used} % used, ${cached} % cached`);
    }
    context.fillStyle = state === "up" ? this.colour.quiet : this.colour.lost;
    context.font = "12px system-ui, sans-serif";
    context.fillText(words.join(" · "), 2, top + 13);
  }

  fill(stretch) {
    if (this.wanted.includes(this.cluster.names.get(stretch.key))) return this.colour.yours;
    return stretch.phase === PREFILL ? this.hatch : this.colour.decode;
  }

  // Returns the possible names of the request that was looked up. Administrators receive names with the tenant.
  names() {
    const { tenant } = this.cluster.sections.you ?? {};
    return this.sought ? [this.sought, `${tenant}/${this.sought}`] : [];
  }

  hatched(context) {
    const tile = el("canvas", { width: 6, height: 6 });
    const on = tile.getContext("2d");
    on.fillStyle = this.colour.prefill;
    on.fillRect(0, 0, 6, 6);
    on.strokeStyle = this.colour.panel;
    on.lineWidth = 1.4;
    on.beginPath();
    on.moveTo(-1, 7);
    on.lineTo(7, -1);
    on.stroke();
    return context.createPattern(tile, "repeat");
  }

  drawArrows(width) {
    const { transfers } = this.cluster;
    this.arrows.replaceChildren(...transfers.slice(-MOST_ARROWS).flatMap((it) => this.arrow(it, width)));
  }

  arrow(transfer, width) {
    const [x1, y1] = [this.x(transfer.left_at, width), this.y(transfer.from)];
    const [x2, y2] = [this.x(transfer.at, width), this.y(transfer.to)];
    // The bend has a minimum size, so that the arrow of an immediate move is visible.
    const bend = Math.max(14, (x2 - x1) / 2);
    const path = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend - HEAD_PX} ${y2} ${x2 - HEAD_PX} ${y2}`;
    const kind = transfer.cause === "preempted" ? "arrow resumed" : "arrow migrated";
    const head = `M${x2 - HEAD_PX} ${y2 - 4}L${x2} ${y2}L${x2 - HEAD_PX} ${y2 + 4}z`;
    return [svg("path", { class: kind, d: path, "data-cause": transfer.cause }), svg("path", { class: "head", d: head })];
  }

  // Describes the picture as text for screen readers.
  tell() {
    const seated = [...this.cluster.seated()];
    const prefilling = seated.filter((it) => it.phase === PREFILL).length;
    const { lanes, transfers } = this.cluster;
    say(
      $("lanes-text"),
      lanes.length
        ? `${lanes.length} workers shown: ${seated.length - prefilling} slots decode, ${prefilling} prefill; ` +
            `${transfers.length} requests moved to another slot in the last minute.`
        : "No worker selected.",
    );
    if ($("seats-details").open) this.list(seated.slice(0, MOST_ROWS));
  }

  list(seated) {
    const rows = new Map();
    for (const seat of seated) {
      const whose = `${seat.worker} ${seat.slot} ${seat.key}`;
      const known = this.rows.get(whose) ?? this.seat(seat);
      say(known.cells[2], seat.phase === PREFILL ? "prefill" : "decode");
      say(known.cells[4], seconds(Math.max(0, this.cluster.at - seat.since)));
      rows.set(whose, known);
    }
    this.rows = rows;
    keep($("seats"), [...rows.values()]);
  }

  seat({ worker, slot, name }) {
    const found = name ? el("button", { type: "button", class: "link", click: () => this.onPick(name) }, name) : "";
    return row(short(worker), String(slot), "", found, "");
  }

  // Returns the name of the request at this position of the canvas; undefined if there is none.
  at(x, y) {
    const place = this.tops.findLastIndex((top) => y >= top);
    if (place < 0) return undefined;
    const slot = Math.floor((y - this.tops[place] - TITLE_PX) / this.heights[place].row);
    const width = this.canvas.clientWidth;
    const stretch = this.cluster.lanes[place].slots
      .get(slot)
      ?.find((it) => this.x(it.since, width) <= x && (it.until === null || x <= this.x(it.until, width)));
    return stretch && this.cluster.names.get(stretch.key);
  }
}
