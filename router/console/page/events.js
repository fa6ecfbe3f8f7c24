// List of events, newest first, and announcements of new events for screen readers.

import { $, ago, count, el, short } from "./dom.js";

const workers = (it) =>
  `${it.count === 1 ? "worker" : `${count(it.count)} workers`} ${it.workers.map(short).join(", ")}${it.count > it.workers.length ? ", ..." : ""}`;

const CAUSES = {
  worker_lost: "worker lost",
  worker_drained: "worker draining",
  moved: "moved to free blocks",
};

const TEXTS = {
  worker_joined: (it) => `${workers(it)} joined`,
  worker_left: (it) => `${workers(it)} left`,
  worker_lost: (it) => `${workers(it)} lost`,
  worker_draining: (it) => `${workers(it)} drains`,
  worker_slow: (it) => `${workers(it)} is slow`,
  leader: (it) => (it.router_id ? `router ${short(it.router_id)} is the leader` : "no leader"),
  ledger_away: () => "the ledger does not answer",
  ledger_back: () => "the ledger answers again",
  ledger_rollback: () => "the ledger lost data",
  policy: (it) => `policy: ${Object.entries(it.changed).map(([name, value]) => `${name} ${value}`).join(", ")}`,
  preempted: (it) => `${count(it.count)} preemptions`,
  migrated: (it) =>
    `${it.request ?? "a request"} migrated from worker ${short(it.from.worker)}, slot ${it.from.slot}, to worker ${short(it.to.worker)}, slot ${it.to.slot}: ${CAUSES[it.cause]}`,
  resumed: (it) => `${it.request ?? "a request"} resumed on worker ${short(it.to.worker)}, slot ${it.to.slot}, after a preemption`,
};

// Recent events are announced, except preemptions, which are too frequent.
const FRESH_S = 5;
const MOST_NEWS = 8;
const isNews = ({ kind, at }, now) => kind !== "preempted" && at > now - FRESH_S;

export class Events {
  announce({ happened, transfers }, now) {
    const news = happened.filter((it) => isNews(it, now)).map((it) => TEXTS[it.kind]?.(it) ?? it.kind);
    const moved = transfers.filter((it) => it.cause !== "preempted").length;
    if (moved) news.push(`${moved === 1 ? "a request" : `${count(moved)} requests`} migrated`);
    $("news").append(...news.map((it) => el("p", {}, it)));
    while ($("news").children.length > MOST_NEWS) $("news").firstChild.remove();
  }

  show(cluster) {
    const { happened, at } = cluster;
    if (!happened.length) {
      $("happened").replaceChildren(el("li", { class: "quiet" }, "nothing yet"));
      return;
    }
    $("happened").replaceChildren(
      ...happened.toReversed().map((it) =>
        el("li", { "data-kind": it.kind }, el("span", { class: "when" }, ago(at - it.at)), " ", TEXTS[it.kind]?.(it) ?? it.kind),
      ),
    );
  }
}
