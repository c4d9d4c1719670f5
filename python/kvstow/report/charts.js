// Draw each chart as SVG for the width of its figure, and again when that changes.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const DASHES = ["", "7 4", "2 3", "10 3 2 3", "1 5", "10 3 2 3 2 3"];
  const NS = "http://www.w3.org/2000/svg";

  const node = (parent, name, attributes = {}, text = "") => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    parent.append(made);
    return made;
  };
  const tag = (parent, name, text = "", kind = "") => {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    made.textContent = text;
    parent.append(made);
    return made;
  };

  // -- numbers --------------------------------------------------------------------------------
  const plain = (value, digits = 3) =>
    value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(digits, 1) });
  const scaled = (value, units, step) => {
    let at = 0;
    while (Math.abs(value) >= step && at < units.length - 1) { value /= step; at += 1; }
    return `${plain(value)} ${units[at]}`;
  };
  const FORMATS = {
    number: (value) => plain(value, 4),
    percent: (value) => `${(100 * value).toFixed(Math.abs(value) < 0.1 && value ? 1 : 0)}%`,
    exact_percent: (value) => `${(100 * value).toFixed(2)}%`,
    bytes_per_s: (value) => scaled(value, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000),
    gib: (value) => value >= 1024 ? `${plain(value / 1024)} TiB`
      : value >= 1 || value === 0 ? `${plain(value)} GiB` : `${plain(value * 1024)} MiB`,
    hours: (value) => value >= 1 ? `${plain(value)} h` : `${plain(value * 60)} min`,
    microseconds: (value) => scaled(value, ["µs", "ms", "s"], 1000),
  };
  const exactly = (format) => FORMATS[`exact_${format}`] || FORMATS[format];

  // -- scales ---------------------------------------------------------------------------------
  const evenTicks = (low, high, number, base = 10) => {
    const rough = (high - low) / number || 1;
    const power = base ** Math.floor(Math.log(rough) / Math.log(base));
    const factors = base === 2 ? [1, 2] : [1, 2, 5, 10];
    const step = power * factors.find((factor) => factor * power >= rough * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high * 1.0001; at += 1) found.push(at * step);
    return found;
  };
  const logTicks = (low, high, number, base) => {
    const first = Math.floor(Math.log(low) / Math.log(base) + 0.999);
    const last = Math.floor(Math.log(high) / Math.log(base) + 0.001);
    const step = Math.max(1, Math.ceil((last - first) / number));
    const found = [];
    for (let at = first; at <= last; at += step) found.push(base ** at);
    return found;
  };

  class Drawing {
    constructor(figure, chart) {
      this.figure = figure;
      this.chart = chart;
      this.isLog = false;
      this.hidden = new Set();
      this.bar = tag(figure, "div", "", "bar");
      this.at = tag(figure, "div", "", "at");
      this.values = chart.series.map((series, number) => this.legend(series, number));
      tag(this.bar, "span", "", "space");
      if (chart.can_be_log) {
        const button = tag(this.bar, "button", "log axis");
        button.type = "button";
        button.addEventListener("click", () => {
          this.isLog = !this.isLog;
          button.textContent = this.isLog ? "linear axis" : "log axis";
          this.draw();
        });
      }
      for (const kind of ["SVG", "PNG"]) {
        const button = tag(this.bar, "button", kind);
        button.type = "button";
        button.title = `Save this chart as ${kind}`;
        button.addEventListener("click", () => this.save(kind));
      }
      this.svg = node(figure, "svg", { role: "img", "aria-label": chart.title });
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => this.leave());
      new ResizeObserver(() => this.draw()).observe(figure);
      this.draw();
    }

    legend(series, number) {
      const button = tag(this.bar, "button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const icon = node(button, "svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
      node(icon, "line", { x1: 0, x2: 26, y1: 5, y2: 5, ...this.stroke(number), "stroke-width": 3 });
      tag(button, "span", series.name);
      const value = tag(button, "b");
      button.addEventListener("click", () => {
        const isHidden = !this.hidden.delete(number);
        if (isHidden) this.hidden.add(number);
        button.setAttribute("aria-pressed", String(!isHidden));
        this.draw();
      });
      return value;
    }

    stroke(number) {
      return {
        style: `stroke: var(--c${number % 6})`,
        "stroke-dasharray": this.chart.stacked ? "" : DASHES[number % DASHES.length],
      };
    }

    // The shown series, with the heights at which they are drawn.
    shown() {
      const below = [];
      return this.chart.series.flatMap((series, number) => {
        if (this.hidden.has(number)) return [];
        const base = series.x.map((_, at) => (this.chart.stacked && below[at]) || 0);
        const top = series.y.map((value, at) => value === null ? null : value + base[at]);
        top.forEach((value, at) => { below[at] = value === null ? base[at] : value; });
        return [{ ...series, number, base, top }];
      });
    }

    draw() {
      const { chart, svg } = this;
      const width = Math.max(this.figure.clientWidth - 24, 220);
      const isNarrow = width < 520;
      const height = isNarrow ? 260 : 340;
      this.box = { left: isNarrow ? 66 : 72, right: width - 14, top: 22, bottom: height - 44 };
      const { left, right, top, bottom } = this.box;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const series = this.series = this.shown();
      const xs = series.flatMap((one) => one.x).filter((x) => !this.isLog || x > 0);
      const ys = series.flatMap((one) => one.top).filter((y) => y !== null);
      const low = Math.min(...xs), high = Math.max(...xs);
      if (!xs.length || !(high > low)) {
        node(svg, "text", { x: left, y: (top + bottom) / 2 }, "no points to draw");
        this.toX = null;
        return;
      }
      const log = Math.log;
      const least = Math.min(...ys.filter((y) => y > 0));
      const most = Math.max(...ys, 0) * (chart.log_y ? 1.5 : 1.06) || 1;
      this.toX = (x) => left + (right - left) * (this.isLog
        ? log(x / low) / log(high / low) : (x - low) / (high - low));
      this.toY = (y) => bottom - (bottom - top) * (chart.log_y
        ? Math.max(0, log(y / least) / log(most / least)) : y / most);
      this.axes([low, high], [chart.log_y ? least : 0, most], isNarrow);
      for (const one of series) this.curve(one);
      chart.marks.forEach(([x, name], row) => this.mark(x, name, row, low, high));
      this.cursor = node(svg, "line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    }

    axes([low, high], [least, most], isNarrow) {
      const { chart, svg } = this;
      const { left, right, top, bottom } = this.box;
      const base = chart.x_format === "gib" ? 2 : 10;
      for (const y of chart.log_y ? logTicks(least, most, 5, 10) : evenTicks(0, most, 5)) {
        const at = this.toY(y);
        node(svg, "line", { class: "grid", x1: left, x2: right, y1: at, y2: at });
        node(svg, "text", { x: left - 6, y: at + 4, "text-anchor": "end" },
          FORMATS[chart.y_format](y));
      }
      const number = isNarrow ? 4 : 8;
      const ticks = this.isLog ? logTicks(low, high, number, base) : evenTicks(low, high, number, base);
      for (const x of ticks) {
        const at = this.toX(x);
        node(svg, "line", { class: "grid", x1: at, x2: at, y1: bottom, y2: bottom + 5 });
        const anchor = at > right - 20 ? "end" : "middle";
        node(svg, "text", { x: at, y: bottom + 19, "text-anchor": anchor },
          FORMATS[chart.x_format](x));
      }
      node(svg, "text", { x: right, y: bottom + 38, "text-anchor": "end" }, chart.x_label);
      node(svg, "text", { x: 2, y: 12 }, chart.y_label);
    }

    curve(one) {
      const points = one.x.map((x, at) => ({ x, y: one.top[at], base: one.base[at] }))
        .filter(({ x }) => !this.isLog || x > 0);
      const place = ({ x, y }) => `${this.toX(x).toFixed(1)},${this.toY(y).toFixed(1)}`;
      const runs = [[]];
      for (const point of points) {
        if (point.y === null) runs.push([]); else runs.at(-1).push(point);
      }
      for (const run of runs.filter((found) => found.length)) {
        if (this.chart.stacked) {
          const back = run.map(({ x, base }) => ({ x, y: base })).reverse();
          node(this.svg, "path", {
            class: "area",
            style: `fill: var(--c${one.number % 6})`,
            d: `M${[...run, ...back].map(place).join("L")}Z`,
          });
        }
        const path = run.length > 1 ? `M${run.map(place).join("L")}` : "";
        node(this.svg, "path", { class: "curve", d: path, ...this.stroke(one.number) });
      }
      const alone = runs.filter((run) => run.length === 1).flat();
      for (const point of one.dots ? points.filter(({ y }) => y !== null) : alone) {
        const [cx, cy] = place(point).split(",");
        node(this.svg, "circle", { cx, cy, r: 3, style: `fill: var(--c${one.number % 6})` });
      }
    }

    mark(x, name, row, low, high) {
      if (x < low || x > high) return;
      const at = this.toX(x);
      const { left, right, top, bottom } = this.box;
      node(this.svg, "line", { class: "mark", x1: at, x2: at, y1: top, y2: bottom });
      // The names of two marks grow away from each other, where there is room.
      const isLeft = (row === 0 && at > left + 60) || at > right - 100;
      node(this.svg, "text", {
        class: "marked",
        x: at + (isLeft ? -5 : 5),
        y: bottom - 7 - 15 * row,
        "text-anchor": isLeft ? "end" : "start",
      }, name);
    }

    point(event) {
      if (!this.toX) return;
      const bounds = this.svg.getBoundingClientRect();
      const wanted = (event.clientX - bounds.left) * this.svg.viewBox.baseVal.width / bounds.width;
      let nearest = null;
      for (const one of this.series) {
        for (const x of one.x) {
          if (this.isLog && x <= 0) continue;
          const distance = Math.abs(this.toX(x) - wanted);
          if (!nearest || distance < nearest.distance) nearest = { x, distance };
        }
      }
      const { x } = nearest;
      this.at.textContent = `${this.chart.x_label}: ${FORMATS[this.chart.x_format](x)}`;
      for (const [name, value] of [["x1", this.toX(x)], ["x2", this.toX(x)], ["visibility", "visible"]]) {
        this.cursor.setAttribute(name, value);
      }
      for (const value of this.values) value.textContent = "";
      for (const one of this.series) {
        const y = between(one, x);
        if (y !== null) this.values[one.number].textContent = ` ${exactly(this.chart.y_format)(y)}`;
      }
    }

    leave() {
      this.at.textContent = "";
      for (const value of this.values) value.textContent = "";
      if (this.cursor) this.cursor.setAttribute("visibility", "hidden");
    }

    save(kind) {
      const clone = this.svg.cloneNode(true);
      const { width, height } = this.svg.viewBox.baseVal;
      const drawn = [this.svg, ...this.svg.querySelectorAll("*")];
      [clone, ...clone.querySelectorAll("*")].forEach((copy, at) => {
        const style = getComputedStyle(drawn[at]);
        for (const name of ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "font"]) {
          copy.style.setProperty(name, style.getPropertyValue(name));
        }
      });
      clone.setAttribute("xmlns", NS);
      clone.setAttribute("width", width);
      clone.setAttribute("height", height);
      clone.style.background = getComputedStyle(this.figure).backgroundColor;
      const text = new XMLSerializer().serializeToString(clone);
      const url = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
      if (kind === "SVG") { download(url, `${this.chart.title}.svg`); return; }
      const picture = new Image();
      picture.addEventListener("load", () => {
        const canvas = document.createElement("canvas");
        canvas.width = 2 * width;
        canvas.height = 2 * height;
        canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
        download(canvas.toDataURL("image/png"), `${this.chart.title}.png`);
      });
      picture.src = url;
    }
  }

  // The value of a series at x, on the straight line between its neighbours.
  const between = (one, x) => {
    const after = one.x.findIndex((known) => known >= x);
    if (after < 0) return null;
    if (one.x[after] === x || after === 0) return one.x[after] === x ? one.y[after] : null;
    const [x0, x1, y0, y1] = [one.x[after - 1], one.x[after], one.y[after - 1], one.y[after]];
    return y0 === null || y1 === null ? null : y0 + (y1 - y0) * (x - x0) / (x1 - x0);
  };
  const download = (url, name) => {
    const link = document.createElement("a");
    link.href = url;
    link.download = name;
    link.click();
  };

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    new Drawing(figure, charts[Number(figure.dataset.chart)]);
  }
})();
