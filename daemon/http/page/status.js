"use strict";

// Asks /status.json once a second and shows it. Counters only rise, so that rates and
// percentiles are differences between two answers.

const KEPT = 120; // answers, a second apart
const RATE_WINDOW = 10;
const LATENCY_WINDOW = 60;
const history = [];

const at = (id) => document.getElementById(id);
const show = (id, text) => { at(id).textContent = text; };

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const count = (value) => Math.round(value).toLocaleString("en");

function rate(value) {
  if (value === null) return "–";
  return value >= 100 || value === 0 ? count(value) : value.toPrecision(2);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit + 1 < units.length) { value /= 1024; ++unit; }
  return (unit === 0 ? value : value.toFixed(value < 10 ? 2 : 1)) + " " + units[unit];
}

function time(seconds) {
  if (seconds === null) return "–";
  if (seconds <= 20e-6) return "< 20 µs"; // the first range
  if (seconds < 1e-3) return (seconds * 1e6).toPrecision(3) + " µs";
  if (seconds < 1) return (seconds * 1e3).toPrecision(3) + " ms";
  return seconds.toPrecision(3) + " s";
}

function age(seconds) {
  const days = Math.floor(seconds / 86400), hours = Math.floor(seconds / 3600) % 24;
  const minutes = Math.floor(seconds / 60) % 60;
  if (days > 0) return days + " d " + hours + " h";
  if (hours > 0) return hours + " h " + minutes + " min";
  return minutes > 0 ? minutes + " min" : Math.floor(seconds) + " s";
}

function share(part, whole) {
  if (!whole) return "–";
  const percent = 100 * part / whole;
  return (percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent)) + " %";
}

// The answer that long ago, or the oldest.
function before(seconds, last = history.length - 1) {
  return history[Math.max(0, last - seconds)];
}

// How fast a number rises; null where nothing is known yet.
function rise(now, then, read) {
  const elapsed = now.uptime_seconds - then.uptime_seconds;
  const [to, from] = [read(now), read(then)];
  return elapsed > 0 && to !== null && from !== null ? Math.max(0, to - from) / elapsed : null;
}

const modelOf = (status, name) => status.models.find((model) => model.name === name);

// Tokens that all layers of the models have attended, over those that both answers know.
function tokenRate(now, then) {
  let sum = null;
  for (const model of now.models) {
    const found = rise(now, then, (status) => {
      const there = modelOf(status, model.name);
      return there ? there.work.attends / there.layers : null;
    });
    if (found !== null) sum = (sum ?? 0) + found;
  }
  return sum;
}

// A percentile of what came between two answers, as far as ranges tell; null of nothing.
function percentile(now, then, part) {
  const counts = now.counts.map((value, i) => value - (then ? then.counts[i] : 0));
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (total <= 0) return null;
  let rest = part * total;
  for (let i = 0; i < counts.length; ++i) {
    if (rest <= counts[i] && counts[i] > 0) {
      const low = i === 0 ? 0 : now.bounds[i - 1];
      const high = i < now.bounds.length ? now.bounds[i] : low;
      return low + (high - low) * rest / counts[i];
    }
    rest -= counts[i];
  }
  return now.bounds[now.bounds.length - 1];
}

function showFigures(now) {
  const then = before(RATE_WINDOW);
  show("rate", rate(tokenRate(now, then)));
  const points = history.map((status, i) => tokenRate(status, before(2, i)) ?? 0);
  const highest = Math.max(1, ...points);
  const path = points.map((value, i) => (i === 0 ? "M" : "L") +
    (300 / (KEPT - 1) * i).toFixed(1) + " " +
    (33 - 31 * value / highest).toFixed(1)).join("");
  const spark = at("rates");
  spark.setAttribute("viewBox", "0 0 300 34");
  spark.setAttribute("preserveAspectRatio", "none");
  spark.replaceChildren(draw("path", { d: path }));

  const earlier = before(LATENCY_WINDOW);
  let recent = history.length > 1 ? earlier : null;
  if (percentile(now.attend, recent?.attend, 0.5) === null) recent = null; // nothing lately
  const part = (of, p) => time(percentile(now[of], recent?.[of], p));
  show("median", part("attend", 0.5));
  show("tail", "p99 " + part("attend", 0.99) + ", device " + part("attend_device", 0.5) +
    ", wait " + part("attend_wait", 0.5));

  const rows = (read) => read(now) - (recent ? read(recent) : 0);
  show("read", share(rows((x) => x.work.touched_rows), rows((x) => x.work.visible_rows)));
  const link = rise(now, then, (x) => x.link_bytes);
  show("link", "of the context" + (now.link_bytes > 0 ? ", link " + bytes(link ?? 0) + "/s" : ""));

  const used = now.memory.uses.reduce((sum, use) => sum + use.bytes, 0);
  show("used", share(used, now.memory.limit_bytes));
  show("limit", bytes(used) + " of " + bytes(now.memory.limit_bytes));
}

function showMemory(memory) {
  at("bar").replaceChildren(...memory.uses.map((use, i) => {
    const part = make("div");
    part.style.width = 100 * use.bytes / memory.limit_bytes + "%";
    part.style.background = `var(--use${i})`;
    part.title = use.name + ": " + bytes(use.bytes);
    return part;
  }));
  const used = memory.uses.reduce((sum, use) => sum + use.bytes, 0);
  const free = { name: "free", bytes: Math.max(0, memory.limit_bytes - used) };
  at("uses").replaceChildren(...[...memory.uses, free].map((use, i) => {
    const item = make("li", use.name + " ");
    item.style.setProperty("--mark", use === free ? "var(--line)" : `var(--use${i})`);
    item.append(make("b", bytes(use.bytes)));
    return item;
  }));
}

function showModels(now) {
  const then = before(RATE_WINDOW);
  at("models").replaceChildren(...now.models.map((model) => {
    const per = (read) => rise(now, then, (status) => {
      const there = modelOf(status, model.name);
      return there ? read(there) : null;
    });
    const row = make("tr");
    row.append(...[
      model.name, count(model.sequences), count(model.tokens), count(model.free_tokens),
      rate(per((x) => x.work.attends / x.layers)),
      rate(per((x) => x.work.appended_rows / x.layers / x.kv_heads)),
      share(model.work.touched_rows, model.work.visible_rows),
    ].map((text) => make("td", text)));
    return row;
  }));
  const hidden = now.model_count - now.models.length;
  show("more", now.model_count === 0 ? "No models yet."
    : hidden > 0 ? "And " + count(hidden) + " more, newer ones." : "");
}

// Violations of each layer as a share of its checks, against delta.
function layersChart(model) {
  const layers = model.audit.layers;
  const highest = Math.max(2 * model.delta, ...layers.map((x) => x.violations / x.checks));
  const chart = draw("svg", { class: "layers", viewBox: "0 0 1000 74", role: "img",
    preserveAspectRatio: "none", "aria-label": "Share of errors above epsilon by layer, against delta" });
  const width = Math.min(1000 / layers.length, 60);
  layers.forEach((layer, i) => {
    const broken = layer.violations / layer.checks;
    const height = 72 * broken / highest;
    const place = { x: i * width + width * 0.1, width: width * 0.8 };
    const title = draw("title", {});
    title.textContent = `layer ${layer.layer}: ${share(layer.violations, layer.checks)} of ` +
      `${count(layer.checks)}`;
    const track = draw("rect", { ...place, y: 72, height: 2, class: "track" });
    const bar = draw("rect", { ...place, y: 72 - height, height: height,
      class: broken > model.delta ? "over" : "share" });
    bar.append(title);
    chart.append(track, bar);
  });
  const line = 72 - 72 * model.delta / highest;
  chart.append(draw("line", { x1: 0, x2: 1000, y1: line, y2: line }));
  return chart;
}

function showAudit(now) {
  const { exact, statistical, none } = now.work;
  const all = exact + statistical + none;
  const certificates = `Certificates: ${share(exact, all)} exact, ` +
    `${share(statistical, all)} statistical, ${share(none, all)} without an error bound. `;
  show("audit", certificates + (now.audit_share > 0
    ? `${share(now.audit_share, 1)} of the attends are checked against exact attention.`
    : "No audit runs (--audit-share)."));
  at("audits").replaceChildren(...now.models.filter((x) => x.audit.layers.length > 0)
    .flatMap((model) => {
      const sum = (field) => model.audit.layers.reduce((total, x) => total + x[field], 0);
      const [checks, violations] = [sum("checks"), sum("violations")];
      const parts = [
        make("h3", model.name),
        make("p", `${count(violations)} of ${count(checks)} checked outputs have an error above epsilon, ` +
          `${share(violations, checks)}; delta (dashed) allows ${share(model.delta, 1)}. ` +
          "By layer:", "note"),
        layersChart(model),
      ];
      const worst = model.audit.heads.filter((head) => head.violations > 0).slice(0, 4);
      if (worst.length > 0) {
        parts.push(make("p", "Worst heads: " + worst.map((head) =>
          `layer ${head.layer} head ${head.kv_head}, ${share(head.violations, head.checks)} of ` +
          `${count(head.checks)}${head.level > 0 ? ", level " + head.level : ""}`).join("; ") + ".",
          "note"));
      }
      return parts;
    }));
}

function showRest(now) {
  at("devices").replaceChildren(...now.devices.map((device) => {
    const item = make("li");
    item.append(make("b", device.name), " " + device.description);
    if (device.memory_limit_bytes) {
      item.append("; " + bytes(device.memory_used_bytes) + " of " +
        bytes(device.memory_limit_bytes));
      if (device.copy_bytes) item.append(" and copies of rows " + bytes(device.copy_bytes));
    }
    if (device.lost) item.append(make("span", "; lost, every call to it fails", "bad"));
    else if (device.errors > 0) item.append(make("span", `; ${count(device.errors)} errors`, "bad"));
    return item;
  }));
  const line = (name, value, bad) => {
    const item = make("li", name + " ");
    item.append(make("b", count(value), bad && value > 0 ? "bad" : ""));
    return item;
  };
  at("connections").replaceChildren(
    line("Open", now.connections.open), line("Closed at once", now.connections.shed, true),
    line("Ended for misuse", now.connections.ended, true),
    line("Log lines dropped", now.dropped_log_lines, true));
}

// Of sequences that a daemon finds at its start.
function rebuilt({ rebuild }) {
  const rest = rebuild.sequences - rebuild.done - rebuild.failed;
  return (rest > 0 ? `; ${count(rest)} of ${count(rebuild.sequences)} are being restored` : "") +
    (rebuild.failed > 0 ? `; ${count(rebuild.failed)} could not be restored` : "");
}

function showState(text, className) {
  show("state", text);
  at("state").className = className;
}

async function ask() {
  try {
    const answer = await fetch("status.json", { signal: AbortSignal.timeout(5000) });
    const now = await answer.json();
    if (history.length > 0 && history[0].boot_id !== now.boot_id) history.length = 0;
    history.push(now);
    if (history.length > KEPT) history.shift();
    document.querySelector("main").className = "";
    show("about", `${now.version}, up ${age(now.uptime_seconds)}; ` +
      `${count(now.sequence_count)} sequences, ${count(now.token_count)} tokens` + rebuilt(now));
    showState(now.not_ready === "" ? "ready" : now.not_ready, now.not_ready === "" ? "good" : "bad");
    showFigures(now);
    showMemory(now.memory);
    showModels(now);
    showAudit(now);
    showRest(now);
  } catch (error) {
    document.querySelector("main").className = "stale";
    showState("no answer", "bad");
  }
  setTimeout(ask, 1000);
}

ask();
