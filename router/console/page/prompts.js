// Prefix-cache hits of the last five minutes, by worker and tenant.

import { $, count, el, meter, percent, row, say, short } from "./dom.js";

export class Prompts {
  show({ prompts, totals }) {
    if (totals) say($("prompts-line"), line(totals));
    if (!prompts) return;
    fill("by-worker-prompts", prompts.workers, short);
    fill("by-tenant-prompts", prompts.tenants, String);
  }
}

function line({ prompt_tokens, cached_tokens }) {
  if (!prompt_tokens) return "No prompts in the last five minutes.";
  return `${percent(cached_tokens, prompt_tokens)} % of ${count(prompt_tokens)} prompt tokens in the last five minutes were prefix-cache hits.`;
}

// Fills a table, and hides it if no row has prompts.
function fill(id, prompts, title) {
  $(id).hidden = !prompts.some((it) => it.tokens);
  $(id).tBodies[0].replaceChildren(...prompts.map((it) => row(title(it.name), count(it.tokens), share(it))));
}

function share({ tokens, cached }) {
  if (!tokens) return "-";
  const value = percent(cached, tokens);
  return el("span", { class: "counted" }, `${value} % `, meter(value, { "aria-hidden": "true" }));
}
