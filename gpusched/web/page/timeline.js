// Who has which GPUs when: what has run, what runs, and what is expected to start; one canvas that draws the rows in sight.

import {world, facts, asks, gpusOf, now} from "./data.js";
import {h, canvas, paint, colourOfUser, markUser, hatch, userLegend, say, hush, span, clock, choice, ACTIVE, many, recall, remember} from "./words.js";

const AXIS = 24;
const SPANS = [[2, "2 h"], [6, "6 h"], [24, "1 day"], [72, "3 days"]];

function gathered() { // node -> what is, was or is to be there, and the bars that it makes once they are drawn
  const rows = new Map();
  for (const name of world.nodes.keys()) rows.set(name, {jobs: [], plans: [], bars: null});
  for (const job of world.jobs.values()) if (job.allocation && job.start_time) for (const part of job.allocation) rows.get(part[0])?.jobs.push(job, part);
  for (const job of facts().by.waiting) {
    const plan = world.forecast.jobs[job.id];
    if (plan?.[5]) for (const name of plan[5]) rows.get(name)?.plans.push([plan[3], plan[4], job, plan[1], plan[2]]);
  }
  return rows;
}

function barsOf(row, lanes, at) { // each on the GPUs that it has, or would have
  if (row.bars) return row.bars;
  const ends = world.forecast.ends ?? {}, free = new Array(lanes).fill(0), bars = [];
  for (let i = 0; i < row.jobs.length; i += 2) {
    const job = row.jobs[i], gpus = row.jobs[i + 1].slice(1).sort((a, b) => a - b), active = ACTIVE.has(job.state);
    const until = active ? Math.max(at, ends[job.id] ?? job.progress_end ?? job.limit_end ?? at) : job.end_time;
    bars.push({job, gpus, from: job.start_time, until, active});
    if (active) for (const gpu of gpus) free[gpu] = until;
  }
  for (const [from, until, job, low, high] of row.plans.sort((a, b) => a[0] - b[0])) {
    const wanted = Math.max(1, Math.round(gpusOf(job) / (job.node_count ?? 1)));
    const gpus = free.map((t, i) => [t > from + 1, i]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).slice(0, wanted).map(([, i]) => i).sort((a, b) => a - b);
    for (const gpu of gpus) free[gpu] = until;
    bars.push({job, gpus, from: Math.max(from, at), until: Math.max(until, at), low: Math.max(low ?? from, at), high, planned: true});
  }
  return row.bars = bars;
}

export function timeline(box, {ahead = 6, high = 340, filter = () => true} = {}) {
  const spacer = h("div", {class: "spacer"}), drawn = h("canvas", {});
  const scroll = h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline of jobs by node; the list of jobs says the same in words"}, h("div", {class: "sticky"}, drawn), spacer);
  box.append(scroll);
  let rows = new Map(), list = [], hits = [], height = 18, frame = 0;

  function arrange() {
    rows = gathered();
    list = [...world.nodes.values()].filter(filter);
    height = list.length <= 16 ? 34 : list.length <= 48 ? 20 : 15;
    const inside = list.length * height, shown = Math.min(high(), inside + AXIS);
    if (scroll.style.height !== `${shown}px`) scroll.style.height = `${shown}px`;
    if (spacer.style.height !== `${inside + AXIS}px`) spacer.style.height = `${inside + AXIS}px`;
    draw();
  }

  function draw() {
    const width = scroll.clientWidth, tall = scroll.clientHeight;
    if (!width || !tall) return;
    const at = now(), to = canvas(drawn, width, tall), left = width < 560 ? 62 : 92;
    const begin = at - ahead * 3600 / 4, end = at + ahead * 3600, x = t => left + (t - begin) / (end - begin) * (width - left);
    const [ink, soft, line, panel, accent, mono] = ["ink", "soft", "line", "panel", "accent", "mono"].map(paint);
    hits = [];
    to.textBaseline = "middle";
    const first = Math.floor(scroll.scrollTop / height), last = Math.min(list.length, Math.ceil((scroll.scrollTop + tall) / height));
    const every = [300, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find(s => (end - begin) / s <= Math.max(3, width / 110)) ?? 86400;
    const zone = new Date(at * 1000).getTimezoneOffset() * 60;
    to.font = `11px ${paint("sans")}`;
    to.strokeStyle = line; to.lineWidth = 1;
    const ticks = [];
    for (let t = Math.ceil((begin - zone) / every) * every + zone; t < end; t += every) ticks.push(t);
    for (const t of ticks) { const px = Math.round(x(t)) + .5; to.beginPath(); to.moveTo(px, AXIS); to.lineTo(px, tall); to.stroke(); }
    for (let n = first; n < last; n++) {
      const node = list[n], y = AXIS + n * height - scroll.scrollTop, lanes = Math.max(1, node.gpus.length), lane = (height - 3) / lanes;
      for (const bar of barsOf(rows.get(node.name), lanes, at)) {
        if (bar.until < begin || Math.min(bar.from, bar.low ?? bar.from) > end) continue;
        const a = Math.max(left, x(bar.from)), b = Math.min(width, Math.max(x(bar.until), a + 1.5));
        const colour = colourOfUser(bar.job.user), {gpus} = bar;
        for (let i = 0; i < gpus.length;) { // neighbouring GPUs are one block
          let stop = i + 1;
          while (stop < gpus.length && gpus[stop] === gpus[stop - 1] + 1) stop += 1;
          const top = y + 1.5 + gpus[i] * lane, size = Math.max(1, (stop - i) * lane - (lane > 2 ? .75 : .25));
          block(to, bar, a, b, top, size, colour, x, left, width);
          hits.push([a, b, top, top + size, bar]);
          if (size > 10 && b - a > 46) {
            to.save(); to.beginPath(); to.rect(a, top, b - a - 3, size); to.clip();
            const text = `${bar.job.name} · ${bar.job.user}`, edge = bar.planned ? a : bar.active ? Math.min(b, Math.max(a, x(at))) : b;
            for (const [from, to_, tone] of [[a, edge, paint("on-bar")], [edge, b, ink]]) { // readable on the solid part and on the pale one
              to.save(); to.beginPath(); to.rect(from, top, Math.max(0, to_ - from), size); to.clip();
              to.fillStyle = tone; to.fillText(text, a + 5, top + size / 2 + .5); to.restore();
            }
            to.restore();
          }
          i = stop;
        }
      }
      to.fillStyle = line; to.fillRect(0, y + height - 1, width, 1);
      to.fillStyle = soft; to.font = `11px ${mono}`;
      if (height >= 13) to.fillText(node.name, 2, y + height / 2, left - 8);
      to.font = `11px ${paint("sans")}`;
    }
    to.fillStyle = panel; to.fillRect(0, 0, width, AXIS);
    to.fillStyle = soft;
    for (const t of ticks) { const text = clock(t, at), px = x(t); const wide = to.measureText(text).width; if (px > left - 1 && px + wide < width && (px > x(at) + 22 || px + wide < x(at) - 22)) to.fillText(text, px + 3, AXIS / 2); }
    to.fillStyle = accent; to.fillRect(Math.round(x(at)) - .75, AXIS - 6, 1.5, tall);
    const word = to.measureText("now").width;
    to.fillStyle = panel; to.fillRect(x(at) - word / 2 - 4, 2, word + 8, AXIS - 7);
    to.fillStyle = accent; to.textAlign = "center"; to.fillText("now", x(at), AXIS / 2 - 1); to.textAlign = "left";
  }

  // What has happened is solid, what is expected is not: the rest of a running job is pale, a start is hatched, with a line
  // from its earliest to its latest time.
  function block(to, bar, a, b, top, size, colour, x, left, width) {
    const present = x(now()), done = bar.active ? Math.max(a, Math.min(b, present)) : b;
    to.fillStyle = to.strokeStyle = colour;
    if (bar.planned) {
      to.globalAlpha = .13; to.fillRect(a, top, b - a, size);
      to.save(); to.beginPath(); to.rect(a, top, b - a, size); to.clip();
      to.globalAlpha = .4; to.lineWidth = 1; hatch(to, a, top, b - a, size, 6); to.restore();
      const [low, high] = [Math.max(left, x(bar.low)), Math.min(width, bar.high === null ? width : x(Math.max(bar.high, bar.low)))], middle = Math.round(size > 12 ? top + size - 4 : top + size / 2) + .5;
      to.globalAlpha = .9; to.lineWidth = 1;
      if (high > low + 2) { to.beginPath(); to.moveTo(low, middle); to.lineTo(high, middle); for (const px of [low, high]) { to.moveTo(px, middle - Math.min(3, size / 2)); to.lineTo(px, middle + Math.min(3, size / 2)); } to.stroke(); }
      to.fillRect(a, top, 1.5, size);
    } else {
      to.fillRect(a, top, done - a, size);
      markUser(to, bar.job.user, a, top, done - a, size);
      if (done < b) { to.globalAlpha = .38; to.fillRect(done, top, b - done, size); }
      const {step, of} = bar.job;
      if (bar.active && of && step !== undefined && size > 9) { to.globalAlpha = .75; to.fillStyle = paint("ink"); to.fillRect(a, top + size - 2, (b - a) * Math.min(1, step / of), 2); }
    }
    to.globalAlpha = 1;
  }

  const find = event => {
    const b = drawn.getBoundingClientRect(), px = event.clientX - b.left, py = event.clientY - b.top;
    return py < AXIS ? null : hits.findLast(([a, z, top, low]) => px >= a && px <= z && py >= top - .5 && py <= low + .5)?.[4];
  };
  drawn.addEventListener("mousemove", event => {
    const bar = find(event);
    drawn.style.cursor = bar ? "pointer" : "";
    if (!bar) { hush(); return; }
    const {job} = bar, at = now();
    say(event, [`${job.name} of ${job.user}`, `${asks(job)}${job.node_count ? ` on ${many(job.node_count, "node")}` : ""}`,
      bar.planned ? `expected start ${clock(bar.from, at)}, between ${clock(bar.low, at)} and ${bar.high === null ? "later" : clock(Math.max(bar.high, bar.low), at)}; expected end ${clock(bar.until, at)}` : bar.active
        ? `since ${clock(bar.from, at)}, expected to ${clock(bar.until, at)}${job.limit_end ? `, limit ${clock(job.limit_end, at)}` : ""}`
        : `${clock(bar.from, at)} to ${clock(bar.until, at)} (${span(bar.until - bar.from)}), ${job.state.toLowerCase()}`]);
  });
  drawn.addEventListener("mouseleave", hush);
  drawn.addEventListener("click", event => { const bar = find(event); if (bar) location.hash = `#/job/${bar.job.id}`; });
  scroll.addEventListener("scroll", () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(draw); });
  function users() { // of what can be drawn, those with most GPUs first
    const sums = new Map(), count = job => sums.set(job.user, (sums.get(job.user) ?? 0) + gpusOf(job));
    const at = now();
    for (const node of list) {
      const row = rows.get(node.name);
      for (let i = 0; i < row.jobs.length; i += 2) if ((row.jobs[i].end_time ?? at) > at - ahead * 3600 / 4) count(row.jobs[i]);
      for (const [from, , job] of row.plans) if (from < at + ahead * 3600) count(job);
    }
    return [...sums].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([name]) => name);
  }

  return {update(what) { if (what === "clock") draw(); else arrange(); }, ahead(hours) { ahead = hours; draw(); }, users};
}

export const timelineLegend = users => h("div", {}, h("div", {class: "legend"},
  [["past", "has run"], ["rest", "until its expected end"], ["expected", "expected start, with its earliest and latest time"]].map(([look, text]) => h("span", {}, h("i", {class: `bar ${look}`}), text))), userLegend(users));

export function timelinePage(main, _, query) {
  const box = h("section", {class: "panel flush"});
  const stored = recall("timeline", {});
  let part = query.get("part") ?? stored.part ?? "", hours = SPANS.some(s => s[0] === stored.hours) ? stored.hours : 6;
  if (!world.head.partitions.includes(part)) part = "";
  const keep = () => remember("timeline", {part, hours}), key = h("div", {class: "keyed"});
  const shown = timeline(box, {ahead: hours, high: () => Math.max(180, innerHeight - 250), filter: node => !part || node.partition === part});
  const parts = h("div", {});
  main.append(h("div", {class: "title"}, h("h1", {}, "Timeline"),
    h("div", {class: "tools"}, parts, choice("how far ahead", SPANS, hours, value => { hours = value; keep(); shown.ahead(value); update("view"); }))),
  box, key, h("p", {class: "quiet"}, "Expected times are projected from the current queue and typical run times; jobs submitted later are not included."));
  if (world.head.partitions.length > 1) parts.replaceWith(choice("partition", [["", "All"], ...world.head.partitions.map(p => [p, p])], part, value => { part = value; keep(); update("view"); }));
  function update(what) { shown.update(what); if (what !== "clock") key.replaceChildren(timelineLegend(shown.users())); }
  update("view");
  return {update};
}

export {SPANS};
