// What was used: utilization and power over days, and by whom.

import {world, facts} from "./data.js";
import {h, choice, short, percent, count, span, recall, remember, swatch} from "./words.js";
import {chart} from "./charts.js";

const SPANS = [["1", "24 hours"], ["7", "7 days"], ["14", "14 days"]];

export function usagePage(main) {
  let days = recall("days", "7", SPANS.map(s => s[0]));
  const curves = h("section", {class: "panel"}), table = h("section", {class: "panel"}), idle = h("section", {class: "panel", hidden: true});
  main.append(h("div", {class: "title"}, h("h1", {}, "Usage"), h("div", {class: "tools"}, choice("span", SPANS, days, value => { days = value; remember("days", days); update("usage"); }))), curves, idle, table);

  function update(what) {
    if (!["usage", "view", "size"].includes(what) || (what === "view" && table.firstChild)) return;
    const to = world.usage.now || Date.now() / 1000, from = to - days * 86400;
    const points = (days === "1" ? world.usage.fine : world.usage.hours).filter(p => p[0] >= from);
    if (points.length < 2) curves.replaceChildren(h("p", {class: "quiet"}, "No measurements in this period yet."));
    else {
      const held = points.reduce((n, p) => n + p[1], 0), all = points.reduce((n, p) => n + p[2], 0);
      const width = days === "1" ? 300 : 3600, kwh = points.reduce((n, p) => n + (p[4] ?? 0) * Math.min(width, to - p[0]) / 3600, 0); // the last hour is not over
      curves.replaceChildren(h("div", {class: "sums"}, h("p", {}, h("b", {}, percent(held / all)), " of GPU time allocated"), h("p", {}, h("b", {}, count(Math.round(held))), " GPU hours"), h("p", {}, h("b", {}, short(kwh)), " kWh")),
        h("div", {class: "charts"},
          h("figure", {}, h("figcaption", {}, "Of all GPUs: ", h("span", {class: "key t0"}, "allocated"), ", ", h("span", {class: "key t1"}, "measured as busy")),
            chart({series: [{name: "allocated", points: points.map(p => [p[0], p[2] ? p[1] / p[2] : null]), tone: "t0"}, {name: "busy", points: points.map(p => [p[0], p[3]]), tone: "t1"}], read: percent, top: 1, label: "utilization over time", from, to})),
          h("figure", {}, h("figcaption", {}, "Power of all GPUs"), chart({series: [{name: "", points: points.map(p => [p[0], p[4]])}], read: v => `${v >= 10 ? Math.round(v) : short(v)} kW`, label: "power over time", from, to}))));
    }
    const holders = world.usage.idle ?? [];
    idle.hidden = !holders.length;
    idle.replaceChildren(h("h2", {}, "Idle GPUs held now"), h("div", {class: "wide"}, h("table", {},
      h("thead", {}, h("tr", {}, ["Job", "User", "GPUs", "Idle", "For", "Next"].map((t, i) => h("th", {class: i > 1 && i < 5 ? "num" : "", scope: "col"}, t)))),
      h("tbody", {}, holders.map(u => h("tr", {}, h("th", {scope: "row"}, h("a", {href: `#/job/${u.job}`}, u.name)), h("td", {}, swatch(u.user), u.user), h("td", {class: "num"}, count(u.gpus)), h("td", {class: "num warn"}, count(u.idle_gpus)), h("td", {class: "num"}, span(to - u.since)), h("td", {}, u.rule)))))));
    const users = world.usage.users[days] ?? [], most = Math.max(1e-9, ...users.map(u => u.gpu_hours)), sum = users.reduce((n, u) => n + u.gpu_hours, 0);
    const now = new Map(facts().users.map(u => [u.user, u]));
    table.replaceChildren(h("h2", {}, "By user"), users.length ? h("div", {class: "wide"}, h("table", {},
      h("thead", {}, h("tr", {}, ["User", "GPU hours", "", "Share", "Busy", "Idle GPU hours", "kWh", "GPUs now"].map((t, i) => h("th", {class: i && i !== 2 ? "num" : "", scope: "col"}, t)))),
      h("tbody", {}, users.map(u => h("tr", {}, h("th", {scope: "row"}, swatch(u.user), h("a", {href: `#/jobs?q=${encodeURIComponent(u.user)}`}, u.user)), h("td", {class: "num"}, short(u.gpu_hours)), h("td", {class: "barcell"}, h("span", {class: "track"}, h("i", {class: "held-3", style: {width: `${100 * u.gpu_hours / most}%`}}))),
        h("td", {class: "num"}, percent(u.gpu_hours / sum)), h("td", {class: `num ${u.util !== null && u.util < .3 ? "warn" : ""}`}, percent(u.util)), h("td", {class: "num"}, short(u.idle_hours)), h("td", {class: "num"}, short(u.kwh)), h("td", {class: "num"}, count(now.get(u.user)?.held ?? 0))))))) : h("p", {class: "quiet"}, "No GPUs used in this period."));
  }
  update("usage");
  return {update};
}
