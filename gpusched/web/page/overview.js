// The first page: utilization, pending jobs, what happens next, usage.

import {world, facts, asks, expected, gpusOf, now, OUT} from "./data.js";
import {h, count, many, percent, power, span, clock, choice, names, short, recall, remember} from "./words.js";
import {bar, sparkline} from "./charts.js";
import {gpuMap, legend} from "./map.js";
import {timeline, timelineLegend, SPANS} from "./timeline.js";


export function overview(main) {
  const tiles = h("section", {class: "tiles", "aria-label": "Now"});
  const mapBox = h("div", {class: "maps"}), key = h("div", {}), next = h("div", {}), users = h("div", {}), odd = h("div", {});
  const bars = h("div", {});
  const hours = recall("overview-hours", 6, SPANS.slice(0, 3).map(s => s[0]));
  const map = gpuMap(mapBox), ahead = timeline(bars, {ahead: hours, high: () => innerWidth < 700 ? 280 : 360}), looks = h("div", {class: "keyed"});
  let byUser = recall("colour", "use") === "user", byGroup = recall("subject", "user") === "group";
  const subject = h("span", {});
  const colours = value => { byUser = value === "user"; remember("colour", value); key.replaceChildren(legend(byUser)); map.byUser(byUser); };
  main.append(h("h1", {class: "unseen"}, "Overview"), tiles,
    h("div", {class: "two"},
      h("div", {class: "left"},
        h("section", {class: "panel"}, h("div", {class: "head"}, h("h2", {}, "GPUs"), choice("colour", [["use", "Utilization"], ["user", "User"]], byUser ? "user" : "use", colours)), mapBox, key), odd,
        h("section", {class: "panel flush"}, h("div", {class: "head"}, h("h2", {}, "Next hours"), choice("how far ahead", SPANS.slice(0, 3), hours, value => { remember("overview-hours", value); ahead.ahead(value); })), bars, looks)),
      h("div", {class: "stacked"},
        h("section", {class: "panel"}, h("div", {class: "head"}, h("h2", {}, "Starting next"), h("a", {href: "#/jobs?of=waiting"}, "All pending jobs")), next),
        h("section", {class: "panel"}, h("div", {class: "head"}, h("h2", {}, "Usage"), subject, h("a", {href: "#/usage"}, "by day")), users))));
  key.replaceChildren(legend(byUser));
  map.byUser(byUser);

  function figures() {
    const {gpus, sums, waits, by} = facts(), held = gpus.busy + gpus.idle;
    const asked = by.waiting.reduce((n, job) => n + gpusOf(job) * (job.array_count ?? 1), 0);
    const longest = by.waiting.reduce((t, job) => Math.min(t, job.submit_time), Infinity);
    const fine = world.usage.fine, use = fine.map(p => [p[0], p[3]]), kw = fine.map(p => [p[0], p[4]]);
    const soon = expected(by.waiting.find(expected) ?? {});
    const kwh = fine.reduce((sum, p) => sum + (p[4] ?? 0) / 12, 0);
    const tile = (name, value, unit, under, ...more) => h("div", {class: "tile"}, h("h2", {}, name), h("p", {class: "big"}, value, h("small", {}, unit)), ...more, h("p", {class: "under"}, under));
    tiles.replaceChildren(
      tile("GPUs in use", count(held), ` of ${count(gpus.all)}`,
        [h("span", {}, `${count(gpus.free)} free`), gpus.cut ? h("span", {}, `${count(gpus.cut)} cut into slices, all free`) : null, gpus.idle ? h("span", {class: "warn"}, `${count(gpus.idle)} allocated but idle`) : null, gpus.out ? h("span", {}, `${count(gpus.out)} out of service`) : null],
        bar([["held-3", gpus.busy], ["idle", gpus.idle], ["free", gpus.free + gpus.cut], ["out", gpus.out]], gpus.all)),
      tile("Queue", count(waits), " pending",
        waits ? [h("span", {}, `${count(by.running.length)} running`), h("span", {}, `pending jobs request ${many(asked, "GPU")}`), h("span", {}, `longest wait ${span(now() - longest)}`), soon ? h("span", {}, `next start ${starts(soon)}${range(soon)}`) : null] : [h("span", {}, `${count(by.running.length)} running, none pending`)]),
      tile("Utilization", sums.known ? percent(sums.use / sums.known) : "–", " of allocated GPUs", [h("span", {}, "all GPUs, 24 h")], sparkline(use, 1)),
      tile("Power", sums.power ? power(sums.watts) : "–", " now", [h("span", {}, kwh ? `${short(kwh)} kWh in 24 h` : sums.power ? "24 h energy not recorded yet" : "no power readings")], sparkline(kw)));
  }

  function lists() {
    const {by, groups} = facts(), all = byGroup && groups.length ? groups : facts().users, rows = innerWidth > 1180 && world.nodes.size > 400 ? 17 : 9; // as many as stand beside the map
    next.replaceChildren(by.waiting.length ? h("ul", {class: "rows"}, by.waiting.slice(0, rows).map(job => {
      const start = expected(job);
      return h("li", {}, h("a", {href: `#/job/${job.id}`}, h("span", {class: "what"}, h("b", {}, job.name), h("small", {}, `${job.user} · ${job.partition}${job.array_count ? ` · ${many(job.array_count, "task")}` : ""}`)),
        h("span", {class: "num"}, asks(job)), h("span", {class: "when"}, start ? starts(start) : "", h("small", {}, start ? range(start) : job.reason ?? ""))));
    })) : h("p", {class: "quiet"}, "No pending jobs."));
    subject.hidden = !groups.length;
    if (groups.length && !subject.firstChild) subject.append(choice("subject", [["user", "Users"], ["group", "Groups"]], byGroup ? "group" : "user", value => { byGroup = value === "group"; remember("subject", value); lists(); }));
    const most = Math.max(1, ...all.map(u => u.held + u.asked));
    users.replaceChildren(all.length ? h("ul", {class: "rows users"}, all.slice(0, rows).map(u => h("li", {}, h("a", {href: `#/jobs?q=${encodeURIComponent(u.user)}`},
      h("span", {class: "what"}, u.user), h("span", {class: "track"}, h("i", {class: "held-3", style: {width: `${100 * u.held / most}%`}}), h("i", {class: "waits", style: {width: `${100 * u.asked / most}%`}})),
      h("span", {class: "num"}, count(u.held), u.asked ? h("small", {}, ` +${count(u.asked)}`) : ""))))) : h("p", {class: "quiet"}, "No GPUs in use"),
    all.length ? h("p", {class: "quiet small"}, `GPUs in use, + requested${all.length > rows ? `; ${many(all.length - rows, `more ${all === groups ? "group" : "user"}`)}` : ""}`) : "");
    const broken = [...world.nodes.values()].filter(n => OUT.has(n.state) || n.trouble || n.stale || Object.keys(n.why ?? {}).some(i => "LX".includes(n.gpus[(n.index ?? []).indexOf(+i)] ?? n.gpus[i])));
    const reasons = new Map();
    for (const node of broken) { const why = `${node.state.toLowerCase()}${node.reason || node.trouble ? `: ${node.reason ?? node.trouble}` : Object.keys(node.why ?? {}).length ? `: ${Object.values(node.why)[0]}` : ""}`; reasons.set(why, [...reasons.get(why) ?? [], node.name]); }
    odd.replaceChildren(...(reasons.size ? [h("section", {class: "panel odd"}, h("div", {class: "head"}, h("h2", {}, "Needs attention"), h("a", {href: "#/nodes?of=odd"}, many(broken.length, "node"))),
      h("ul", {class: "rows"}, [...reasons].sort((a, b) => b[1].length - a[1].length).slice(0, 6).map(([why, of]) => h("li", {}, h("a", {href: of.length === 1 ? `#/node/${encodeURIComponent(of[0])}` : "#/nodes?of=odd"}, h("span", {class: "mono"}, of.length > 6 ? many(of.length, "node") : names(of)), h("span", {class: "why"}, why))))))] : []));
  }

  const update = what => {
    if (what === "live" || what === "me") return;
    if (what !== "clock") { figures(); lists(); map.update(); if (byUser) key.replaceChildren(legend(true)); }
    ahead.update(what);
    if (what !== "clock") looks.replaceChildren(timelineLegend(ahead.users()));
  };
  update("view");
  return {update};
}

export function starts(row) {
  const at = now();
  return row[0] <= at + 30 ? "any moment" : clock(row[0], at);
}

// From the earliest to the latest of the same forecast that `gpusched why` shows; "" where they are one time.
export function range([, low, high]) {
  const at = now(), from = low === null ? null : Math.max(at, low);
  if (high === null) return from === null || from <= at + 30 ? "" : ` (${clock(from, at)} or later)`;
  const soon = from <= at + 30, until = Math.max(at, high), [a, b] = [soon ? "now" : clock(from, at), clock(until, at)];
  return high <= at + 30 || a === b ? "" : ` (${a}–${clock(until, soon ? at : from)})`; // the day once
}
