// State of the ledger, the leader and the routers, and recent errors of requests.

import { $, ago, count, el, row } from "./dom.js";

export class Health {
  show({ ledger, router, routers, totals, errors }, all) {
    if (ledger || router || routers || totals) this.facts(all);
    if (errors) {
      $("errors-table").hidden = !errors.length;
      $("errors").replaceChildren(...errors.map(([slug, number, last]) => row(slug, count(number), ago(last))));
    }
  }

  facts({ ledger, router, routers, totals }) {
    if (!ledger || !router || !routers || !totals) return;
    const facts = [
      ["ledger", `${ledger.server || "unknown"}${ledger.away ? " · does not answer" : ""}`],
      ["durability", `${ledger.durability_class}${ledger.promise ? `: ${ledger.promise}` : ""}`],
      ["delivery", ledger.durability.replace("_", " ")],
      ["memory", ledger.memory_used === null ? "no limit" : `${Math.round(100 * ledger.memory_used)} % used`],
      ["lost data", `${count(ledger.rollbacks)} times`],
      ["leader", `${router.leader || "none"}${router.leader && router.leader_is_quiet ? " · does not answer" : ""}`],
      ["routers", `${count(routers.heard)}${routers.silent ? ` · ${count(routers.silent)} not answering` : ""}`],
      ["false alarms", count(totals.false_alarms)],
    ];
    $("health-list").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }
}
