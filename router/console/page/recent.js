// List of the newest requests; a click on a request shows its details.

import { $, ago, count, el, row } from "./dom.js";

const EVERY_S = 2;
const PREFIX = /^REQUEST_STATE_/;

export class Recent {
  // `onPick` is called with the id of a request that the user clicks.
  constructor(api, onPick) {
    this.api = api;
    this.onPick = onPick;
    this.askedAt = -EVERY_S;
  }

  // Loads the list again every EVERY_S seconds, with at most one call in progress.
  async show(cluster) {
    const may = cluster.may("infer") || cluster.may("admin");
    if (!may || this.isAsking || Math.abs(cluster.at - this.askedAt) < EVERY_S) return;
    this.askedAt = cluster.at;
    this.isAsking = true;
    try {
      this.fill((await this.api.get("requests")).requests);
    } catch {
      // The connection state already shows the failure, and the next call may succeed.
    } finally {
      this.isAsking = false;
    }
  }

  fill(requests) {
    $("recent").hidden = !requests.length;
    const shown = requests.map((it) => JSON.stringify(it)).join();
    const isSame = shown === this.shown;
    this.shown = shown;
    const now = Date.now() / 1000;
    if (isSame) {
      requests.forEach((it, place) => ($("recent-rows").children[place].firstChild.textContent = ago(now - it.arrived)));
      return;
    }
    $("recent-rows").replaceChildren(
      ...requests.map((it) =>
        row(ago(now - it.arrived), this.link(it.request_id), state(it), count(it.output_tokens), count(it.attempts))),
    );
  }

  link(name) {
    return el("button", { type: "button", class: "link", title: name, click: () => this.onPick(name) }, name);
  }
}

function state({ state: name, error_slug: slug }) {
  const words = name.replace(PREFIX, "").toLowerCase();
  return slug ? `${words}: ${slug}` : words;
}
