// Operations of administrators: drain a worker, change the policy, inject a fault.

import { $, el, say, short } from "./dom.js";
import { ENGINE_POLICIES, ORDERS } from "./policies.js";

// Settings whose value is one of a list of names.
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

  // Lost workers can neither be drained nor be the target of a fault. If several workers share a cell, the states of single
  // workers are unknown.
  list({ workers, cells = [] }) {
    const isAlone = workers.sizes.every((it) => it === 1);
    const there = isAlone ? workers.ids.filter((_, place) => cells[place]?.[0] !== "lost") : [];
    options($("drain-worker"), there);
    options($("chaos-target"), [...TARGETS, ...(isAlone ? there : workers.ids)]);
  }

  // Only fields whose setting has changed are updated, so that unsent input of the user is kept.
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

  // Unsent input is removed from the fields, because the next change would otherwise send it.
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
  // The input is required, because an empty one would be sent as 0, which is a valid setting.
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

// Asks the user `question`, and returns whether the answer is yes.
async function confirmed(question) {
  // The event with the answer to the previous question may still be pending.
  await answered;
  const dialog = $("confirm");
  say($("confirm-text"), question);
  dialog.returnValue = "no";
  dialog.showModal();
  answered = new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  await answered;
  return dialog.returnValue === "yes";
}
