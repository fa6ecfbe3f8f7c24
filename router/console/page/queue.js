// Queued requests, by model, class and tenant.

import { Chart } from "./chart.js";
import { $, count, el, meter, percent, row, say, seconds } from "./dom.js";

export class Queue {
  constructor() {
    this.chart = new Chart($("queue-chart"), "Queued requests", [["queued", (it) => it.queued]], (it) => count(Math.round(it)), 10);
  }

  show({ queue, tenants }, all, history) {
    this.chart.show(history);
    if (history.length) $("queue-chart").hidden = !history.some((it) => it.queued);
    if (queue) {
      say($("queue-line"), line(queue));
      const models = queue.models ?? [];
      $("by-model").hidden = models.length < 2;
      $("models").replaceChildren(
        ...models.map((it) => row(it.model, count(it.workers), count(it.running), bar(it.queued, queue.queued), seconds(it.wait_s))),
      );
      const classes = queue.classes ?? [];
      $("by-class").hidden = !classes.length;
      $("classes").replaceChildren(...classes.map((it) => row(String(it.priority), bar(it.queued, queue.queued), seconds(it.wait_s))));
    }
    if (tenants) {
      // The list is empty if the cluster does not distinguish tenants.
      $("by-tenant").hidden = !tenants.length;
      $("tenants").replaceChildren(...tenants.map((it) => row(it.tenant, String(it.priority), bar(it.queued, all.queue.queued), seconds(it.wait_s))));
    }
  }
}

function line(queue) {
  const waits = `${count(queue.queued)} queued, order ${queue.policy.order}.`;
  if (!queue.is_known) return `${waits} No recent report of the leader.`;
  if (!queue.queued) return waits;
  // Without workers, neither the drain time nor the throughput is known.
  const left = queue.wait_s === null ? "drain time unknown" : `estimated to drain in ${seconds(queue.wait_s)}`;
  const rate = queue.worker_rate ? ` A saturated worker computes ${count(queue.worker_rate)} tokens per second.` : "";
  // The leader reports no wait of a batch's lines, which wait on purpose.
  const head = queue.waited_s ? ` the head has waited ${seconds(queue.waited_s)};` : "";
  return `${waits} ${count(queue.tokens)} tokens to compute;${head} ${left}.${rate}`;
}

function bar(part, whole) {
  return el("span", { class: "counted" }, count(part), " ", meter(percent(part, whole), { "aria-hidden": "true" }));
}
