// Percentiles of latencies over the last minute.

import { Chart } from "./chart.js";
import { $, count, row, say, seconds } from "./dom.js";

const TITLES = {
  ttft: "time to first token",
  inter_token: "inter-token latency",
  queue_wait: "queue wait",
  latency: "request latency",
  ledger: "ledger call",
};
const LINES = ["p50", "p90", "p99"];

export class Latencies {
  constructor() {
    const chart = (id, title, of) =>
      new Chart($(id), title, LINES.map((it, place) => [it, (point) => point[of][place]]), seconds, 0.001);
    this.charts = [chart("ttft-chart", "Time to first token", "ttft"), chart("inter-token-chart", "Inter-token latency", "inter_token")];
  }

  show({ latencies, routers }, history) {
    // Calls to the ledger are always measured, but the charts need requests.
    const isMeasured = history.some((it) => [...it.ttft, ...it.inter_token].some(Boolean));
    if (isMeasured) $("latencies-measured").hidden = false;
    const isEmpty = $("latencies-measured").hidden;
    if (routers) say($("latencies-of"), isEmpty ? "No requests yet." : whose(routers));
    for (const chart of this.charts) chart.show(history);
    if (!latencies) return;
    $("percentiles").replaceChildren(
      ...Object.entries(TITLES).map(([name, title]) => {
        const it = latencies[name];
        const said = LINES.map((p) => (it.count ? seconds(it[p]) : "-"));
        return row(title, ...said, count(it.count));
      }),
    );
  }
}

function whose({ heard, silent }) {
  const of = heard === 1 ? "One router" : `${count(heard)} routers`;
  return silent ? `${of}; ${count(silent)} more ${silent === 1 ? "does" : "do"} not answer.` : `${of}.`;
}
