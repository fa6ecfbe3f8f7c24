// Key figures of the cluster.

import { $, count, el, meter, percent, say } from "./dom.js";

const TILES = [
  ["Workers up", (t) => count(t.up), (t) => words([t.lost, "lost"], [t.draining, "draining"], [t.slow, "slow"])],
  ["Slots in use", (t) => count(t.running), (t) => `of ${count(t.slots)}`, (t) => percent(t.running, t.slots)],
  ["KV blocks in use", (t) => `${percent(t.blocks_used, t.blocks)} %`, (t) => `${percent(t.blocks_cached, t.blocks)} % cached`, (t) => percent(t.blocks_used, t.blocks)],
  ["Prefix-cache hits", (t) => (t.prompt_tokens ? `${percent(t.cached_tokens, t.prompt_tokens)} %` : "-"), (t) => `of ${count(t.prompt_tokens)} tokens in 5\u00a0min`],
  ["Queued", (t) => count(t.queued), (t) => words([t.waiting, "at workers"])],
  ["Tokens per second", (t) => count(t.tokens_per_s), () => ""],
  ["Finished", (t) => count(t.completed), (t) => words([t.failed, "failed"])],
  ["Migrated", (t) => count(t.migrated), (t) => words([t.moved, "moved"])],
  ["Preempted", (t) => count(t.preempted), (t) => words([t.recomputed_tokens, "tokens recomputed"])],
];

function words(...counted) {
  return counted
    .filter(([number]) => number)
    .map(([number, word]) => `${count(number)} ${word}`)
    .join(", ");
}

export class Overview {
  constructor() {
    this.tiles = TILES.map(([title, value, more, part]) => {
      const number = el("span");
      const small = el("small");
      const bar = part && meter(0, { role: "progressbar", "aria-label": title, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 0 });
      $("tiles").append(el("div", {}, el("dt", {}, title), el("dd", {}, number, " ", small, ...(bar ? [bar] : []))));
      return { number, small, bar, value, more, part };
    });
  }

  show({ router, totals }) {
    if (router) {
      const leads = router.is_leading ? "leader" : `leader ${router.leader ? router.leader.slice(0, 8) : "none"}`;
      say($("identity"), `${router.models.join(", ")} · router ${router.router_id.slice(0, 8)} · ${leads}`);
      $("key-form").hidden = !router.has_access;
    }
    if (!totals) return;
    for (const { number, small, bar, value, more, part } of this.tiles) {
      say(number, value(totals));
      say(small, more(totals));
      if (bar) fill(bar, part(totals));
    }
  }
}

function fill(bar, value) {
  if (bar.getAttribute("aria-valuenow") === String(value)) return;
  bar.setAttribute("aria-valuenow", value);
  bar.firstChild.style.width = `${value}%`;
}
