// What operators tell the cluster.

import { $, el, say, short } from "./dom.js";
import { ENGINE_POLICIES, ORDERS } from "./policies.js";

// Settings that are one of several words.
const WORDS = { order: ORDERS, engine_policy: ENGINE_POLICIES };
const TARGETS = ["any-worker", "any-router", "leader", "ledger"];

export class Admin {
  constructor(api) {
    this.api = api;
    this.policy = {};
    this.inputs = {};
    this.listen("drain-form", () => this.drain());
    this.listen("policy-form", () => this.setPolicy());
    this.listen("chaos-form", () => this.inject());
    $("policy-reset").addEventListener("click", () => this.resetPolicy());
  }

  listen(id, act) {
    $(id).addEventListener("submit", (event) => {
      event.preventDefault();
      act();
    });
  }

  show({ you, router, workers, cells, queue }, all) {
    if (you) $("admin").hidden = !you.scopes.includes("admin");
    if (router) $("chaos-form").hidden = !router.has_chaos;
    if (workers || cells) this.list(all);
    if (queue) this.showPolicy(all.queue);
  }

  // What is lost neither drains nor can be struck; where several workers share a cell the state is of none alone.
  list({ workers, cells = [] }) {
    const isAlone = workers.sizes.every((it) => it === 1);
    const there = isAlone ? workers.ids.filter((_, place) => cells[place]?.[0] !== "lost") : [];
    options($("drain-worker"), there);
    options($("chaos-target"), [...TARGETS, ...(isAlone ? there : workers.ids)]);
  }

  // A field that somebody is about to change is left alone.
  showPolicy({ policy, overridden }) {
    if (!Object.keys(this.inputs).length) this.build(policy);
    for (const [name, value] of Object.entries(policy)) {
      const input = this.inputs[name];
      if (this.policy[name] !== value) write(input, value);
      input.labels[0].classList.toggle("overridden", overridden.includes(name));
    }
    this.policy = policy;
  }

  build(policy) {
    for (const [name, value] of Object.entries(policy)) {
      const id = `policy-${name}`;
      this.inputs[name] = field(id, name, value);
      $("policy-fields").append(el("label", { for: id }, name.replaceAll("_", " "), this.inputs[name]));
    }
  }

  async drain() {
    const id = $("drain-worker").value;
    if (await confirmed(`Drain worker ${short(id)}?`)) await this.ask("drain", { worker_id: id }, `worker ${short(id)} is draining`);
  }

  async setPolicy() {
    const changes = {};
    for (const [name, input] of Object.entries(this.inputs)) {
      const value = input.type === "checkbox" ? input.checked : input.type === "number" ? Number(input.value) : input.value;
      if (value !== this.policy[name]) changes[name] = value;
    }
    await this.ask("policy", changes, "policy set");
  }

  // What was written into a field and not set would be set with the next change.
  async resetPolicy() {
    for (const [name, value] of Object.entries(this.policy)) write(this.inputs[name], value);
    await this.ask("policy", { reset: Object.keys(this.policy) }, "policy reset to the configuration");
  }

  async inject() {
    const [kind, target] = [$("chaos-kind").value, $("chaos-target").value];
    const fault = { kind, target };
    if (kind !== "FAULT_KIND_KILL") fault.seconds = Number($("chaos-seconds").value);
    if (kind === "FAULT_KIND_SLOW") Object.assign(fault, target === "ledger" ? { delay_s: 0.2 } : { factor: 10 });
    const word = kind.replace("FAULT_KIND_", "").toLowerCase();
    if (await confirmed(`${word} ${target}?`)) await this.ask("chaos", fault, `${word}: under way`);
  }

  async ask(path, body, done) {
    try {
      const answer = await this.api.ask(path, body);
      say($("admin-status"), `${done}${answer.target ? ` (${answer.target})` : ""}`);
    } catch (error) {
      say($("admin-status"), `${error.slug || "failed"}: ${error.message}`);
    }
  }
}

function field(id, name, value) {
  if (name in WORDS) {
    const select = el("select", { id }, ...WORDS[name].map((it) => el("option", {}, it)));
    select.value = value;
    return select;
  }
  if (typeof value === "boolean") {
    const box = el("input", { id, type: "checkbox" });
    box.checked = value;
    return box;
  }
  // An empty one would count as 0, which is a setting too.
  return el("input", { id, type: "number", min: 0, step: "any", value, required: true });
}

function write(input, value) {
  if (input.type === "checkbox") input.checked = value;
  else input.value = value;
}

function options(select, values) {
  const offered = [...select.options].map((it) => it.value);
  if (offered.length === values.length && values.every((it, place) => it === offered[place])) return;
  const chosen = select.value;
  select.replaceChildren(...values.map((it) => el("option", { value: it }, TARGETS.includes(it) ? it : `worker ${short(it)}`)));
  if (values.includes(chosen)) select.value = chosen;
}

let answered = Promise.resolve();

// Whether the reader wants that.
async function confirmed(question) {
  // The answer to the question before may be on its way still.
  await answered;
  const dialog = $("confirm");
  say($("confirm-text"), question);
  dialog.returnValue = "no";
  dialog.showModal();
  answered = new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  await answered;
  return dialog.returnValue === "yes";
}
