// Pages, keys, what stands above every page. Each page is a function (box, argument) -> {update(what), close()}.

import {begin, world, watch, now} from "./data.js";
import {h, clock, hush, repaint, span} from "./words.js";
import {overview} from "./overview.js";
import {jobsPage} from "./jobs.js";
import {jobPage} from "./job.js";
import {nodesPage, nodePage} from "./nodes.js";
import {timelinePage} from "./timeline.js";
import {usagePage} from "./usage.js";

const PAGES = {"": overview, jobs: jobsPage, job: jobPage, nodes: nodesPage, node: nodePage, timeline: timelinePage, usage: usagePage};
const KEYS = [["g o", "overview"], ["g j", "jobs"], ["g n", "nodes"], ["g t", "timeline"], ["g u", "usage"], ["/", "search"],
  ["j k", "next, previous row"], ["Enter", "open it"], ["Esc", "back"], ["?", "these keys"]];
const main = document.getElementById("main");
let page = null, ready = false;

function open() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(part => { try { return decodeURIComponent(part); } catch { return part; } });
  const [key, question] = name.split("?");
  page?.close?.();
  hush();
  main.replaceChildren();
  page = (PAGES[key] ?? overview)(main, rest.join("/"), new URLSearchParams(question ?? ""));
  const top = {job: "jobs", node: "nodes"}[key] ?? key;
  for (const link of document.querySelectorAll("nav a")) {
    const on = link.getAttribute("href") === `#/${top}`;
    if (on) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const title = main.querySelector("h1")?.textContent;
  document.title = `${title && title !== "Overview" ? `${title} · ` : ""}gpusched${world.head.host ? ` on ${world.head.host}` : ""}`;
  scrollTo(0, 0);
}

function above() {
  document.getElementById("host").textContent = world.head.host ?? "";
  const {user, names} = world.me;
  document.getElementById("who").textContent = user ?? (names ? "not logged in" : "");
  const live = document.getElementById("live");
  const control = world.head.controller;
  const silent = control && world.live === "live" ? control.runs ? "controller busy" : control.seen ? `no controller since ${clock(control.seen, now())}` : "no controller yet" : "";
  const text = silent || {live: "live", wait: "connecting", lost: `offline since ${world.seen ? clock(world.seen / 1000, now()) : "the start"}`,
    files: `as of ${clock(world.asOf, Date.now() / 1000)}`}[world.live];
  live.className = silent ? "lost" : world.live;
  live.title = world.head.engine ?? "";
  if (live.lastElementChild.textContent !== text) live.lastElementChild.textContent = text;
  const old = world.files && Date.now() / 1000 - world.asOf > 1800 ? [`these files are ${span(Date.now() / 1000 - world.asOf)} old`] : [];
  const lines = [world.head.warning, ...old, ...(world.head.notes ?? []), world.head.simulated && "GPU figures of this demonstration are simulated, not measured"].filter(Boolean);
  const box = document.getElementById("notes");
  if (box.dataset.said !== lines.join("\n")) { box.dataset.said = lines.join("\n"); box.replaceChildren(...lines.map(line => h("p", {}, line))); }
}

watch(what => {
  if (!ready && world.version) { ready = true; open(); }
  else if (ready) page?.update?.(what);
  above();
  if (ready && !performance.getEntriesByName("first-view").length) requestAnimationFrame(() => setTimeout(() => performance.mark("first-view")));
});
addEventListener("hashchange", () => { if (ready) { open(); main.focus({preventScroll: true}); } });
document.querySelector(".skip").addEventListener("click", event => { event.preventDefault(); main.focus(); });
let resized = 0;
addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(() => page?.update?.("size")); });
setInterval(() => { if (!document.hidden && ready) { page?.update?.("clock"); above(); } }, 5000);

// -- light and dark

const button = document.getElementById("theme");
const kept = { get: () => { try { return localStorage.getItem("gpusched-theme"); } catch { return null; } }, set: value => { try { localStorage.setItem("gpusched-theme", value); } catch { /* private windows */ } } };
function theme(value) {
  if (value === "auto") document.documentElement.removeAttribute("data-theme"); else document.documentElement.setAttribute("data-theme", value);
  button.textContent = {auto: "Auto", light: "Light", dark: "Dark"}[value];
  repaint();
  page?.update?.("size");
}
const order = ["auto", "light", "dark"];
theme(order.includes(kept.get()) ? kept.get() : "auto");
button.addEventListener("click", () => {
  const next = order[(order.indexOf(kept.get() ?? "auto") + 1) % order.length];
  kept.set(next); theme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { repaint(); page?.update?.("size"); });

// -- keys

const dialog = document.getElementById("keys");
dialog.append(h("h2", {}, "Keys"), h("dl", {}, KEYS.flatMap(([key, what]) => [h("dt", {}, key.split(" ").map(k => h("kbd", {}, k))), h("dd", {}, what)])),
  h("form", {method: "dialog"}, h("button", {}, "Close")));
document.getElementById("help").addEventListener("click", () => dialog.showModal());
let before = "";
document.addEventListener("keydown", event => {
  const typing = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  if (event.key === "Escape") {
    if (typing) event.target.blur(); else if (/^#\/(job|node)\//.test(location.hash)) history.back();
    hush();
    return;
  }
  if (typing) return;
  const go = before === "g" && {o: "", j: "jobs", n: "nodes", t: "timeline", u: "usage"}[event.key];
  before = event.key;
  if (go !== undefined && go !== false) { location.hash = `#/${go}`; before = ""; event.preventDefault(); }
  else if (event.key === "?") dialog.showModal();
  else if (event.key === "/") {
    event.preventDefault();
    const field = main.querySelector("input[type=search]");
    if (field) field.focus(); else { location.hash = "#/jobs"; setTimeout(() => main.querySelector("input[type=search]")?.focus(), 50); }
  } else if (event.key === "j" || event.key === "k") page?.step?.(event.key === "j" ? 1 : -1);
});

begin();
