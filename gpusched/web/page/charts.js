// Lines over time, as SVG.

import {h, say, hush, clock} from "./words.js";
import {now} from "./data.js";

const svg = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};

// Paths of the runs of known values: points of [x, y or null].
function paths(points, x, y, floor) {
  let line = "", area = "", run = [];
  const flush = () => {
    if (run.length) {
      const d = run.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
      line += d;
      if (run.length > 1) area += `${d}L${x(run.at(-1)[0]).toFixed(1)} ${floor}L${x(run[0][0]).toFixed(1)} ${floor}Z`;
      run = [];
    }
  };
  for (const [a, b] of points) { if (b === null || b === undefined) flush(); else run.push([a, b]); }
  flush();
  return [line, area];
}

export function sparkline(points, top) {
  const node = svg("svg", {class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true"});
  if (points.length > 1) {
    const [lo, hi] = [points[0][0], points.at(-1)[0]], most = top ?? Math.max(1e-9, ...points.map(p => p[1] ?? 0));
    const [line, area] = paths(points, t => (t - lo) / (hi - lo || 1) * 100, v => 27 - v / most * 25, 28);
    node.append(svg("path", {class: "area", d: area}), svg("path", {class: "line", d: line, "vector-effect": "non-scaling-stroke"}));
  }
  return node;
}

function nice(most) { // an axis' end, and its steps
  const unit = 10 ** Math.floor(Math.log10(most || 1)), end = [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map(f => f * unit).find(e => e >= most * .999) ?? most;
  return end;
}

// series: [{name, points: [[t, v]], tone}]; read(v) says a value.
export function chart({series, read, top, label, tall = 190, from, to}) {
  const width = innerWidth < 560 ? 380 : 720, left = 56, right = 10, floor = tall - 24, head = 10;
  const all = series.flatMap(s => s.points.map(p => p[1] ?? 0)), most = top ?? nice(Math.max(1e-9, ...all));
  const x = t => left + (t - from) / (to - from || 1) * (width - left - right), y = v => floor - Math.min(v, most) / most * (floor - head);
  const drawn = svg("svg", {class: "chart", viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": label});
  for (const part of [0, .25, .5, .75, 1]) {
    drawn.append(svg("line", {class: "grid", x1: left, x2: width - right, y1: y(most * part), y2: y(most * part)}));
    if (part * 2 % 1 === 0) { const text = svg("text", {x: left - 7, y: y(most * part) + 4, "text-anchor": "end"}); text.textContent = read(most * part); drawn.append(text); }
  }
  const every = [3600, 7200, 14400, 21600, 43200, 86400, 172800, 345600].find(s => (to - from) / s <= width / 85) ?? 345600, zone = new Date(to * 1000).getTimezoneOffset() * 60;
  for (let tick = Math.ceil((from - zone) / every) * every + zone; tick < to; tick += every) {
    const t = tick + new Date(tick * 1000).getTimezoneOffset() * 60 - zone; // clocks may have been set back or forward since
    if (t < from || t >= to) continue;
    const text = svg("text", {x: x(t), y: tall - 6, "text-anchor": "middle"});
    text.textContent = every >= 86400 ? new Date(t * 1000).toLocaleDateString("en", {weekday: "short", day: "numeric"}) : clock(t, t);
    drawn.append(svg("line", {class: "grid", x1: x(t), x2: x(t), y1: floor, y2: floor + 4}), text);
  }
  for (const {points, tone} of series) {
    const [line, area] = paths(points, x, y, floor);
    if (series.length === 1) drawn.append(svg("path", {class: `area ${tone ?? ""}`, d: area}));
    drawn.append(svg("path", {class: `line ${tone ?? ""}`, d: line}));
  }
  const hair = svg("line", {class: "hair", y1: head, y2: floor, visibility: "hidden"});
  drawn.append(hair);
  drawn.addEventListener("mousemove", event => {
    const box = drawn.getBoundingClientRect(), t = from + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (to - from);
    const near = series.map(s => s.points.reduce((best, p) => Math.abs(p[0] - t) < Math.abs((best?.[0] ?? Infinity) - t) ? p : best, null));
    if (!near[0]) return;
    hair.setAttribute("x1", x(near[0][0])); hair.setAttribute("x2", x(near[0][0])); hair.setAttribute("visibility", "visible");
    say(event, [clock(near[0][0], now()), ...series.map((s, i) => `${s.name ? `${s.name}: ` : ""}${near[i]?.[1] === null || near[i] === null ? "–" : read(near[i][1])}`)]);
  });
  drawn.addEventListener("mouseleave", () => { hair.setAttribute("visibility", "hidden"); hush(); });
  return h("div", {class: "chartbox"}, drawn);
}

export const bar = (parts, all) => h("div", {class: "stack", "aria-hidden": "true"},
  parts.filter(([, n]) => n > 0).map(([tone, n]) => h("i", {class: tone, style: {"flex-grow": String(n / (all || 1) * 1000)}})));
