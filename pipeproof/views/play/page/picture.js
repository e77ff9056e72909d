// The timeline as a picture: a row of computations for each rank, and below it the activations that it holds.

const ROW = 26, CURVE = 16, GAP = 8, AXIS = 22, LABEL = 52;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function mixed(full, pale, share) {
  const part = (colour, place) => parseInt(colour.slice(1 + 2 * place, 3 + 2 * place), 16);
  return `rgb(${[0, 1, 2].map((place) => Math.round(part(full, place) + (part(pale, place) - part(full, place)) * share)).join(",")})`;
}

const isDark = (rgb) => {
  const [red, green, blue] = rgb.match(/\d+/g).map(Number).map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) > (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) / 0.05;
};

// A round step that gives a width about `wanted` marks.
function tickStep(width, wanted) {
  const rough = width / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

const timeText = (ns) => duration(ns / 1e3); // units.js is before this script

class Picture {
  constructor(canvas, onSelect) {
    this.canvas = canvas;
    this.onSelect = onSelect;
    this.selected = -1;
    canvas.addEventListener("wheel", (event) => this.wheel(event), {passive: false});
    canvas.addEventListener("pointerdown", (event) => this.pointerDown(event));
    canvas.addEventListener("pointermove", (event) => this.pointerMove(event));
    canvas.addEventListener("pointerup", () => { this.drag = null; });
    canvas.addEventListener("pointerleave", () => { if (!this.drag) this.onSelect(this, this.selected); });
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  // Draw a run; the time axis ends at `most`, or at the makespan if that is later.
  show(graph, timed, figures, most = 0) {
    [this.graph, this.timed, this.figures] = [graph, timed, figures];
    this.selected = -1;
    if (figures) {
      const whole = Math.max(figures.makespan, most);
      if (this.whole !== whole) [this.whole, this.from, this.to] = [whole, 0, whole];
      this.rows = range(graph.numRanks).map((rank) => range(graph.offsets[rank + 1] - graph.offsets[rank], graph.offsets[rank])
        .filter((row) => COMPUTES.has(graph.kind[row])));
      this.chunks = this.rows.map((rows) => [...new Set(rows.map((row) => graph.stage[row]))].sort((a, b) => a - b));
    }
    this.draw();
  }

  get height() { return AXIS + this.graph.numRanks * (ROW + CURVE + GAP); }
  top(rank) { return AXIS + rank * (ROW + CURVE + GAP); }
  x(time) { return LABEL + (time - this.from) / (this.to - this.from) * (this.width - LABEL); }
  time(x) { return this.from + (x - LABEL) / (this.width - LABEL) * (this.to - this.from); }

  // The box of a computation in the picture; the two of a pair share the height.
  box(row) {
    const graph = this.graph, first = graph.pairOf[row] >= 0, second = graph.pairOf[row + 1] === row;
    const x = this.x(this.timed.starts[row]), half = ROW / 2;
    return {x, w: this.x(this.timed.ends[row]) - x, y: this.top(graph.rank[row]) + (first ? half : 0), h: first || second ? half : ROW};
  }

  colour(row) {
    const graph = this.graph, chunks = this.chunks[graph.rank[row]], kind = graph.kind[row];
    const share = chunks.length > 1 ? chunks.indexOf(graph.stage[row]) / (chunks.length - 1) : 0;
    return mixed(this.colours[kind], this.colours[`${kind}-pale`], share);
  }

  draw() {
    if (!this.graph) return;
    this.colours = Object.fromEntries(["F", "B", "I", "W", "F-pale", "B-pale", "I-pale", "W-pale", "lane", "line", "text", "faint", "held", "select"]
      .map((name) => [name, style(`--${name}`)]));
    const ratio = devicePixelRatio || 1, pen = this.canvas.getContext("2d");
    this.width = this.canvas.parentElement.clientWidth;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    if (!this.figures) return;
    pen.font = "12px ui-sans-serif, system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawAxis(pen);
    range(this.graph.numRanks).forEach((rank) => this.drawRank(pen, rank));
    if (this.selected >= 0) {
      const {x, y, w, h} = this.box(this.selected);
      pen.strokeStyle = this.colours.select;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, Math.max(2, w - 2), h - 2);
    }
  }

  drawAxis(pen) {
    const step = tickStep(this.to - this.from, this.width / 110);
    pen.fillStyle = this.colours.faint;
    pen.strokeStyle = this.colours.line;
    pen.lineWidth = 1;
    for (let time = Math.ceil(this.from / step) * step; time <= this.to; time += step) {
      const x = Math.round(this.x(time)) + 0.5, text = tickText(time / 1e3, step / 1e3), width = pen.measureText(text).width;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, this.height);
      pen.stroke();
      if (x + 3 + width <= this.width) pen.fillText(text, x + 3, AXIS / 2);
    }
  }

  drawRank(pen, rank) {
    const y = this.top(rank), width = this.width, colours = this.colours;
    pen.fillStyle = colours.lane;
    pen.fillRect(LABEL, y, width - LABEL, ROW);
    pen.fillStyle = colours.text;
    pen.fillText(`rank ${rank}`, 0, y + ROW / 2);
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, y, width - LABEL, ROW + CURVE + GAP);
    pen.clip();
    pen.textAlign = "center";
    for (const row of this.rows[rank]) {
      const {x, y: top, w, h} = this.box(row);
      if (x > width || x + w < LABEL) continue;
      const colour = this.colour(row), kind = this.graph.kind[row];
      const text = [`${kind}${this.graph.microBatch[row]}`, kind].find((one) => w > pen.measureText(one).width + 1);
      pen.fillStyle = colour;
      pen.fillRect(x, top, Math.max(0.5, w - (w > 3 ? 1 : 0)), h - (h < ROW ? 1 : 0));
      if (text && h > 11) {
        pen.fillStyle = isDark(colour) ? "#ffffff" : "#000000";
        pen.fillText(text, x + w / 2, top + h / 2 + 0.5);
      }
    }
    pen.textAlign = "left";
    this.drawCurve(pen, rank, y + ROW + CURVE);
    pen.restore();
  }

  drawCurve(pen, rank, base) {
    const most = Math.max(...this.figures.ranks.map(({peak}) => peak));
    pen.fillStyle = this.colours.held;
    pen.globalAlpha = 0.55;
    pen.beginPath();
    pen.moveTo(LABEL, base);
    let level = base;
    for (const [time, held] of this.figures.ranks[rank].curve) {
      pen.lineTo(this.x(time), level);
      level = base - held / most * (CURVE - 2);
      pen.lineTo(this.x(time), level);
    }
    pen.lineTo(this.x(this.figures.makespan), base);
    pen.fill();
    pen.globalAlpha = 1;
  }

  // The computation at a point, -1 without one.
  at(x, y) {
    if (!this.figures || x < LABEL) return -1;
    const rank = Math.floor((y - AXIS) / (ROW + CURVE + GAP)), time = this.time(x);
    if (rank < 0 || rank >= this.graph.numRanks || y - this.top(rank) > ROW) return -1;
    const isLower = y - this.top(rank) >= ROW / 2;
    const found = this.rows[rank].filter((row) => this.timed.starts[row] <= time && time < this.timed.ends[row]);
    return found[found.length > 1 && isLower ? 1 : 0] ?? -1;
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const from = at - (at - this.from) * factor, to = at + (this.to - at) * factor;
    if (to - from < 10) return;
    [this.from, this.to] = to - from >= this.whole ? [0, this.whole] : [from, to];
    this.pan(0);
  }

  pan(time) {
    const width = this.to - this.from;
    this.view(Math.max(0, Math.min(this.whole - width, this.from + time)), width);
  }

  // Show a range of time, in a picture that goes along, too.
  view(from, width) {
    for (const one of [this, this.other]) {
      if (!one) continue;
      [one.from, one.to] = [from, from + width];
      one.draw();
    }
  }

  fit() {
    if (this.figures) this.view(0, this.whole);
  }

  select(row) {
    this.selected = row;
    if (row >= 0) {
      const {starts, ends} = this.timed, width = this.to - this.from;
      if (starts[row] < this.from || ends[row] > this.to) this.pan((starts[row] + ends[row] - width) / 2 - this.from);
    }
    this.draw();
    this.onSelect(this, row);
  }

  wheel(event) {
    if (!this.figures || !(event.ctrlKey || event.metaKey || event.shiftKey)) return; // the page scrolls
    event.preventDefault();
    if (event.shiftKey) this.pan((event.deltaY || event.deltaX) / 500 * (this.to - this.from));
    else this.zoom(Math.exp(event.deltaY / 300), this.time(event.offsetX));
  }

  pointerDown(event) {
    this.drag = {x: event.offsetX, from: this.from};
    this.select(this.at(event.offsetX, event.offsetY));
  }

  pointerMove(event) {
    if (!this.figures) return;
    if (this.drag && event.buttons) {
      const perPixel = (this.to - this.from) / (this.width - LABEL);
      this.pan(this.drag.from - (event.offsetX - this.drag.x) * perPixel - this.from);
    } else {
      const row = this.at(event.offsetX, event.offsetY);
      this.onSelect(this, row < 0 ? this.selected : row);
    }
  }

  key(event) {
    if (!this.figures || event.ctrlKey || event.metaKey || event.altKey) return;
    const width = this.to - this.from;
    const actions = {
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), 0: () => this.fit(),
      ArrowLeft: () => this.pan(-width / 8), ArrowRight: () => this.pan(width / 8),
      ".": () => this.step(1), ",": () => this.step(-1), ArrowDown: () => this.change(1), ArrowUp: () => this.change(-1),
      Escape: () => this.select(-1),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  step(by) {
    if (this.selected < 0) { this.select(this.rows[0][0]); return; }
    const rows = this.rows[this.graph.rank[this.selected]];
    this.select(rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(this.selected) + by))]);
  }

  // Select the computation of another rank that runs when the selected one begins, or the one after that.
  change(by) {
    if (this.selected < 0) { this.select(this.rows[0][0]); return; }
    const rank = this.graph.rank[this.selected] + by, time = this.timed.starts[this.selected];
    if (rank >= 0 && rank < this.graph.numRanks) this.select(this.rows[rank].find((row) => this.timed.ends[row] > time) ?? this.rows[rank].at(-1));
  }
}
