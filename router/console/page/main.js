// Main module: creates the parts of the page, and passes the changes in each frame to them.

import { Admin } from "./admin.js";
import { Api } from "./api.js";
import { Cluster } from "./cluster.js";
import { $, say } from "./dom.js";
import { Feed } from "./feed.js";
import { Grid } from "./grid.js";
import { Events } from "./events.js";
import { Health } from "./health.js";
import { Lanes } from "./lanes.js";
import { Latencies } from "./latencies.js";
import { Overview } from "./overview.js";
import { Prompts } from "./prompts.js";
import { Queue } from "./queue.js";
import { Recent } from "./recent.js";
import { Request } from "./request.js";
import { Scaling } from "./scaling.js";
import { TryIt } from "./tryit.js";

const api = new Api();
const cluster = new Cluster();
const overview = new Overview();
const queue = new Queue();
const prompts = new Prompts();
const latencies = new Latencies();
const events = new Events();
const health = new Health();
const scaling = new Scaling();
const admin = new Admin(api);
const lanes = new Lanes(cluster, (name) => request.look(name));
const request = new Request(api, cluster, (name) => lanes.seek(name));
const recent = new Recent(api, (name) => request.look(name));
const tryIt = new TryIt(api, (name, isWanted) => {
  lanes.seek(name);
  if (isWanted) request.look(name).then(() => $("request").scrollIntoView());
});

const feed = new Feed(api, {
  onOpen: () => cluster.begin(),
  onFrame: (frame) => {
    const news = cluster.take(frame);
    events.announce(news, cluster.at);
    show(news.sections);
  },
  onState: (state, text) => {
    $("connection").dataset.state = state;
    say($("connection"), text);
  },
});
const grid = new Grid((chosen) => feed.watch(chosen));

let shownAt = -1;

function show(changed) {
  const all = cluster.sections;
  overview.show(changed);
  grid.show(changed, all);
  if ("missing_workers" in changed) {
    $("missing-workers").hidden = !changed.missing_workers;
    say($("missing-workers"), `Workers: ${changed.missing_workers}`);
  }
  health.show(changed, all);
  tryIt.show(changed);
  admin.show(changed, all);
  if (!document.hidden) draw(changed);
}

// Updates the parts that need not be up to date while the page is hidden.
function draw(changed) {
  const all = cluster.sections;
  lanes.draw();
  // Parts that show times are updated once per second.
  const isSecond = Math.floor(cluster.at) !== shownAt;
  shownAt = Math.floor(cluster.at);
  queue.show(changed, all, isSecond ? cluster.history : []);
  prompts.show(changed);
  latencies.show(isSecond ? all : {}, isSecond ? cluster.history : []);
  if (!isSecond) return;
  lanes.tell();
  events.show(cluster);
  scaling.show(all.scaling, all.router?.models, cluster.at);
  recent.show(cluster);
}

document.addEventListener("visibilitychange", () => {
  // Changes that arrived while the page was hidden do not come again. Before the first frame there is nothing to draw.
  if (!document.hidden && cluster.at) draw(cluster.sections);
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.use($("key").value);
  $("key").value = "";
  say($("connection"), "connecting");
  feed.watch(feed.lanes);
});
$("key").placeholder = api.key ? "stored for this tab" : "none";

feed.watch(null);
