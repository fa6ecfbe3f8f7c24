// Grid of all workers, with one cell per worker or group of workers, which shows how full they are and which have lanes.

import { $, count, el, say, short } from "./dom.js";

const FEW = 16;
const MANY = 64;

export class Grid {
  // `onChoose` is called with the ids of the chosen workers; null: no worker is chosen.
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.box = $("grid");
    this.cells = [];
    this.ids = [];
    this.chosen = new Set();
    this.isChosen = false;
    this.box.addEventListener("click", (event) => this.clicked(event));
    this.box.addEventListener("keydown", (event) => this.pressed(event));
    this.box.addEventListener("focusin", (event) => this.describe(this.cells.indexOf(event.target)));
    this.box.addEventListener("pointerover", (event) => this.describe(this.cells.indexOf(event.target)));
    $("lanes-reset").addEventListener("click", () => this.reset());
  }

  show({ workers, cells, lanes }, all) {
    if (workers) this.build(workers);
    if (cells || workers) this.fill(all.cells ?? []);
    if ((lanes || workers) && !this.isChosen) this.chosen = new Set(all.lanes);
    if (lanes || workers) this.mark();
  }

  build(workers) {
    this.workers = workers;
    const focused = this.ids[this.cells.indexOf(document.activeElement)];
    this.ids = workers.ids;
    this.cells = this.ids.map((id) =>
      el("div", { class: "cell", role: "option", tabindex: -1, "aria-selected": "false", "aria-label": `worker ${short(id)}` }),
    );
    this.box.classList.toggle("few", this.ids.length <= FEW);
    this.box.classList.toggle("many", this.ids.length > MANY);
    this.box.replaceChildren(...this.cells);
    if (this.cells.length) this.cells[0].tabIndex = 0;
    if (focused && this.ids.includes(focused)) this.focus(this.ids.indexOf(focused));
    if (!this.ids.includes(this.described)) say($("worker-line"), "");
  }

  fill(values) {
    this.values = values;
    values.forEach(([state, slots, running], place) => {
      const cell = this.cells[place];
      if (!cell) return;
      if (cell.dataset.state !== state) cell.dataset.state = state;
      const full = `${slots ? Math.ceil((100 * running) / slots) : 0}%`;
      if (cell.full !== full) cell.style.setProperty("--full", (cell.full = full));
    });
    this.describe(this.ids.indexOf(this.described));
  }

  mark() {
    this.cells.forEach((cell, place) => {
      cell.setAttribute("aria-selected", String(this.chosen.has(this.ids[place])));
    });
    $("lanes-reset").hidden = !this.isChosen;
  }

  describe(place) {
    if (!this.cells[place] || !this.values?.[place]) return;
    this.described = this.ids[place];
    const [state, slots, running, waiting, used, cached, tokens, hits] = this.values[place];
    const size = this.workers.sizes[place];
    const who = size > 1 ? `${size} workers from ${short(this.ids[place])} on` : `worker ${short(this.ids[place])}`;
    const where = this.workers.addresses ? ` at ${this.workers.addresses[place]}` : "";
    const text = `${who}${where}: ${state}, ${count(running)} of ${count(slots)} slots, ${count(waiting)} waiting there, KV blocks ${used} % used and ${cached} % cached, ${count(tokens)} tokens/s${hits === null ? "" : `, ${hits} % of prompt tokens cached in the last 5 min`}`;
    this.cells[place].setAttribute("aria-label", text);
    say($("worker-line"), text);
  }

  clicked(event) {
    const place = this.cells.indexOf(event.target);
    if (place >= 0) this.toggle(place);
  }

  pressed(event) {
    const place = this.cells.indexOf(event.target);
    if (place < 0) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns(), ArrowUp: -this.columns() };
    if (event.key === " " || event.key === "Enter") this.toggle(place);
    else if (event.key === "Home") this.focus(0);
    else if (event.key === "End") this.focus(this.cells.length - 1);
    else if (event.key in steps) this.focus(Math.min(Math.max(place + steps[event.key], 0), this.cells.length - 1));
    else return;
    event.preventDefault();
  }

  columns() {
    const top = this.cells[0].offsetTop;
    const next = this.cells.findIndex((cell) => cell.offsetTop !== top);
    return next < 0 ? 1 : next;
  }

  focus(place) {
    this.cells.forEach((cell, each) => (cell.tabIndex = each === place ? 0 : -1));
    this.cells[place]?.focus();
  }

  toggle(place) {
    const id = this.ids[place];
    if (!this.isChosen) this.chosen = new Set();
    if (!this.chosen.delete(id)) this.chosen.add(id);
    this.isChosen = this.chosen.size > 0;
    this.mark();
    this.onChoose(this.isChosen ? [...this.chosen] : null);
  }

  reset() {
    this.isChosen = false;
    this.mark();
    this.onChoose(null);
  }
}
