// How long a request would have taken under other orders of the queue, for who asks by a button: it is simulated.

import { count, el, row, say, seconds, table } from "./dom.js";
import { ORDERS } from "./policies.js";

const COLUMNS = ["order of the queue", "it would have taken, by estimate", "in truth"];

// `ask` answers a path's JSON, or throws a Refusal; `path` is that of an explanation whose request finished.
export function whatIf(ask, path) {
  const answer = el("div");
  const status = el("p", { class: "quiet" });
  const button = el("button", { type: "button" }, "What if the order of the queue were another?");
  let isAsked = false;
  button.addEventListener("click", async () => {
    // It stays a button that has the focus, also while it does nothing.
    if (isAsked) return;
    isAsked = true;
    button.setAttribute("aria-disabled", "true");
    say(status, "What came at that time is simulated, under each order. That takes some seconds.");
    try {
      const { counterfactuals, total_s: total } = await ask(`${path}?what_if=${ORDERS.join(",")}`);
      answer.replaceChildren(table("What if the order were another", COLUMNS, counterfactuals.map((it) => line(it, total))));
      say(status, howFar(counterfactuals));
    } catch (error) {
      answer.replaceChildren(el("p", { class: "problem" }, `${error.slug || "failed"}: ${error.message}`));
      say(status, "");
    }
    isAsked = false;
    button.removeAttribute("aria-disabled");
  });
  return el("div", { id: "what-if" }, el("p", {}, button), answer, status);
}

function line({ policy, actual, seconds: estimate, cause }, total) {
  return row(policy, estimate === undefined ? cause : seconds(estimate), actual ? seconds(total) : "");
}

function howFar(counterfactuals) {
  const actual = counterfactuals.find((it) => it.actual);
  if (!actual) return "";
  const error = actual.error === undefined ? "more than can be said" : `${Math.round(100 * actual.error)}\u00a0%`;
  return (
    `Estimates are simulations of the ${count(actual.requests)} requests that came at that time. Under ${actual.policy}, ` +
    `which they ran under, they are off by ${error} at the median.`
  );
}
