// The little that the pages do by themselves: live counters, charts, times, dialogs, keys.
(() => {
  "use strict";
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const DASH = "–";

  // --- words for numbers, as the server has them ---
  const count = (value) => value == null ? DASH : value >= 100 || Number.isInteger(value)
    ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3)).toString();
  const percent = (share) => share == null ? DASH : (share < 0.1 ? Number((100 * share).toPrecision(2))
    : share > 0.99 && share < 1 ? Math.floor(1e4 * share) / 100 : Math.round(100 * share)) + " %";
  const say = (element, value, more) => {
    const text = element.dataset.as === "percent" ? percent(value) : count(value) + (more ? "+" : "");
    if (element.textContent !== text) element.textContent = text;
    if ("hideZero" in element.dataset) element.hidden = !value;
  };

  // --- times in the reader's own zone ---
  const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const short = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 });
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const away = new Intl.RelativeTimeFormat("en", { numeric: "always", style: "short" });
  const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
  const relative = (at) => {
    const seconds = Math.round((at - Date.now()) / 1000);
    const [unit, size] = UNITS.find(([, each]) => Math.abs(seconds) >= each) || UNITS[3];
    return away.format(Math.trunc(seconds / size), unit);
  };
  const localise = (root) => $$("time[datetime]", root).forEach((each) => {
    const at = new Date(each.dateTime);
    if (Number.isNaN(at.valueOf())) return;
    const text = "ago" in each.dataset ? relative(at) : ("short" in each.dataset ? short : "clock" in each.dataset ? clock : full).format(at);
    if (each.textContent !== text) each.textContent = text;
    each.title = "ago" in each.dataset ? full.format(at) : each.dateTime;
  });

  // --- on a phone a row is a list: each cell names its column ---
  const label = (root) => $$("table.stack", root).forEach((table) => {
    const names = $$("thead th", table).map((each) => each.textContent);
    $$("tbody tr", table).forEach((row) => [...row.cells].forEach((cell, at) => { cell.dataset.label = names[at] || ""; }));
  });

  // --- counters in the header, pushed by the server ---
  const pulse = (state, text) => {
    const dot = $("#pulse");
    if (!dot) return;
    dot.className = "dot " + state;
    $("#pulse-text").textContent = text;
  };
  const listen = () => {
    if (!$("[data-live]")) return;
    const source = new EventSource("/ui/live");
    source.addEventListener("tick", (event) => {
      const now = JSON.parse(event.data);
      $$("[data-count]").forEach((each) => say(each, now[each.dataset.count], "more" in each.dataset && now.bounded));
      $$("[data-if]").forEach((each) => { each.hidden = !now[each.dataset.if]; });
      const rate = $("[data-count=rate]");
      if (rate) rate.classList.toggle("alarm", now.alarm);
      pulse("on", "last hour, live");
    });
    source.onerror = () => pulse("off", "not connected");
    addEventListener("pagehide", () => source.close());
  };

  // --- parts that are asked for again: only while somebody looks ---
  const isUsed = (part) => $("dialog[open], details[open]", part) || part.contains(document.activeElement);
  const repeat = () => $$("[data-every]").forEach((each) => setInterval(() => {
    if (document.hidden || each.dataset.paused || !each.isConnected || isUsed(each)) return;
    each.dispatchEvent(new Event("refresh"));
  }, 1000 * each.dataset.every));

  // --- charts ---
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const KINDS = {
    rates: { unit: "per second", series: [["received", "--blue"], ["processed", "--green"], ["duplicates", "--amber"], ["failed", "--red"]] },
    share: { unit: "%", series: [["rate", "--amber"]], line: "alarm" },
    handler: { unit: "ms", series: [["handler_p50", "--blue", "half"], ["handler_p95", "--violet", "95 %"]] },
    latency: { unit: "ms", series: [["p50", "--blue"], ["p99", "--violet"]] },
  };
  const drawn = new Map();
  // A value between two gaps is no line: it is a point.
  const alone = (u, at) => u.data[at].flatMap((value, i, all) => value != null && all[i - 1] == null && all[i + 1] == null ? [i] : []);
  const latest = (plot) => { if (plot.cursor.idx == null) plot.setLegend({ idx: plot.data[0].length - 1 }); };
  const options = (kind, width, height, alarm) => {
    const axis = { stroke: css("--text-soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      width, height,
      cursor: { points: { size: 6 }, y: false },
      legend: { live: true },
      scales: { x: { time: true }, y: { range: (u, low, high) => [0, Math.max(high || 0, kind.line ? 2 * alarm : 0.001) * 1.08] } },
      axes: [axis, { ...axis, size: 58, label: kind.unit, labelSize: 16, labelFont: "11px system-ui", labelGap: 0, values: (u, values) => values.map((value) => count(value)) }],
      series: [{}, ...kind.series.map(([name, colour, label], at) => ({
        label: label || name, stroke: css(colour), width: 2, spanGaps: false,
        dash: at === 3 ? [4, 3] : undefined,
        fill: at === 0 ? css(colour) + "1c" : undefined,
        points: { show: false, size: 5, filter: alone },
        value: (u, value) => value == null ? DASH : count(value) + (kind.unit === "%" ? " %" : ""),
      }))],
      hooks: { setCursor: [latest], draw: !kind.line ? [] : [(u) => {
        const y = Math.round(u.valToPos(alarm, "y", true)), { ctx, bbox } = u;
        ctx.save();
        ctx.strokeStyle = css("--red"); ctx.setLineDash([6, 5]); ctx.lineWidth = 1.5;
        ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
        ctx.restore();
      }] },
    };
  };
  const table = (name, columns) => {
    const target = $(`[data-table=${name}]`);
    if (!target || !target.closest("details").open) return;
    const names = KINDS[name].series.map(([each]) => each);
    const rows = [["time", ...KINDS[name].series.map(([each, , label]) => label || each)], ...columns.t.map((at, row) => [full.format(new Date(1000 * at)), ...names.map((each) => count(columns[each][row]))]).reverse()];
    target.replaceChildren(...rows.map((cells, row) => {
      const line = document.createElement("tr");
      cells.forEach((text, at) => {
        const cell = document.createElement(row ? "td" : "th");
        cell.textContent = text;
        if (at) cell.className = "n";
        line.append(cell);
      });
      return line;
    }));
  };
  let last = null;
  const draw = (answer, afresh) => {
    last = answer;
    $$("[data-chart]").forEach((place) => {
      const name = place.dataset.chart, kind = KINDS[name];
      const data = [answer.columns.t, ...kind.series.map(([each]) => answer.columns[each])];
      const height = place.closest(".wide") ? 230 : 190, width = place.clientWidth;
      if (afresh && drawn.has(name)) { drawn.get(name).destroy(); drawn.delete(name); }
      if (drawn.has(name)) drawn.get(name).setData(data);
      else drawn.set(name, new uPlot(options(kind, width, height, answer.alarm), data, place));
      latest(drawn.get(name));
      table(name, answer.columns);
    });
    $$("[data-total]").forEach((each) => say(each, answer.totals[each.dataset.total]));
  };
  const charts = () => {
    const place = $("#charts");
    if (!place) return;
    const fetched = async () => {
      if (document.hidden) return;
      const answer = await fetch(place.dataset.source);
      if (answer.ok) draw(await answer.json(), false);
    };
    fetched();
    setInterval(fetched, 5000);
    const again = () => last && draw(last, true);
    let timer = 0;
    addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(again, 150); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    addEventListener("semel-theme", again);
    $$("figure details").forEach((each) => each.addEventListener("toggle", () => last && draw(last, false)));
  };

  // --- hands ---
  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-open], [data-close], [data-pause], #theme");
    if (!target) return;
    if (target.dataset.open) document.getElementById(target.dataset.open).showModal();
    else if ("close" in target.dataset) target.closest("dialog").close();
    else if (target.dataset.pause) {
      const part = $(target.dataset.pause), paused = !part.dataset.paused;
      if (paused) part.dataset.paused = "yes"; else delete part.dataset.paused;
      target.setAttribute("aria-pressed", paused);
      target.textContent = paused ? "Go on" : "Pause";
    } else {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      localStorage.setItem("semel-theme", root.dataset.theme);
      dispatchEvent(new Event("semel-theme"));
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select")) return;
    event.preventDefault();
    $("#search").focus();
  });

  localise(document);
  label(document);
  new MutationObserver((changes) => changes.forEach((change) => change.addedNodes.forEach((node) => { if (node.nodeType === 1) { localise(node); label(node); } })))
    .observe(document.body, { childList: true, subtree: true });
  $$("[data-origin]").forEach((each) => { each.textContent = location.origin; });
  setInterval(() => localise(document), 5000);
  listen();
  repeat();
  charts();
})();
