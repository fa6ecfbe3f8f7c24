// Decisions of the autoscaler, with their reasons.

import { $, ago, count, row, say, seconds } from "./dom.js";

export class Scaling {
  // `scaling` is null if the number of workers is fixed.
  show(scaling, now) {
    say($("scaling-line"), scaling ? line(scaling) : "No autoscaler: the number of workers is fixed.");
    const rows = (scaling?.changes ?? []).toReversed().map(([at, before, after, why]) =>
      row(ago(now - at), `${count(before)} → ${count(after)}`, why));
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
