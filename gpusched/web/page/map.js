// All GPUs as cells, node by node; a canvas for each partition, so that a thousand nodes are one drawing.

import {world, facts, gpuIndex, slicesOf, OUT} from "./data.js";
import {h, canvas, paint, colourOfUser, markUser, say, hush, speak, many, count, userLegend} from "./words.js";

export const WHAT = {F: "free", A: "allocated", B: "used by a foreign process", L: "lost", X: "unusable", U: "not probed", S: "in MIG mode without slices"};

export const label = (node, i) => {
  const use = node.util?.[i], slices = slicesOf(node, i), free = slices.filter(s => s[1] === "F").length;
  const parts = [slices.length ? `${free} of ${many(slices.length, "MIG slice")} free` : WHAT[node.gpus[i]]];
  if (use !== undefined && use !== null) parts.push(`${use}% busy`);
  if (node.mem?.[i] !== undefined && node.mem?.[i] !== null) parts.push(`${Math.round(node.mem[i] / 1024)}${node.max_mem ? ` of ${Math.round(node.max_mem / 1024)}` : ""} GiB`);
  if (node.watt?.[i] !== undefined && node.watt?.[i] !== null) parts.push(`${node.watt[i]} W`);
  if (node.temp?.[i] !== undefined && node.temp?.[i] !== null) parts.push(`${node.temp[i]} °C`);
  return parts.join(", ");
};

export function colourOf(node, i, job, byUser) {
  const letter = node.gpus[i], open = slicesOf(node, i).some(s => s[1] === "F");
  if (letter === "A") {
    if (byUser && job) return colourOfUser(job.user);
    const use = node.util?.[i];
    if (use === undefined || use === null) return paint(open ? "held-1" : "held-2");
    if (use < 5) return paint("idle");
    return paint(use < 35 ? "held-1" : use < 70 ? "held-2" : "held-3");
  }
  if (letter === "B") return paint("foreign");
  if (letter === "L" || letter === "X") return paint("bad");
  return (letter === "F" || open) && !OUT.has(node.state) ? paint("free") : null;
}

export const legend = byUser => h("div", {}, h("div", {class: "legend"}, (byUser ? [] : [["held-3", "busy"], ["held-1", "partly busy"], ["idle", "allocated, idle"]])
  .concat([["free", "free"], ["foreign", "foreign process"], ["bad", "lost"], ["out", "out of service"]])
  .map(([colour, text]) => h("span", {}, h("i", {class: colour}), text))), byUser ? userLegend(facts().users.filter(u => u.held).map(u => u.user)) : "");

function sizes(nodes, width) { // cell, gap, columns of cells of a node, space between nodes, label
  if (nodes <= 24) return {cell: width < 500 ? 15 : 18, gap: 2, columns: 8, space: 18, label: 17};
  if (nodes <= 96) return {cell: 11, gap: 2, columns: 8, space: 14, label: 15};
  if (nodes <= 400) return {cell: 8, gap: 1, columns: 4, space: 7, label: 0};
  return {cell: width < 500 ? 4 : 6, gap: 1, columns: 4, space: 5, label: 0};
}

export function gpuMap(box) {
  let byUser = false;
  const parts = new Map();

  function part(name) {
    const title = h("h3", {}), drawn = h("canvas", {tabindex: "0", role: "group", "aria-roledescription": "map of GPUs"});
    const one = {title, drawn, nodes: [], at: -1};
    const find = event => {
      const b = drawn.getBoundingClientRect(), s = one.size;
      if (!s) return null;
      const column = Math.floor((event.clientX - b.left) / s.stepX), row = Math.floor((event.clientY - b.top) / s.stepY);
      const node = column < s.perRow ? one.nodes[row * s.perRow + column] : null;
      if (!node) return null;
      const x = event.clientX - b.left - column * s.stepX, y = event.clientY - b.top - row * s.stepY - s.label;
      const i = Math.floor(y / (s.cell + s.gap)) * s.columns + Math.floor(x / (s.cell + s.gap));
      return {node, i: x >= 0 && y >= 0 && x < s.columns * (s.cell + s.gap) && node.gpus[i] ? i : -1};
    };
    drawn.addEventListener("mousemove", event => {
      const found = find(event);
      drawn.style.cursor = found ? "pointer" : "";
      if (found) say(event, describe(found.node, found.i)); else hush();
    });
    drawn.addEventListener("mouseleave", hush);
    drawn.addEventListener("click", event => { const found = find(event); if (found) location.hash = `#/node/${encodeURIComponent(found.node.name)}`; });
    drawn.addEventListener("keydown", event => {
      const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: one.size?.perRow, ArrowUp: -one.size?.perRow}[event.key];
      if (step && one.nodes.length) {
        event.preventDefault();
        one.at = Math.min(one.nodes.length - 1, Math.max(0, one.at + step));
        draw(one);
        speak(describe(one.nodes[one.at], -1).join(", "));
      } else if (event.key === "Enter" && one.nodes[one.at]) location.hash = `#/node/${encodeURIComponent(one.nodes[one.at].name)}`;
    });
    drawn.addEventListener("blur", () => { one.at = -1; draw(one); });
    box.append(h("section", {class: "partition"}, title, drawn));
    parts.set(name, one);
    return one;
  }

  function describe(node, i) {
    const jobs = facts().at.get(node.name);
    const job = i >= 0 ? jobs?.get(gpuIndex(node, i)) : null;
    const lines = [`${node.name}${i >= 0 ? `, GPU ${gpuIndex(node, i)}` : ""}`];
    if (i >= 0) lines.push(label(node, i));
    const slices = i >= 0 ? slicesOf(node, i).filter(s => s[2]) : [];
    if (slices.length) for (const [name, , id] of slices) lines.push(`${name}: ${world.jobs.get(id)?.name ?? id} of ${world.jobs.get(id)?.user ?? "?"}`);
    else if (job) lines.push(`${job.name} of ${job.user}`);
    const why = i >= 0 && node.why?.[gpuIndex(node, i)];
    if (why) lines.push(why);
    lines.push(`${node.state.toLowerCase()}, ${node.free ?? 0} of ${node.gpus.length} free`);
    if (node.reason) lines.push(node.reason);
    return lines;
  }

  function draw(one) {
    const width = one.drawn.parentElement.clientWidth;
    if (!width || !one.nodes.length) return;
    const s = sizes(world.nodes.size, width), held = facts().at;
    const most = Math.max(...one.nodes.map(node => node.gpus.length)), columns = Math.min(s.columns, most || 1);
    s.stepX = columns * (s.cell + s.gap) - s.gap + s.space;
    s.stepY = s.label + Math.ceil((most || 1) / columns) * (s.cell + s.gap) - s.gap + (s.label ? 14 : s.space);
    s.perRow = Math.max(1, Math.floor((width + s.space) / s.stepX)); s.columns = columns;
    one.size = s;
    const to = canvas(one.drawn, width, Math.ceil(one.nodes.length / s.perRow) * s.stepY);
    const [ink, soft, line, wait] = ["ink", "soft", "line-2", "wait"].map(paint);
    to.font = `11px ${paint("mono")}`;
    to.textBaseline = "top";
    one.nodes.forEach((node, n) => {
      const x = n % s.perRow * s.stepX, y = Math.floor(n / s.perRow) * s.stepY;
      const jobs = held.get(node.name), out = OUT.has(node.state);
      let last = "";
      if (s.label) { to.fillStyle = out ? wait : soft; to.fillText(node.name, x, y + 1, s.stepX - 6); }
      for (let i = 0; i < node.gpus.length; i++) {
        const job = jobs?.get(gpuIndex(node, i));
        const cx = x + i % columns * (s.cell + s.gap), cy = y + s.label + Math.floor(i / columns) * (s.cell + s.gap);
        const colour = colourOf(node, i, job, byUser);
        if (colour) { if (colour !== last) to.fillStyle = last = colour; to.fillRect(cx, cy, s.cell, s.cell); if (byUser && job) markUser(to, job.user, cx, cy, s.cell, s.cell); }
        else { to.strokeStyle = line; to.lineWidth = 1; to.strokeRect(cx + .5, cy + .5, s.cell - 1, s.cell - 1); }
      }
      if (n === one.at) { to.strokeStyle = ink; to.lineWidth = 2; to.strokeRect(x - 2, y + s.label - 2, s.stepX - s.space + 4, s.stepY - s.label - (s.label ? 14 : s.space) + 4); }
    });
  }

  return {
    byUser(value) { byUser = value; this.update(); },
    update() {
      const of = new Map(world.head.partitions.map(name => [name, []]));
      for (const node of world.nodes.values()) { if (!of.has(node.partition)) of.set(node.partition, []); of.get(node.partition).push(node); }
      for (const [name, nodes] of of) {
        const one = parts.get(name) ?? part(name);
        one.nodes = nodes;
        const free = nodes.reduce((n, node) => n + (node.free ?? 0), 0), all = nodes.reduce((n, node) => n + node.gpus.length, 0);
        one.title.replaceChildren(name, h("small", {}, `${many(nodes.length, "node")}, ${count(free)} of ${many(all, "GPU")} free`));
        one.drawn.setAttribute("aria-label", `${name}: ${many(nodes.length, "node")}, ${free} of ${all} GPUs free; arrow keys go from node to node`);
        draw(one);
      }
    },
  };
}

