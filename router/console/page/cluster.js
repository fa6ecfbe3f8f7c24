// State of the cluster on this page: the latest sections of the event stream, and the history derived from them.

const HISTORY_S = 300;
const MOST_HAPPENED = 300;

export const EMPTY = 0;
export const PREFILL = 1;
export const DECODE = 2;
export const WINDOW_S = 60;

export class Cluster {
  constructor() {
    this.history = [];
    this.begin();
  }

  // Resets the state at the start of an event stream, because keys of requests and numbers of lanes differ between streams.
  begin() {
    this.at = 0;
    this.sections = {};
    this.names = new Map();
    this.happened = [];
    this.lanes = [];
    this.transfers = [];
  }

  take(frame) {
    const { at, seats = [], names = {}, transfers = [], happened = [], history, ...sections } = frame;
    this.at = at;
    const before = this.sections.lanes ?? [];
    if (history) this.history = history;
    Object.assign(this.sections, sections);
    this.follow(before, this.sections.lanes ?? []);
    for (const [key, name] of Object.entries(names)) this.names.set(Number(key), name);
    for (const seat of seats) this.sit(...seat);
    for (const transfer of transfers) this.transfer(transfer);
    for (const each of happened) this.note(each);
    if (this.remember()) this.forget();
    return { sections, transfers, happened };
  }

  follow(before, after) {
    after.forEach((worker, place) => {
      if (before[place] !== worker) this.lanes[place] = { worker, slots: new Map() };
    });
  }

  sit(place, slot, key, phase) {
    const { slots } = this.lanes[place];
    const stretches = slots.get(slot) ?? [];
    const last = stretches.at(-1);
    if (last && last.until === null) last.until = this.at;
    if (key) stretches.push({ key, phase, since: this.at, until: null });
    slots.set(slot, stretches);
  }

  transfer(transfer) {
    this.transfers.push({ ...transfer, at: this.at });
    const [place, slot] = transfer.from;
    const [to, toSlot] = transfer.to;
    this.note({
      at: this.at,
      kind: transfer.cause === "preempted" ? "resumed" : "migrated",
      cause: transfer.cause,
      request: this.names.get(transfer.key),
      from: { worker: this.lanes[place].worker, slot },
      to: { worker: this.lanes[to].worker, slot: toSlot },
    });
  }

  note(happening) {
    this.happened.push(happening);
    if (this.happened.length > MOST_HAPPENED) this.happened.shift();
  }

  // Adds at most one point per second to the history of the charts. Returns whether a point was added.
  remember() {
    const last = this.history.at(-1);
    if (last && this.at - last.at < 1 && this.at >= last.at) return false;
    const { totals, latencies } = this.sections;
    if (!totals || !latencies) return false;
    const parts = ({ p50, p90, p99 }) => [p50, p90, p99];
    if (last && this.at < last.at) this.history = [];
    this.history.push({
      at: this.at,
      queued: totals.queued,
      ttft: parts(latencies.ttft),
      inter_token: parts(latencies.inter_token),
    });
    while (this.history[0].at < this.at - HISTORY_S) this.history.shift();
    return true;
  }

  forget() {
    const oldest = this.at - WINDOW_S;
    const shown = new Set();
    for (const { slots } of this.lanes) {
      for (const [slot, stretches] of slots) {
        const kept = stretches.filter((it) => it.until === null || it.until > oldest);
        kept.forEach((it) => shown.add(it.key));
        if (kept.length) slots.set(slot, kept);
        else slots.delete(slot);
      }
    }
    this.transfers = this.transfers.filter((it) => it.at > oldest);
    for (const key of this.names.keys()) if (!shown.has(key)) this.names.delete(key);
  }

  // Yields the requests that are in the slots now.
  *seated() {
    for (const { worker, slots } of this.lanes) {
      for (const slot of [...slots.keys()].sort((a, b) => a - b)) {
        const last = slots.get(slot).at(-1);
        if (last.until === null) {
          yield { worker, slot, key: last.key, phase: last.phase, name: this.names.get(last.key), since: last.since };
        }
      }
    }
  }

  may(scope) {
    return this.sections.you?.scopes.includes(scope) ?? false;
  }
}
