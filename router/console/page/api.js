// HTTP calls to the router that serves this page. The API key is stored only for this browser tab, and sent only to this router.

const KEPT = "everlift.key";

export class Refusal extends Error {
  constructor(status, slug, message) {
    super(message);
    this.status = status;
    this.slug = slug;
  }
}

export class Api {
  constructor() {
    this.key = sessionStorage.getItem(KEPT) ?? "";
  }

  use(key) {
    this.key = key.trim();
    if (this.key) sessionStorage.setItem(KEPT, this.key);
    else sessionStorage.removeItem(KEPT);
  }

  // Returns the response if its status is a success. Throws a Refusal otherwise.
  async open(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    if (!answer.ok) throw await refused(answer);
    return answer;
  }

  async get(path) {
    return (await this.open(path)).json();
  }

  post(path, body, signal) {
    const headers = { "content-type": "application/json" };
    return this.open(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  async ask(path, body) {
    return (await this.post(path, body)).json();
  }
}

async function refused(answer) {
  try {
    const { error } = await answer.json();
    return new Refusal(answer.status, error.code, error.message);
  } catch {
    return new Refusal(answer.status, "", `the router answered ${answer.status}`);
  }
}

// Yields the server-sent events of a response as [kind, data].
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const [kind, data] = read(part);
        // A block without data, as a keep-alive comment, is no event.
        if (data.length) yield [kind, data.join("\n")];
      }
    }
  } finally {
    // Otherwise the router continues a request whose answer is no longer read.
    await reader.cancel();
  }
}

function read(event) {
  let kind = "message";
  const data = [];
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return [kind, data];
}
