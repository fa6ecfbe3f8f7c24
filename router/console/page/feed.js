// Client of the console's event stream, which reconnects when the stream breaks.

import { events, Refusal } from "./api.js";

const RETRY_MS = 500;
const MOST_RETRY_MS = 10_000;

export class Feed {
  // `onOpen` is called when a stream begins; the stream then sends the whole state again. `onFrame` is called with each frame.
  // `onState` is called with live, lost or refused, and a text.
  constructor(api, { onOpen, onFrame, onState }) {
    this.api = api;
    this.onOpen = onOpen;
    this.onFrame = onFrame;
    this.onState = onState;
    this.lanes = null;
    this.attempt = null;
  }

  // Opens a stream. `lanes` are the ids of the workers whose slots are shown; null: the router chooses them.
  watch(lanes) {
    this.lanes = lanes;
    this.attempt?.abort();
    this.attempt = new AbortController();
    this.follow(this.attempt.signal);
  }

  async follow(signal) {
    let pause = RETRY_MS;
    while (!signal.aborted) {
      try {
        await this.read(signal, () => (pause = RETRY_MS));
        this.onState("lost", "the router closed the connection");
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refusal && [401, 403].includes(error.status)) {
          this.onState("refused", error.message);
          return;
        }
        this.onState("lost", error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, MOST_RETRY_MS);
    }
  }

  async read(signal, onLive) {
    const asked = this.lanes ? `?lanes=${this.lanes.map(encodeURIComponent).join(",")}` : "";
    const answer = await this.api.open(`feed${asked}`, { signal });
    let isOpen = false;
    for await (const [kind, data] of events(answer)) {
      if (signal.aborted) return;
      const told = JSON.parse(data);
      if (kind === "error") throw new Refusal(told.error.code === "unauthenticated" ? 401 : 503, told.error.code, told.error.message);
      if (!isOpen) {
        isOpen = true;
        this.onOpen();
        this.onState("live", "live");
        onLive();
      }
      this.onFrame(told);
    }
  }
}
