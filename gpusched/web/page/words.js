// Elements, and how figures and times read. Text becomes text nodes only: no name of a job is ever taken for markup.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.entries(value).forEach(([k, v]) => node.style.setProperty(k, v));
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

const plain = new Intl.NumberFormat("en");
export const count = value => plain.format(value);
export const short = value => value === 0 ? "0" : value >= 100 ? count(Math.round(value)) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
export const percent = value => value === null || value === undefined ? "–" : `${Math.round(value * 100)}%`;
export const many = (n, one, more = `${one}s`) => `${count(n)} ${n === 1 ? one : more}`;
export const energy = joules => joules === undefined ? "–" : joules >= 3.6e6 ? `${short(joules / 3.6e6)} kWh` : `${short(joules / 3600)} Wh`;
export const power = watts => watts >= 1e6 ? `${(watts / 1e6).toFixed(2)} MW` : watts >= 1e4 ? `${(watts / 1e3).toFixed(0)} kW` : `${(watts / 1e3).toFixed(1)} kW`;

export function span(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor(s % 3600 / 60)).padStart(2, "0")}`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
}

const days = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
const two = n => String(n).padStart(2, "0");
export function clock(time, now, seconds = false) {
  const at = new Date(time * 1000), today = new Date(now * 1000);
  const hour = `${two(at.getHours())}:${two(at.getMinutes())}${seconds ? `:${two(at.getSeconds())}` : ""}`;
  if (at.toDateString() === today.toDateString()) return hour;
  if (Math.abs(time - now) < 6 * 86400) return `${days[at.getDay()]} ${hour}`;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${hour}`;
}

export function indices(numbers) { // 0-3,6
  const runs = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    if (runs.length && n === runs.at(-1)[1] + 1) runs.at(-1)[1] = n; else runs.push([n, n]);
  }
  return runs.map(([a, b]) => a === b ? a : `${a}-${b}`).join(",");
}

export function names(list) { // gpu[0001-0004,0007]
  const groups = new Map();
  for (const name of list) {
    const [, head, tail] = /^(.*?)(\d*)$/.exec(name);
    const key = `${head}/${tail.length}`;
    if (!groups.has(key)) groups.set(key, {head, width: tail.length, of: []});
    groups.get(key).of.push(tail);
  }
  return [...groups.values()].map(({head, width, of}) => {
    if (!width) return head;
    if (of.length === 1) return head + of[0];
    return `${head}[${indices(of.map(Number)).replace(/\d+/g, n => n.padStart(width, "0"))}]`;
  }).join(",");
}

// A user's look follows from the name alone: the same in every view, on every machine, after every reload. Ten hues that
// stay apart in light and dark, and three fills; users who share both are distinguished by the name beside it.
const HUES = 10, MARKS = ["", "stripes", "dots"], looks = new Map();
export function look(name) {
  if (!looks.has(name)) {
    let hash = 0x811c9dc5; // FNV-1a, then mixed, as its low bits hardly differ between similar names
    for (const byte of new TextEncoder().encode(name)) hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
    hash = Math.imul(hash ^ hash >>> 16, 0x7feb352d) >>> 0;
    hash = (hash ^ hash >>> 15) >>> 0;
    looks.set(name, {hue: hash % HUES * (360 / HUES), mark: MARKS[Math.floor(hash / HUES) % MARKS.length]});
  }
  return looks.get(name);
}
export const colourOfUser = name => `oklch(${paint("user-l")} 0.12 ${look(name).hue})`;

// The second mark of a user on a canvas, over what has been filled.
export function markUser(to, name, x, y, width, height) {
  const {mark} = look(name);
  if (!mark || width < 6 || height < 6) return;
  to.save(); to.beginPath(); to.rect(x, y, width, height); to.clip();
  to.strokeStyle = to.fillStyle = paint("on-bar"); to.globalAlpha *= .38; to.lineWidth = 1.5;
  if (mark === "stripes") hatch(to, x, y, width, height, 8);
  else for (let a = x + 3; a < x + width; a += 7) for (let b = y + 3; b < y + height; b += 7) to.fillRect(a, b, 2, 2);
  to.restore();
}
export function hatch(to, x, y, width, height, step) { // diagonal lines; the caller clips
  to.beginPath();
  for (let a = x - height; a < x + width; a += step) { to.moveTo(a, y + height); to.lineTo(a + height, y); }
  to.stroke();
}
export const swatch = name => h("i", {class: `who ${look(name).mark}`, style: {"background-color": `oklch(var(--user-l) 0.12 ${look(name).hue})`}});
export const userLegend = (users, most = 12) => h("div", {class: "legend users", "aria-label": "Colours of users"},
  users.slice(0, most).map(name => h("a", {href: `#/jobs?q=${encodeURIComponent(name)}`}, swatch(name), name)), users.length > most ? h("span", {}, `${many(users.length - most, "more user")}`) : "");

// What was chosen on the page, kept by this browser.
const KEPT = "gpusched-choices";
const kept = () => { try { return JSON.parse(localStorage.getItem(KEPT)) ?? {}; } catch { return {}; } };
export const recall = (name, otherwise, allowed) => { const found = kept()[name]; return found === undefined || (allowed && !allowed.includes(found)) ? otherwise : found; };
export function remember(name, value) { try { localStorage.setItem(KEPT, JSON.stringify({...kept(), [name]: value})); } catch { /* private windows */ } }

export const ACTIVE = new Set(["STARTING", "RUNNING", "COMPLETING"]);
const TONE = {PENDING: "wait", STARTING: "run", RUNNING: "run", COMPLETING: "run", COMPLETED: "done", CANCELLED: "done"};
export const tone = state => TONE[state] ?? "bad";
export const chip = state => h("span", {class: `chip ${tone(state)}`}, state.toLowerCase().replaceAll("_", " "));

const tip = document.getElementById("tip");
export function say(event, lines) {
  tip.replaceChildren(...lines.map((line, i) => h(i ? "div" : "b", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 16 + box.height < innerHeight;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${below ? event.clientY + 16 : Math.max(8, event.clientY - box.height - 10)}px`;
}
export const hush = () => { tip.hidden = true; };
export const speak = text => { document.getElementById("spoken").textContent = text; };

let colours = null;
export function paint(name) { // a colour of the style sheet, for canvases
  colours ??= new Map();
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}
export const repaint = () => { colours = null; };

export function canvas(node, width, height) { // its context, in CSS pixels
  const ratio = devicePixelRatio || 1;
  const [w, t] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (node.width !== w || node.height !== t) {
    node.width = w; node.height = t;
    node.style.width = `${width}px`; node.style.height = `${height}px`;
  }
  const to = node.getContext("2d");
  to.setTransform(ratio, 0, 0, ratio, 0, 0);
  to.clearRect(0, 0, width, height);
  return to;
}

export function choice(label, options, chosen, choose) { // a row of buttons of which one is pressed
  const box = h("div", {class: "choice", role: "group", "aria-label": label});
  const show = now => {
    [...box.children].forEach(b => b.setAttribute("aria-pressed", String(b.dataset.value === String(now))));
  };
  for (const [value, text] of options) {
    box.append(h("button", {type: "button", "data-value": value, onclick: () => { show(value); choose(value); }}, text));
  }
  show(chosen);
  return box;
}
