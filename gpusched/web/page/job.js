// One job: what it is, where, how busy its GPUs are, what has happened, what it says.

import {world, asks, expected, jobDetails, jobLog, now} from "./data.js";
import {h, chip, clock, span, energy, indices, ACTIVE, count, many, percent, swatch} from "./words.js";
import {chart} from "./charts.js";
import {label, colourOf} from "./map.js";
import {progress} from "./jobs.js";

const AGAIN_S = 5;

export function jobPage(main, id) {
  const title = h("h1", {}, id), under = h("p", {class: "under"}), facts_ = h("dl", {class: "facts"}), gpus = h("div", {}), curves = h("div", {}), story = h("div", {}), log = h("div", {});
  main.append(h("p", {class: "crumbs"}, h("a", {href: "#/jobs"}, "Jobs"), " / ", h("span", {class: "mono"}, id)), h("div", {class: "title"}, title), under, h("div", {class: "two even"}, h("section", {class: "panel"}, facts_), gpus), curves, h("div", {class: "two even"}, story, log));
  let known = null, trouble = "", closed = false, seen = "", logged = "", last = 0;

  const current = () => [...world.jobs.values()].find(job => job.id === id || job.array_id === id) ?? known?.job;

  function fields(job) {
    const at = now(), active = ACTIVE.has(job.state), start = expected(job);
    const list = [["User", [swatch(job.user), h("a", {href: `#/jobs?q=${encodeURIComponent(job.user)}`}, job.user)]], ["Partition", `${job.partition}${job.flavor ? `, flavor ${job.flavor}` : ""}`],
      [job.profile ? "MIG slices" : "GPUs", `${job.profile ? asks(job) : job.gpus ?? 0}${job.node_count ? ` on ${many(job.node_count, "node")}` : ""}`], ["Group", job.group], ["QOS", job.qos], ["Reservation", job.reservation],
      ["Submitted", clock(job.submit_time, at)], ["Waited", job.start_time ? span(job.start_time - job.submit_time) : span(at - job.submit_time)],
      ["Expected start", !job.start_time && !job.end_time && (start ? `${start[0] <= at + 30 ? "any moment" : clock(start[0], at)}${start[2] && start[1] !== start[2] ? `, between ${clock(Math.max(at, start[1]), at)} and ${clock(Math.max(at, start[2]), at)}` : ""}` : "too far ahead to predict")],
      ["Started", job.start_time && clock(job.start_time, at)], ["Ran", job.start_time && span((job.end_time ?? at) - job.start_time)], ["Limit", `${span(job.time_limit_s)}${active && job.limit_end ? `, until ${clock(job.limit_end, at)}` : ""}`],
      ["Progress", job.step !== undefined && [progress(job), ` step ${count(job.step)}${job.progress_end ? `, done about ${clock(job.progress_end, at)}` : ""}`]],
      ["Ended", job.end_time && clock(job.end_time, at)], ["Exit code", job.exit_code], ["Energy", (known?.job.energy_j ?? job.energy_j) && energy(known?.job.energy_j ?? job.energy_j)],
      ["Attempt", job.attempt], ["Priority", job.priority], ["Held by", job.held_by], ...(known?.lines ?? []).map(([k, v]) => [k[0].toUpperCase() + k.slice(1), v])];
    facts_.replaceChildren(...list.filter(([, v]) => v !== undefined && v !== null && v !== false && v !== "").flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, ...[v].flat().map(x => typeof x === "number" ? String(x) : x))]));
  }

  function onGpus(job) {
    const active = ACTIVE.has(job.state);
    gpus.className = job.allocation ? "panel" : "";
    gpus.replaceChildren(...(job.allocation ? [h("h2", {}, active ? "GPUs now" : "GPUs used"), ...job.allocation.map(([name, ...own]) => {
      const node = world.nodes.get(name);
      return h("div", {class: "ongpus"}, h("a", {class: "mono", href: `#/node/${encodeURIComponent(name)}`}, name), active && node
        ? own.map(gpu => { const i = node.index ? node.index.indexOf(gpu) : gpu; return h("div", {class: "gpu"}, h("b", {}, `GPU ${gpu}`), h("span", {class: "meter"}, h("i", {style: {width: `${node.util?.[i] ?? 0}%`, background: colourOf(node, i, job, false)}})), h("small", {}, label(node, i).replace(/^allocated, /, ""))); })
        : h("small", {}, own.length ? ` GPUs ${indices(own)}` : ""));
    })] : []));
  }

  function drawCurves() {
    const found = (known?.curves ?? []).filter(c => c.points.length > 1);
    curves.className = found.length ? "panel" : "";
    if (!found.length) { curves.replaceChildren(); return; }
    const times = found.flatMap(c => [c.points[0][0], c.points.at(-1)[0]]), [from, to] = [Math.min(...times), Math.max(...times) + 300];
    const few = found.slice(0, 8), lines = k => few.map((c, i) => ({name: c.node, points: c.points.map(p => [p[0], p[k]]), tone: few.length > 1 ? `t${i}` : ""}));
    curves.replaceChildren(h("div", {class: "charts"}, h("figure", {}, h("figcaption", {}, `GPU utilization${found.length > 1 ? ", by node" : ""}`), chart({series: lines(1), read: percent, top: 1, label: "GPU utilization over time", from, to})),
      h("figure", {}, h("figcaption", {}, "Power of each GPU, on average"), chart({series: lines(2), read: v => `${Math.round(v)} W`, label: "power over time", from, to}))),
    found.length > 8 ? h("p", {class: "quiet"}, `The first 8 of ${found.length} nodes.`) : "");
  }

  function drawStory() {
    const at = now();
    story.className = "panel";
    story.replaceChildren(h("h2", {}, "History"), known?.events.length ? h("ol", {class: "story"}, known.events.map(([time, line]) => h("li", {}, h("time", {datetime: new Date(time * 1000).toISOString()}, clock(time, at, true)), h("span", {}, line))))
      : h("p", {class: "quiet"}, trouble || (known ? "No events yet." : "Reading…")),
    ...(known?.private?.length ? [h("h2", {}, "What it runs"), h("dl", {class: "facts mono"}, known.private.flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v)]))] : []));
  }

  function drawLog(text, note) {
    log.className = "panel";
    const shown = log.querySelector("pre"), end = !shown || shown.scrollHeight - shown.scrollTop - shown.clientHeight < 40;
    const box = h("pre", {class: "log", tabindex: "0", "aria-label": "the last lines of its output"}, text);
    log.replaceChildren(h("h2", {}, "Output"), note ? h("p", {class: "quiet"}, note) : box);
    if (!note && end) box.scrollTop = box.scrollHeight; else if (shown) box.scrollTop = shown.scrollTop;
  }

  async function readLog(job) {
    if (world.files) { drawLog("", "The output is not included in these files."); return; }
    if (!known) return;
    if (known.private === null || known.private === undefined) { drawLog("", world.me.user ? `Only ${job.user} and admins see its output.` : "Log in through the site's proxy to see the output here, or run: gpusched logs " + id); return; }
    if (!job.start_time) { drawLog("", "It has not started."); return; }
    try { const found = await jobLog(id, 0); if (!closed && (found.text !== logged || !log.firstChild)) { logged = found.text; drawLog(found.text, found.note); } } catch (error) { if (!closed) drawLog("", error.message); }
  }

  async function read() {
    last = Date.now();
    try { known = await jobDetails(id); trouble = ""; } catch (error) { trouble = error.message; }
    if (closed) return;
    draw(); drawCurves(); drawStory();
    const job = current();
    if (job) await readLog(job); else { title.textContent = "No such job"; under.textContent = trouble; }
  }

  function draw() {
    const job = current();
    if (!job) return;
    seen = JSON.stringify(job);
    title.replaceChildren(job.name, " ", chip(job.state));
    under.textContent = [job.reason, job.message].filter(Boolean).join(": ");
    under.hidden = !under.textContent;
    fields(job); onGpus(job);
  }

  draw(); read();
  return {
    update(what) {
      if (what === "size" || what === "live") return;
      const job = current(), changed = job && JSON.stringify(job) !== seen;
      draw();
      if (what === "view" && (changed || (job && ACTIVE.has(job.state) && Date.now() - last > AGAIN_S * 1000 && !document.hidden))) read();
    },
    close() { closed = true; },
  };
}

