// A request of one's own, streamed by the API that clients use.

import { events } from "./api.js";
import { $, el, say, seconds } from "./dom.js";

export class TryIt {
  // `onBegun` is told the request's name.
  constructor(api, onBegun) {
    this.api = api;
    this.onBegun = onBegun;
    $("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    $("try-stop").addEventListener("click", () => this.stopping?.abort());
  }

  // A model that has chats is asked for one, unless somebody has chosen.
  show({ router }) {
    if (!router || this.isSet) return;
    this.isSet = true;
    $("as-chat").checked = router.has_template;
  }

  async start() {
    this.stopping = new AbortController();
    this.running(true);
    $("try-output").textContent = "";
    const began = performance.now();
    try {
      await this.stream(began);
    } catch (error) {
      const why = error.name === "AbortError" ? "stopped" : `${error.slug || "failed"}: ${error.message}`;
      say($("try-status"), why);
    }
    this.running(false);
  }

  async stream(began) {
    say($("try-status"), "waiting for the first token");
    const [path, body] = asked();
    const answer = await this.api.post(path, body, this.stopping.signal);
    const name = answer.headers.get("idempotency-key");
    this.onBegun(name);
    let first = null;
    let chunks = 0;
    for await (const [, data] of events(answer)) {
      if (data === "[DONE]") break;
      const told = JSON.parse(data);
      if (told.error) throw Object.assign(new Error(told.error.message), { slug: told.error.code });
      const text = textOf(told);
      if (!text) continue;
      first ??= performance.now() - began;
      chunks += 1;
      $("try-output").append(text);
      say($("try-status"), `streaming; first token after ${seconds(first / 1000)}`);
    }
    const all = (performance.now() - began) / 1000;
    const pieces = first === null ? "No text" : `${chunks} pieces`;
    const after = first === null ? "" : `, the first after ${seconds(first / 1000)}`;
    $("try-status").replaceChildren(
      `${pieces} in ${seconds(all)}${after}. `,
      el("button", { type: "button", class: "link", click: () => this.onBegun(name, true) }, `Look up ${name}`),
    );
  }

  running(is) {
    $("try-start").disabled = is;
    $("try-stop").disabled = !is;
  }
}

function asked() {
  const prompt = $("prompt").value;
  const body = {
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    stream: true,
  };
  return $("as-chat").checked
    ? ["../v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }] }]
    : ["../v1/completions", { ...body, prompt }];
}

function textOf({ choices: [choice] = [] }) {
  return choice?.text ?? choice?.delta?.content ?? "";
}
