// What happened, newest first.

import { $, ago, count, el, short } from "./dom.js";

const workers = (it) =>
  `${it.count === 1 ? "worker" : `${count(it.count)} workers`} ${it.workers.map(short).join(", ")}${it.count > it.workers.length ? ", ..." : ""}`;

const CAUSES = {
  worker_lost: "its worker was lost",
  worker_drained: "its worker drains",
  moved: "there was room sooner",
};

const TEXTS = {
  worker_joined: (it) => `${workers(it)} joined`,
  worker_left: (it) => `${workers(it)} left`,
  worker_lost: (it) => `${workers(it)} lost`,
  worker_draining: (it) => `${workers(it)} drains`,
  worker_slow: (it) => `${workers(it)} is slow`,
  leader: (it) => (it.router_id ? `router ${short(it.router_id)} leads` : "nobody leads"),
  ledger_away: () => "the ledger does not answer",
  ledger_back: () => "the ledger answers again",
  ledger_rollback: () => "the ledger came back with less than it had",
  policy: (it) => `queue policy: ${Object.entries(it.changed).map(([name, value]) => `${name} ${value}`).join(", ")}`,
  preempted: (it) => `${count(it.count)} preemptions`,
  migrated: (it) =>
    `${it.request ?? "a request"} went from worker ${short(it.from.worker)}, slot ${it.from.slot}, to worker ${short(it.to.worker)}, slot ${it.to.slot}: ${CAUSES[it.cause]}`,
  resumed: (it) => `${it.request ?? "a request"} is back at worker ${short(it.to.worker)}, slot ${it.to.slot}, after a preemption`,
};

export class Happenings {
  show(cluster) {
    const { happened, at } = cluster;
    if (!happened.length) {
      $("happened").replaceChildren(el("li", { class: "quiet" }, "nothing yet"));
      return;
    }
    $("happened").replaceChildren(
      ...happened.toReversed().map((it) =>
        el("li", { "data-kind": it.kind }, el("span", { class: "when" }, ago(at - it.at)), TEXTS[it.kind]?.(it) ?? it.kind),
      ),
    );
  }
}
