// Details of one request: its record in the ledger, its moves, and its time breakdown.

import { Refusal } from "./api.js";
import { $, count, el, row, seconds, table } from "./dom.js";
import { explained } from "./explanation.js";

const PREFIX = /^(REQUEST_STATE|FINISH_REASON)_/;

export class Request {
  // `onFound` is called with the id of each request that is looked up.
  constructor(api, cluster, onFound) {
    this.api = api;
    this.cluster = cluster;
    this.onFound = onFound;
    $("request-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.look($("request-id").value.trim());
    });
  }

  async look(name) {
    $("request-id").value = name;
    this.onFound(name);
    this.asked = name;
    const found = await this.find(name);
    // The user may have looked up another request in the meantime.
    if (this.asked === name) $("request-answer").replaceChildren(...found);
  }

  // Returns the elements that show the request, or the error of the call.
  async find(name) {
    try {
      const record = await this.api.get(`requests/${encodeURIComponent(name)}`);
      const explanation = await this.explanation(name);
      return [facts(record), ...(explanation ? this.breakdown(explanation) : []), moves(record.events)];
    } catch (error) {
      return [el("p", { class: "problem" }, `${error.slug || "failed"}: ${error.message}`)];
    }
  }

  breakdown(explanation) {
    return explained(explanation, this.cluster.sections.span_labels ?? {}, (it) => this.look(it));
  }

  // Returns the request's time breakdown; undefined if the router rejects the call, for example because it no longer knows it.
  async explanation(name) {
    try {
      return await this.api.get(explanationOf(name));
    } catch (error) {
      if (error instanceof Refusal) return undefined;
      throw error;
    }
  }
}

const explanationOf = (name) => `../v1/requests/${encodeURIComponent(name)}/explanation`;

function facts(record) {
  const known = [
    ["request", record.request_id],
    ["state", record.state.replace(PREFIX, "").toLowerCase()],
    ["worker", record.worker_id],
    ["tokens", `${count(record.prompt_tokens)} prompt tokens, ${count(record.output_tokens)} output tokens`],
    ["attempts", `${record.attempts}${record.losses ? `, ${record.losses} lost with their workers` : ""}`],
    ["priority", String(record.priority)],
    ["error", record.error_slug && `${record.error_slug}: ${record.error_message}`],
    ["trace", record.trace_id],
  ].filter(([, value]) => value);
  return el("dl", { class: "facts" }, ...known.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function moves(events) {
  const first = events[0]?.time ?? 0;
  return table(
    "Moves",
    ["after", "move", "detail"],
    events.map((it) => row(seconds(it.time - first), it.move.replace("_", " "), it.detail)),
  );
}
