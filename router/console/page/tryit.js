// Chat with a model over the public API, with streaming. Without a chat template, single prompts are completed.

import { events } from "./api.js";
import { $, count, el, say, seconds } from "./dom.js";

// Maximum distance in pixels from the end of the conversation at which the view scrolls with the answer.
const FOLLOWED_PX = 40;

export class TryIt {
  // `onBegun` is called with the id of a request when it begins, and with `true` in addition when the user looks it up.
  constructor(api, onBegun) {
    this.api = api;
    this.onBegun = onBegun;
    // Earlier turns, which are sent again with each message: {role, content}.
    this.history = [];
    $("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("try-form").requestSubmit($("try-start"));
    });
    $("prompt").addEventListener("input", fit);
    $("try-stop").addEventListener("click", () => this.stopping?.abort());
    $("try-clear").addEventListener("click", () => this.clear());
    $("as-chat").addEventListener("change", () => this.clear());
    $("try-model").addEventListener("change", () => {
      this.setMode();
      this.clear();
    });
  }

  // Selects chat mode by default if the model has a chat template.
  show({ router }) {
    if (!router || this.isSet) return;
    this.isSet = true;
    this.chats = router.chats;
    $("try-model").replaceChildren(...router.models.map((name) => el("option", { value: name }, name)));
    $("try-model-field").hidden = router.models.length < 2;
    this.setMode();
  }

  setMode() {
    $("as-chat").checked = this.chats.includes($("try-model").value);
    describeMode();
  }

  clear() {
    this.stopping?.abort();
    this.history = [];
    $("chat").replaceChildren();
    say($("try-status"), "");
    describeMode();
    $("prompt").focus();
  }

  async start() {
    if (this.stopping) return;
    const prompt = $("prompt").value;
    const history = this.history;
    this.stopping = new AbortController();
    this.running(true);
    turn("user", "You", prompt);
    const answer = turn("model", "Model");
    let name = null;
    $("prompt").value = "";
    fit();
    const turns = [...history, { role: "user", content: prompt }];
    try {
      const done = await this.stream(answer, turns, (begun) => {
        name = begun;
        this.onBegun(name);
      });
      say($("try-status"), done);
      answer.note(done, false, ...this.link(name));
    } catch (error) {
      const isStopped = error.name === "AbortError";
      const why = isStopped ? "stopped" : `${error.slug || "failed"}: ${error.message}`;
      say($("try-status"), why);
      answer.note(why, !isStopped, ...this.link(name));
      // Without an answer, the prompt returns to the input, so that it can be sent again.
      if (!answer.text && !$("prompt").value) $("prompt").value = prompt;
      fit();
    }
    if (answer.text && history === this.history) {
      this.history.push(turns.at(-1), { role: "assistant", content: answer.text });
    }
    this.stopping = null;
    this.running(false);
  }

  // Streams the answer, and returns a summary of the measured times. `begun` is called with the request's id.
  async stream(answer, turns, begun) {
    say($("try-status"), "waiting for the first token");
    const began = performance.now();
    const [path, body] = asked(turns);
    const response = await this.api.post(path, body, this.stopping.signal);
    begun(response.headers.get("idempotency-key"));
    let first = null;
    let usage = null;
    let reason = null;
    for await (const [, data] of events(response)) {
      if (data === "[DONE]") break;
      const told = JSON.parse(data);
      if (told.error) throw Object.assign(new Error(told.error.message), { slug: told.error.code });
      usage = told.usage ?? usage;
      reason = told.choices?.[0]?.finish_reason ?? reason;
      const [thought, text] = textsOf(told);
      if (!thought && !text) continue;
      if (first === null) {
        first = (performance.now() - began) / 1000;
        say($("try-status"), `streaming; first token after ${seconds(first)}`);
      }
      if (thought) answer.think(thought);
      if (text) answer.append(text);
    }
    return summarised((performance.now() - began) / 1000, first, usage, reason);
  }

  link(name) {
    if (!name) return [];
    const look = () => this.onBegun(name, true);
    return [el("button", { type: "button", class: "link", "aria-label": `Look up ${name}`, click: look }, "Look up")];
  }

  running(is) {
    $("try-start").hidden = is;
    $("try-stop").hidden = !is;
    $("chat").setAttribute("aria-busy", is);
  }
}

// Adds a message of the user or the model to the end of the conversation.
function turn(side, speaker, text = "") {
  const words = el("div", { class: "words" }, text);
  const notes = el("p", { class: "quiet" });
  const thoughts = el("div", { class: "thoughts quiet", hidden: true });
  const bubble = el("article", { class: `turn ${side}`, "aria-label": speaker }, thoughts, words, notes);
  $("chat").append(bubble);
  $("chat").scrollTop = $("chat").scrollHeight;
  $("chat-hint").hidden = true;
  return {
    text,
    append(more) {
      this.text += more;
      extend(words, more);
    },
    // Shows more of the model's reasoning, which is not sent back with the conversation.
    think(more) {
      thoughts.hidden = false;
      extend(thoughts, more);
    },
    note(why, isProblem, ...more) {
      notes.classList.toggle("problem", isProblem);
      notes.replaceChildren(why, ...(more.length ? [". ", ...more] : []));
      $("chat").scrollTop = $("chat").scrollHeight;
    },
  };
}

// Adds text to an element of the conversation; stays at its end if the end is in view.
function extend(element, more) {
  const box = $("chat");
  const isFollowed = box.scrollHeight - box.scrollTop - box.clientHeight < FOLLOWED_PX;
  element.append(more);
  if (isFollowed) box.scrollTop = box.scrollHeight;
}

// Adjusts the height of the input to its lines, up to its maximum height.
function fit() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function describeMode() {
  const isChat = $("as-chat").checked;
  $("system-field").hidden = !isChat;
  say(
    $("chat-hint"),
    isChat
      ? "Each message is sent with the whole conversation. Enter sends it; Shift+Enter starts a new line."
      : "The model continues the text that you begin. Enter sends it; Shift+Enter starts a new line.",
  );
  $("chat-hint").hidden = $("chat").childElementCount > 0;
}

function asked(turns) {
  const body = {
    model: $("try-model").value,
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (!$("as-chat").checked) return ["../v1/completions", { ...body, prompt: turns.at(-1).content }];
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  return ["../v1/chat/completions", { ...body, messages }];
}

// Returns the reasoning and the text of a chunk.
function textsOf({ choices: [choice] = [] }) {
  return [choice?.delta?.reasoning_content ?? "", choice?.text ?? choice?.delta?.content ?? ""];
}

function summarised(all, first, usage, reason) {
  const tokens = usage?.completion_tokens ?? 0;
  const rate = all > first && tokens > 1 ? `, ${count(Math.round((tokens - 1) / (all - first)))} tokens/s` : "";
  const after = first === null ? "" : `, the first after ${seconds(first)}${rate}`;
  const cut = reason === "length" ? "; cut at max tokens" : "";
  return `${count(tokens)} tokens in ${seconds(all)}${after}${cut}`;
}
