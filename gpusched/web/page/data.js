// What the server says, kept up to date: everything once, then what has changed since. gpusched/web/rows.py has the keys.

import {ACTIVE, many} from "./words.js";

const files = document.querySelector('meta[name="gpusched-data"]').content === "files";
const PATHS = {state: "data/state.json", forecast: "data/forecast.json", usage: "data/usage.json"};
const AGAIN_S = 60;

export const world = {
  files, feed: "", version: 0, head: {partitions: [], notes: []}, nodes: new Map(), jobs: new Map(),
  forecast: {jobs: {}}, usage: {hours: [], fine: [], users: {}}, me: {}, live: "wait", skew: 0, seen: 0, asOf: 0,
};
const watchers = new Set();
let derived = null;

export const now = () => world.files ? world.asOf : Date.now() / 1000 + world.skew;
export const watch = watcher => { watchers.add(watcher); return () => watchers.delete(watcher); };
const notify = what => { for (const watcher of [...watchers]) watcher(what); };

async function ask(path) {
  const request = () => fetch(path, {headers: {Accept: "application/json"}});
  const answer = await request().catch(() => new Promise(done => setTimeout(done, 400)).then(request)); // another network, perhaps
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error ?? `the server responded with ${answer.status}`);
  }
  const text = await answer.text();
  performance.mark("update-begins");
  return JSON.parse(text);
}

export const jobDetails = id => !files ? ask(`api/job/${encodeURIComponent(id)}`)
  : ask(`data/jobs/${id.slice(0, 4)}.json`).catch(() => ({})).then(found => found[id] ?? Promise.reject(new Error("These files have no history of this job.")));
export const jobLog = (id, rank, attempt) => ask(
  `api/job/${encodeURIComponent(id)}/log?rank=${rank}${attempt ? `&attempt=${attempt}` : ""}`);

const keyOf = job => job.key ?? job.id;

function take(answer) {
  if (answer.changes) {
    for (const change of answer.changes) {
      if (change.head) world.head = change.head;
      if (change.all_nodes) world.nodes = new Map(change.all_nodes.map(n => [n.name, n]));
      for (const node of change.nodes ?? []) world.nodes.set(node.name, node);
      for (const key of change.gone ?? []) world.jobs.delete(key);
      for (const job of change.jobs ?? []) world.jobs.set(keyOf(job), job);
    }
  } else {
    world.head = answer.head;
    world.nodes = new Map(answer.nodes.map(n => [n.name, n]));
    world.jobs = new Map(answer.jobs.map(job => [keyOf(job), job]));
  }
  world.feed = answer.feed; world.version = answer.v;
  world.asOf = answer.now; world.skew = answer.now - Date.now() / 1000; world.seen = Date.now();
  derived = null;
  notify("view");
  performance.measure("update", "update-begins");
}

let pulling = false, wanted = null;
async function pull() { // one at a time; news that come meanwhile are asked for after it
  if (pulling) return;
  pulling = true;
  try {
    while (wanted && !document.hidden) {
      const signs = wanted; wanted = null;
      if (signs.feed !== world.feed || signs.v > world.version) take(await ask(`api/state?since=${world.feed}-${world.version}`));
      for (const name of ["forecast", "usage"]) {
        const mark = `${signs.feed}-${signs[name]}`;
        if (!signs[name] || marks[name] === mark) continue;
        world[name] = await ask(`api/${name}`);
        marks[name] = mark; derived = null;
        notify(name);
      }
    }
  } catch { lost(); } finally { pulling = false; }
}
const marks = {};

let again = 0;
function lost() { // a new source says what there is: with the old one it would stay unknown until something changes
  world.live = "lost"; notify("live");
  clearTimeout(again);
  again = setTimeout(() => { if (world.live === "lost" && !document.hidden) listen(); }, 3000);
}

let source = null;
function listen() {
  source?.close();
  source = new EventSource("api/events");
  source.onmessage = event => { wanted = JSON.parse(event.data); if (world.live !== "live") { world.live = "live"; notify("live"); } pull(); };
  source.onerror = () => {
    const closed = source.readyState === EventSource.CLOSED;
    if (closed) source = null;
    lost();
  };
}

async function readFiles() {
  try {
    const [state, forecast, usage] = await Promise.all(Object.values(PATHS).map(path => ask(path)));
    Object.assign(world, {forecast, usage, live: "files"});
    take(state);
  } catch { world.live = "lost"; notify("live"); }
}

export async function begin() {
  if (files) { setInterval(readFiles, AGAIN_S * 1000); return readFiles(); }
  ask("api/me").then(me => { world.me = me; notify("me"); }).catch(() => {});
  document.addEventListener("visibilitychange", () => { // a browser has few connections to one server: hidden pages keep none
    if (document.hidden) { source?.close(); source = null; } else listen();
  });
  try { take(await ask("api/state")); } catch (error) { world.head.warning = error.message; notify("view"); }
  listen();
}

// -- what follows from it, made once for each change

export function facts() {
  if (derived) return derived;
  const at = new Map(), on = new Map(), users = new Map(), groups = new Map(), by = {running: [], waiting: [], ended: []};
  const count = (sums, name, held, asked) => {
    const of = sums.get(name) ?? {user: name, held: 0, asked: 0};
    of.held += held; of.asked += asked;
    sums.set(name, of);
  };
  const add = (job, held, asked) => { count(users, job.user, held, asked); if (job.group) count(groups, job.group, held, asked); };
  for (const job of world.jobs.values()) {
    if (ACTIVE.has(job.state)) {
      by.running.push(job);
      add(job, gpusOf(job), 0);
      for (const [node, ...gpus] of job.allocation ?? []) {
        if (!at.has(node)) { at.set(node, new Map()); on.set(node, new Set()); }
        on.get(node).add(job);
        for (const gpu of gpus) at.get(node).set(gpu, job);
      }
    } else if (job.state === "PENDING") {
      by.waiting.push(job);
      add(job, 0, (job.array_count ?? 1) * gpusOf(job));
    } else by.ended.push(job);
  }
  const starts = world.forecast.jobs;
  by.waiting = by.waiting.map(job => [starts[job.id]?.[0] ?? 1e12, job.submit_time, job]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , job]) => job);
  by.running.sort((a, b) => (b.start_time ?? Infinity) - (a.start_time ?? Infinity));
  by.ended.sort((a, b) => b.end_time - a.end_time);
  const gpus = {all: 0, busy: 0, idle: 0, free: 0, cut: 0, out: 0}, sums = {watts: 0, power: false, use: 0, known: 0};
  for (const node of world.nodes.values()) {
    [...node.gpus].forEach((letter, i) => {
      gpus.all += 1;
      const use = node.util?.[i];
      if (letter === "A") { gpus[use !== undefined && use !== null && use < 5 ? "idle" : "busy"] += 1; if (use !== undefined && use !== null) { sums.use += use / 100; sums.known += 1; } }
      else if (letter === "F" && !OUT.has(node.state)) gpus.free += 1;
      else if (letter === "S" && !OUT.has(node.state)) gpus.cut += 1;
      else gpus.out += 1;
      const watts = node.watt?.[i];
      if (watts !== undefined && watts !== null) { sums.watts += watts; sums.power = true; }
    });
  }
  const waits = by.waiting.reduce((n, job) => n + (job.array_count ?? 1), 0);
  const ranked = sums => [...sums.values()].sort((a, b) => b.held - a.held || b.asked - a.asked);
  derived = {at, on, by, gpus, sums, waits, users: ranked(users), groups: ranked(groups)};
  return derived;
}

export const factsAnew = () => { derived = null; return facts(); };
export const OUT = new Set(["DOWN", "DRAINED", "DRAINING", "UNKNOWN"]);
export const expected = job => world.forecast.jobs[job.id];
export const gpuIndex = (node, i) => node.index ? node.index[i] : i;
export const gpusOf = job => job.gpu_share ?? job.gpus ?? 0; // slices by their share of a GPU
export const asks = job => job.profile ? `${job.profile}:${job.gpus}` : many(job.gpus ?? 0, "GPU");
export const slicesOf = (node, i) => node.slices?.[gpuIndex(node, i)] ?? []; // of a GPU that is cut: [name, letter, job, reason]
