// The list of nodes, and one node.

import {world, facts, now, gpuIndex, slicesOf, OUT} from "./data.js";
import {h, choice, count, many, percent, power, clock, span, hush, say, recall, remember} from "./words.js";
import {rowsInSight, matcher, row as jobRow} from "./jobs.js";
import {WHAT, colourOf, label, legend} from "./map.js";

const mean = list => { const known = (list ?? []).filter(v => v !== null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
const sum = list => { const known = (list ?? []).filter(v => v !== null); return known.length ? known.reduce((a, b) => a + b, 0) : null; };
const odd = node => OUT.has(node.state) || node.trouble || node.stale || node.conditions || Object.keys(node.why ?? {}).length;
const tone = node => OUT.has(node.state) ? node.state === "DOWN" ? "bad" : "wait" : node.state === "IDLE" ? "done" : "run";
const chip = node => h("span", {class: `chip ${tone(node)}`}, node.state.toLowerCase());

export const cells = node => h("span", {class: "cells", role: "img", "aria-label": `${node.free ?? 0} of ${node.gpus.length} free`}, [...node.gpus].map((letter, i) => {
  const job = facts().at.get(node.name)?.get(gpuIndex(node, i)), colour = colourOf(node, i, job, false);
  return h("i", {class: colour ? "" : "out", style: colour ? {background: colour} : {}, onmousemove: event => say(event, [`${node.name}, GPU ${gpuIndex(node, i)}`, label(node, i), job ? `${job.name} of ${job.user}` : null].filter(Boolean)), onmouseleave: hush});
}));

const HEADS = [["name", "Node"], ["part", "Partition"], ["state", "State"], ["map", "GPUs"], ["gpus", "Free"], ["use", "Use"], ["mem", "GPU memory"], ["watt", "Power"], ["who", "Users"]];

export function nodesPage(main, _, query) {
  let of = query.get("of") ?? recall("nodes", "all", ["all", "free", "odd"]), text = query.get("q") ?? "";
  const field = h("input", {type: "search", placeholder: "Search: name, state, user, reason", "aria-label": "Search nodes", value: text, spellcheck: "false"}), tabs = h("div", {class: "tabs"});
  const box = h("div", {class: "list nodes", role: "table", "aria-label": "Nodes"}, h("div", {role: "rowgroup"}, h("div", {class: "row heads", role: "row"}, HEADS.map(([key, title]) => h("span", {class: key, role: "columnheader"}, title)))));
  const found = h("p", {class: "quiet", role: "status", hidden: true});
  main.append(h("div", {class: "title"}, h("h1", {}, "Nodes"), h("div", {class: "tools"}, tabs, field)), found, box);
  box.after(legend(false));
  const list = rowsInSight(box, row);
  field.addEventListener("input", () => { text = field.value; update("view"); });

  const users = node => [...new Set([...facts().on.get(node.name) ?? []].map(job => job.user))];
  function row(node) {
    const use = mean(node.util?.filter((_, i) => node.gpus[i] === "A")), used = sum(node.mem), watts = sum(node.watt), who = users(node);
    return h("div", {class: "row", role: "row", onclick: event => { if (!event.target.closest("a")) location.hash = `#/node/${encodeURIComponent(node.name)}`; }},
      h("span", {class: "name", role: "cell"}, h("a", {class: "open mono", href: `#/node/${encodeURIComponent(node.name)}`}, node.name)),
      h("span", {class: "part", role: "cell"}, node.partition), h("span", {class: "state", role: "cell"}, chip(node)), h("span", {class: "map", role: "cell"}, cells(node)),
      h("span", {class: "gpus", role: "cell"}, `${node.free ?? 0} of ${node.gpus.length}`), h("span", {class: "use", role: "cell"}, use === null ? "–" : percent(use / 100)),
      h("span", {class: "mem", role: "cell"}, used === null || !node.max_mem ? "–" : percent(used / node.max_mem / node.gpus.length)),
      h("span", {class: "watt", role: "cell"}, watts === null ? "–" : power(watts)),
      h("span", {class: "who", role: "cell"}, node.reason ? h("span", {class: "why", title: node.reason}, node.reason) : "", who.join(", ")));
  }
  function update(what) {
    if (["live", "me", "usage", "clock", "forecast"].includes(what)) return;
    const all = [...world.nodes.values()], free = all.filter(n => n.free), strange = all.filter(odd), fits = matcher(text);
    tabs.replaceChildren(choice("which", [["all", `All ${count(all.length)}`], ["free", `With free GPUs ${count(free.length)}`], ["odd", `Need attention ${count(strange.length)}`]], of, value => { of = value; remember("nodes", of); update("view"); }));
    const chosen = {all, free, odd: strange}[of] ?? all;
    const shown = text ? chosen.filter(n => fits([n.name, n.partition, n.state, n.reason, n.type, ...users(n)])) : chosen;
    found.hidden = shown.length > 0;
    found.textContent = "No such node.";
    list.show(shown);
  }
  update("view");
  return {update, close: list.close, step: list.step};
}

export function nodePage(main, name) {
  const title = h("div", {class: "title"}), under = h("p", {class: "under"}), box = h("section", {class: "panel"}), facts_ = h("dl", {class: "facts"}), jobs = h("section", {});
  main.append(h("p", {class: "crumbs"}, h("a", {href: "#/nodes"}, "Nodes"), " / ", h("span", {class: "mono"}, name)), title, under, h("div", {class: "two"}, box, h("section", {class: "panel"}, facts_)), jobs);
  function update(what) {
    if (what === "live" || what === "me" || what === "usage") return;
    const node = world.nodes.get(name);
    if (!node) { title.replaceChildren(h("h1", {}, "No such node")); return; }
    const at = facts().at.get(name) ?? new Map(), here = [...facts().on.get(name) ?? []];
    title.replaceChildren(h("h1", {}, name, " ", chip(node)));
    under.textContent = [node.reason, node.trouble, node.stale && `last seen ${span(now() - node.seen)} ago; figures are from then`].filter(Boolean).join("; ");
    under.hidden = !under.textContent;
    box.replaceChildren(h("h2", {}, "GPUs"), ...[...node.gpus].flatMap((letter, i) => {
      const gpu = gpuIndex(node, i), slices = slicesOf(node, i), job = slices.length ? null : at.get(gpu);
      const holder = id => h("a", {href: `#/job/${id}`}, world.jobs.has(id) ? `${world.jobs.get(id).name} · ${world.jobs.get(id).user}` : id);
      return [h("div", {class: "gpu"}, h("b", {}, `GPU ${gpu}`), h("span", {class: "meter"}, h("i", {style: {width: `${node.util?.[i] ?? 0}%`, background: colourOf(node, i, job, false) ?? "none"}})),
        h("small", {}, label(node, i), node.why?.[gpu] ? `: ${node.why[gpu]}` : ""), job ? h("a", {href: `#/job/${job.id}`}, `${job.name} · ${job.user}`) : h("span", {})),
        ...slices.map(([name, of, id, why]) => h("div", {class: "gpu slice"}, h("b", {}, ""), h("span", {class: "mono"}, name), h("small", {}, why ? `${WHAT[of]}: ${why}` : WHAT[of]), id ? holder(id) : h("span", {})))];
    }), ...(node.conditions ? [h("h2", {}, "Conditions"), h("ul", {class: "rows"}, node.conditions.map(([gpu, detail, since, advice, action]) => h("li", {},
      h("span", {class: "mono"}, gpu === null ? "node" : `GPU ${gpu}`), " ", h("span", {class: "why"}, `${detail}, since ${clock(since, now())}${action === "warn" ? "" : ` (${action})`}; ${advice}`))))] : []));
    const watts = sum(node.watt);
    facts_.replaceChildren(...[["Partition", node.partition], ["GPU", node.type], ["Free", `${node.free ?? 0} of ${many(node.gpus.length, "GPU")}`], ["Cores", `${node.cores[0]} of ${node.cores[1]} in use`],
      ["Memory", `${Math.round(node.ram[0] / 1024)} of ${count(Math.round(node.ram[1] / 1024))} GiB in use`], ["Load", node.load], ["Power", watts !== null && `${power(watts)}${node.max_watt ? ` of ${power(node.max_watt)}` : ""}`], ["Last seen", node.seen && clock(node.seen, now())]]
      .filter(([, v]) => v !== undefined && v !== null && v !== false).flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, String(v))]));
    const soon = facts().by.waiting.filter(job => world.forecast.jobs[job.id]?.[5]?.includes(name)).slice(0, 8);
    jobs.replaceChildren(h("h2", {}, "Jobs here"), here.length + soon.length ? h("div", {class: "list jobs short", role: "table", "aria-label": `Jobs on ${name}, then those expected to start there`}, [...here, ...soon].map(jobRow)) : h("p", {class: "quiet"}, "None."));
  }
  update("view");
  return {update};
}

