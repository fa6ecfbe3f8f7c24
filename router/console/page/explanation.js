// Time breakdown of a request: its spans, which add up to the total time, and its attempts.

import { count, el, row, seconds, short, table } from "./dom.js";

// Minimum share of the total time for a row of its own. Shorter spans are added up in one row.
const LEAST_PART = 1e-3;
// Minimum share of the total time with unread tokens that is shown. Reading the last tokens always takes some time.
const MUCH_UNREAD = 0.05;

const BEFORE = {
  earlier: "earlier arrivals",
  higher: "later arrivals of higher classes",
  fair_share: "later arrivals by fair share",
  ordered: "later arrivals by the order",
  lower: "later arrivals of lower classes",
};

// Returns the elements that show an explanation. `labels` maps kinds of spans to texts. `onPick` is called with the id of a
// request that the user clicks.
export function explained(explanation, labels, onPick) {
  const { spans, attempts, total_s: total } = explanation;
  return [
    el("p", {}, headline(explanation)),
    ...missing(explanation),
    ...reading(explanation),
    table(`Time breakdown of ${seconds(total)}`, ["kind", "time", "share", "at"], rows(spans, total, labels)),
    ...(attempts.length ? [table("Attempts", COLUMNS, attempts.map((it) => attempt(it, onPick)))] : []),
    ...attempts.flatMap((it) => [...others(it, onPick), ...stay(it, onPick), ...prefixWait(it)]),
  ];
}

function headline(explanation) {
  const { output_tokens: made, ttft_s: ttft, predicted_ttft_s: wait, ledger_s: ledger } = explanation;
  const predicted = foreseen(explanation);
  if (ttft === undefined) return `No token yet${predicted}.`;
  const late = wait === undefined ? "" : ` (${seconds(wait)} predicted)`;
  const stored = ledger === undefined ? "" : `, including ${seconds(ledger)} to store it`;
  return `First token after ${seconds(ttft)}${late}${stored}; ${count(made)} output tokens${predicted}.`;
}

function foreseen({ predicted_output_tokens: tokens, prediction_distrusted: isDistrusted }) {
  return tokens ? ` (${count(tokens)} predicted${isDistrusted ? " by recent outputs" : ""})` : "";
}

// Returns a warning if the request may be waiting for missing workers.
function missing({ missing_workers: workers }) {
  return workers ? [el("p", { class: "warning" }, `Workers: ${workers}.`)] : [];
}

// Returns how long tokens were unread. This time overlaps with the spans, because the cluster does not wait for clients.
function reading({ total_s: total, unread_s: unread, unread_tokens: tokens }) {
  if (!tokens && unread <= MUCH_UNREAD * total) return [];
  const now = tokens ? `; ${count(tokens)} unread now` : "";
  return [el("p", {}, `Tokens unread by the client for ${seconds(unread)}${now}.`)];
}

function rows(spans, total, labels) {
  const long = spans.filter((it) => it.seconds >= LEAST_PART * total);
  const rest = spans.filter((it) => it.seconds < LEAST_PART * total).reduce((sum, it) => sum + it.seconds, 0);
  return [
    ...long.map((it) => row(what(it, labels), seconds(it.seconds), part(it.seconds, total), stretch(it, total))),
    ...(rest ? [row("parts below 0.1 % each", seconds(rest), part(rest, total), "")] : []),
  ];
}

function what({ kind, attempt }, labels) {
  const words = labels[kind] ?? kind.replaceAll("_", " ");
  return attempt > 1 ? `${words} (attempt ${attempt})` : words;
}

function part(long, total) {
  return total ? `${((100 * long) / total).toFixed(1)}\u00a0%` : "";
}

function stretch({ start_s: start, seconds: long, kind }, total) {
  const bar = el("span", { class: "bar", "data-kind": kind, "aria-hidden": "true" });
  bar.style.marginInlineStart = `${(100 * start) / total}%`;
  bar.style.width = `${(100 * long) / total}%`;
  return el("div", { class: "span" }, bar);
}

const COLUMNS = ["attempt", "worker", "known tokens", "cached", "new", "preempted", "recomputed", "largest batch", "end"];

function attempt(it, onPick) {
  const beside = el("span", {}, count(it.most_neighbours), ...names(it.neighbours, onPick));
  return row(
    String(it.number), short(it.worker_id), count(it.known_tokens), count(it.cached_tokens), count(it.new_tokens),
    count(it.preemptions), count(it.recomputed_tokens), beside, state(it),
  );
}

// Returns how the attempt ended, or its progress.
function state(it) {
  if (it.end) return it.end.replaceAll("_", " ");
  return it.prefilled_tokens ? `in prefill: ${count(it.prefilled_tokens)} of ${count(it.known_tokens)} tokens` : "running";
}

// Returns lists of other requests of the same tenant: those at other workers, and those that arrived at the worker during the
// attempt.
function others({ number, newcomers, occupants }, onPick) {
  const where = {
    [`Your requests at other workers without capacity, attempt ${number}:`]: occupants,
    [`Your requests that arrived at the worker during attempt ${number}:`]: newcomers,
  };
  return Object.entries(where).filter(([, it]) => it.length).map(([text, it]) => el("p", {}, text, ...names(it, onPick)));
}

// Returns the wait of the request for a worker that had a prefix of its prompt cached.
function prefixWait({ number, known_tokens: known, expected_cached_tokens: expected, prefix_wait: wait }) {
  if (!wait) return [];
  const missed = expected < wait.tokens ? " in vain" : "";
  const text = `Cached prefix, attempt ${number}: waited ${seconds(wait.seconds)}${missed} for a worker with ` +
    `${count(wait.tokens)} of ${count(known)} tokens cached; computing them elsewhere would have ` +
    `taken ${seconds(wait.compute_s)}, and with its cost for other requests, a wait of up to ` +
    `${seconds(wait.saved_s)} was worthwhile.`;
  return [el("p", {}, text)];
}

// Returns how many other requests left the queue before this request, by reason.
function stay({ number, queue }, onPick) {
  const before = Object.entries(BEFORE).filter(([name]) => queue?.[name]);
  if (!before.length) return [];
  const who = before.map(([name, words]) => `${count(queue[name])} ${words}`).join(", ");
  const text = `Queue before attempt ${number} (${queue.order}): ${count(queue.found)} queued on arrival; left first: ${who}`;
  return [el("p", {}, text, ...(queue.before.length ? ["; your last ones:", ...names(queue.before, onPick)] : ["."]))];
}

function names(requests, onPick) {
  return requests.flatMap((it) => [" ", el("button", { type: "button", class: "link", click: () => onPick(it) }, it)]);
}
