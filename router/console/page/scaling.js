// Decisions of the autoscalers, with their reasons.

import { $, ago, count, row, say, seconds } from "./dom.js";

export class Scaling {
  // `scalings` has one entry for each model whose number of workers is not fixed. `models` are the names of all models.
  show(scalings = [], models = [], now) {
    const named = (model, text) => (models.length > 1 ? `${model}: ${text}` : text);
    const lines = scalings.map((it) => named(it.model, line(it)));
    say($("scaling-line"), lines.join(" ") || "No autoscaler: the number of workers is fixed.");
    const changes = scalings.flatMap(({ model, changes }) => changes.map((change) => [model, ...change]));
    const rows = changes.toSorted((one, other) => other[1] - one[1]).map(([model, at, before, after, why]) =>
      row(ago(now - at), `${count(before)} → ${count(after)}`, named(model, why)));
    $("scalings-table").hidden = !rows.length;
    $("scalings").replaceChildren(...rows);
  }
}

function line({ late_s, workers, max_workers, need, wait_s, reason }) {
  const late = late_s === null ? "" : `Last report ${seconds(late_s)} ago. `;
  const wait = reason.includes("wait") ? "" : ` Estimated wait of a new request: ${seconds(wait_s)}.`;
  return (
    `${late}${count(workers)} workers wanted, at most ${count(max_workers)}: ${reason}. ` +
    `The present load needs ${need.toFixed(1)} workers.${wait}`
  );
}
