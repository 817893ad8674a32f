// The list of jobs: only the rows in sight are in the document, so that ten thousand scroll like ten.

import {world, facts, asks, expected, gpusOf, now} from "./data.js";
import {h, chip, choice, count, span, clock, names, many, ACTIVE, percent, recall, remember, swatch} from "./words.js";
import {starts, range} from "./overview.js";

const COLUMNS = [["id", "Job"], ["name", "Name"], ["user", "User"], ["part", "Partition"], ["gpus", "GPUs"], ["state", "State"], ["where", "Nodes / reason"], ["time", "Time"], ["when", "Ends or starts"]];
const SORTS = {
  id: job => job.id, name: job => job.name, user: job => job.user, part: job => job.partition, gpus: job => -gpusOf(job), state: job => job.state,
  time: job => -((job.end_time ?? now()) - (job.start_time ?? job.submit_time)), when: job => ACTIVE.has(job.state) ? ending(job) : job.end_time ? -job.end_time : expected(job)?.[0] ?? Infinity,
};
const ending = job => world.forecast.ends?.[job.id] ?? job.progress_end ?? job.limit_end ?? Infinity;

// A list of which only the rows in sight are drawn. make(item) gives a row; height in pixels, as the style sheet has it.
export function rowsInSight(box, make, name) {
  const body = h("div", {class: "body", role: "rowgroup"});
  box.append(body);
  let items = [], drawn = new Map();
  const height = () => parseFloat(getComputedStyle(box).getPropertyValue("--row"));
  function draw(anew) {
    const row = height(), top = body.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / row) - 8), last = Math.min(items.length, Math.ceil((innerHeight - top) / row) + 8);
    const kept = new Map();
    for (let n = first; n < last; n++) {
      const old = drawn.get(n);
      if (!anew && old) { kept.set(n, old); drawn.delete(n); continue; }
      const node = make(items[n]);
      node.style.top = `${n * row}px`;
      node.setAttribute("aria-rowindex", n + 2);
      if (old) { // a link that has the focus keeps it
        const focused = old.contains(document.activeElement);
        old.replaceWith(node); drawn.delete(n);
        if (focused) node.querySelector("a")?.focus({preventScroll: true});
      } else body.append(node);
      kept.set(n, node);
    }
    for (const node of drawn.values()) node.remove();
    drawn = kept;
  }
  let frame = 0;
  const moved = () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(() => draw(false)); };
  addEventListener("scroll", moved, {passive: true});
  return {
    show(list) { items = list; body.style.height = `${items.length * height()}px`; box.setAttribute("aria-rowcount", items.length + 1); draw(true); },
    step(by) {
      const links = [...body.querySelectorAll("a.open")].sort((a, b) => a.closest("[role=row]").offsetTop - b.closest("[role=row]").offsetTop);
      const at = links.indexOf(document.activeElement), next = at < 0 ? links.find(l => l.getBoundingClientRect().top > 0) : links[at + by];
      next?.focus(); next?.scrollIntoView({block: "nearest"});
    },
    close() { removeEventListener("scroll", moved); },
    name,
  };
}

export const matcher = text => {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return fields => words.every(word => fields.some(field => field && field.toLowerCase().includes(word)));
};

export function jobsPage(main, _, query) {
  const before = recall("jobs", {});
  let of = query.get("of") ?? (query.size ? "now" : before.of ?? "now"), text = query.get("q") ?? "";
  let sort = query.get("sort") ?? (query.size ? "" : before.sort ?? ""), turned = query.has("down") || (!query.size && !!before.turned), mine = query.has("mine") || (!query.size && !!before.mine);
  if (!SORTS[sort]) sort = "";
  const own = () => world.me.user ?? recall("me", "");
  const field = h("input", {type: "search", placeholder: "Search: name, user, node, reason, id", "aria-label": "Search jobs", value: text, spellcheck: "false"});
  const tabs = h("div", {class: "tabs"}), found = h("p", {class: "quiet", role: "status"}), who = h("div", {class: "mine"});
  const head = h("div", {class: "row heads", role: "row"}, COLUMNS.map(([key, title]) => h("span", {class: key, role: "columnheader"}, h("button", {type: "button", onclick: () => { turned = sort === key && !turned; sort = key; keep(); update("view"); }}, title))));
  const box = h("div", {class: "list jobs", role: "table", "aria-label": "Jobs"}, h("div", {role: "rowgroup"}, head));
  main.append(h("div", {class: "title"}, h("h1", {}, "Jobs"), h("div", {class: "tools"}, tabs, who, field)), found, box);
  const list = rowsInSight(box, row);
  field.addEventListener("input", () => { text = field.value; update("view"); keep(); });
  const keep = () => {
    const q = new URLSearchParams();
    for (const [key, value] of [["of", of !== "now" && of], ["q", text], ["sort", sort], ["down", turned && "1"], ["mine", mine && "1"]]) if (value) q.set(key, value);
    history.replaceState(null, "", `#/jobs${String(q) ? `?${q}` : ""}`);
    remember("jobs", {of, sort, turned, mine});
  };

  // Whose jobs "My jobs" are: the login proxy's user where there is one, else chosen once and kept by this browser.
  function mineTools() {
    const users = [...new Set([...world.jobs.values()].map(job => job.user))].sort(), me = own();
    if (me && !users.includes(me)) users.unshift(me);
    const button = h("button", {type: "button", class: "toggle", "aria-pressed": String(mine), onclick: () => { mine = !mine; keep(); update("view"); }}, "My jobs");
    const asked = mine && !world.me.user && h("select", {"aria-label": "Your user name", onchange: event => { remember("me", event.target.value); update("view"); }},
      h("option", {value: ""}, "your user name"), users.map(name => h("option", {value: name, selected: name === me}, name)));
    const drawn = `${mine}/${me}/${asked ? users.join() : ""}`;
    if (who.dataset.drawn !== drawn) { who.dataset.drawn = drawn; who.replaceChildren(button, asked || ""); }
  }

  function chosen() {
    const {by} = facts();
    const all = {now: () => [...by.running, ...by.waiting], running: () => by.running, waiting: () => by.waiting, ended: () => by.ended}[of]?.() ?? [];
    const fits = matcher(text);
    const ours = mine && own() ? all.filter(job => job.user === own()) : all;
    const list = text ? ours.filter(job => fits([job.id, job.name, job.user, job.partition, job.reason, job.state, job.group, job.qos, ...(job.allocation ?? []).map(o => o[0])])) : [...ours];
    if (sort) { const by = SORTS[sort] ?? SORTS.when; list.sort((a, b) => { const [x, y] = [by(a), by(b)]; return (x < y ? -1 : x > y ? 1 : 0) * (turned ? -1 : 1); }); }
    return list;
  }

  function update(what) {
    if (what === "live" || what === "usage") return;
    const {by, waits} = facts();
    mineTools();
    tabs.replaceChildren(choice("which", [["now", `Now ${count(by.running.length + waits)}`], ["running", `Running ${count(by.running.length)}`], ["waiting", `Pending ${count(waits)}`], ["ended", `Ended ${count(by.ended.length)}${world.head.last_ended ? "+" : ""}`]], of, value => { of = value; keep(); update("view"); }));
    const jobs = chosen();
    found.textContent = text ? `${many(jobs.length, "job")} with “${text}”` : of === "ended" ? world.head.last_ended ? `the last ${count(world.head.last_ended)} of the last 24 hours` : "of the last 24 hours" : "";
    found.hidden = !found.textContent;
    for (const title of head.children) title.setAttribute("aria-sort", title.classList.contains(sort) ? turned ? "descending" : "ascending" : "none");
    list.show(jobs);
    if (!jobs.length) { found.hidden = false; found.textContent = text ? `No job with “${text}”` : "No jobs."; }
  }
  update("view");
  return {update, close: list.close, step: list.step};
}

export function progress(job) {
  const share = job.of && job.step !== undefined ? Math.min(1, job.step / job.of) : null;
  return share === null ? null : h("span", {class: "meter", title: `step ${count(job.step)} of ${count(job.of)}`}, h("i", {style: {width: `${share * 100}%`}}), h("em", {}, percent(share)));
}

export function row(job) {
  const at = now(), active = ACTIVE.has(job.state), start = expected(job);
  const time = active ? span(at - (job.start_time ?? at)) : job.end_time && job.start_time ? span(job.end_time - job.start_time) : span(at - job.submit_time);
  let when = "";
  if (active) when = ending(job) < Infinity ? h("span", {title: job.limit_end ? `limit ${clock(job.limit_end, at)}` : ""}, `~${clock(ending(job), at)}`) : "";
  else if (job.end_time) when = clock(job.end_time, at);
  else if (start) when = h("span", {title: `expected start${range(start)}`}, starts(start), h("small", {}, range(start)));
  const where = active || job.end_time ? names((job.allocation ?? []).map(o => o[0])) : "";
  const why = job.reason ? `${job.reason}${job.exit_code ? ` ${job.exit_code}` : ""}` : "";
  const id = job.array_tasks ? job.array_id : job.id;
  const open = h("a", {class: "open", href: `#/job/${job.id}`, title: job.array_tasks ? `${id}_[${job.array_tasks}]` : id}, id, job.array_tasks ? `_[${job.array_tasks}]` : "");
  return h("div", {class: `row ${active ? "run" : ""}`, role: "row", onclick: event => { if (!event.target.closest("a")) location.hash = `#/job/${job.id}`; }},
    h("span", {class: "id", role: "cell"}, open),
    h("span", {class: "name", role: "cell", title: job.name}, h("span", {}, job.name), job.profile ? h("small", {}, asks(job)) : ""),
    h("span", {class: "user", role: "cell"}, swatch(job.user), job.user),
    h("span", {class: "part", role: "cell"}, job.partition),
    h("span", {class: "gpus", role: "cell"}, count(gpusOf(job)), job.array_count ? h("small", {}, ` × ${count(job.array_count)}`) : ""),
    h("span", {class: "state", role: "cell"}, chip(job.state)),
    h("span", {class: "where", role: "cell", title: job.message ?? ""}, where ? h("span", {class: "mono"}, where) : "", progress(job), why && !active ? h("span", {class: "why"}, where ? ` ${why}` : why, job.message && !job.end_time ? h("small", {}, ` ${job.message}`) : "") : ""),
    h("span", {class: "time", role: "cell"}, time),
    h("span", {class: "when", role: "cell"}, when));
}
