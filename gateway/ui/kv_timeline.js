// Block moves of the last two minutes: a lane per kind of move, a tick per event, taller for more blocks.

const SHOWN_SECONDS = 120;
const LANE_PIXELS = 14;
const LANES = [
  { name: "preempted", color: "flash", kinds: ["swap_out", "recompute"] },
  { name: "restored", color: "active", kinds: ["swap_in", "fetch"] },
  { name: "copied", color: "shared", kinds: ["copy"] },
  { name: "evicted", color: "cached", kinds: ["evict"] },
];
const LABEL_PIXELS = 74;

export class KVTimeline {
  constructor(canvas) {
    this.canvas = canvas;
  }

  // `events` have time_seconds, kind, and num_blocks; `now` is of the same clock.
  draw(events, now) {
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.parentElement.clientWidth;
    const height = (LANES.length + 1) * LANE_PIXELS;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const shown = events.filter((event) => now - event.time_seconds < SHOWN_SECONDS);
    const summaries = LANES.map((lane, number) => {
      const ours = shown.filter((event) => lane.kinds.includes(event.kind));
      const bottom = (number + 1) * LANE_PIXELS - 2;
      context.fillStyle = style.getPropertyValue("--muted");
      context.font = "11px system-ui, sans-serif";
      context.fillText(lane.name, 0, bottom - 1);
      context.fillStyle = style.getPropertyValue("--line");
      context.fillRect(LABEL_PIXELS, bottom, width - LABEL_PIXELS, 1);
      context.fillStyle = style.getPropertyValue(`--${lane.color}`);
      for (const event of ours) {
        const x = LABEL_PIXELS + (width - LABEL_PIXELS - 3) * (1 - (now - event.time_seconds) / SHOWN_SECONDS);
        const tall = Math.min(LANE_PIXELS - 3, 3 + 2 * Math.log2(1 + event.num_blocks));
        context.fillRect(x, bottom - tall, 2, tall);
      }
      return `${ours.length} ${lane.name}`;
    });
    drawAxis(context, style, width);
    this.canvas.setAttribute("aria-label", `Moves of blocks in the last two minutes: ${summaries.join(", ")}`);
  }
}

// The times below the lanes.
function drawAxis(context, style, width) {
  const top = LANES.length * LANE_PIXELS + 10;
  context.fillStyle = style.getPropertyValue("--muted");
  for (const [share, label, align] of [[0, "-2 min", "left"], [0.5, "-1 min", "center"], [1, "now", "right"]]) {
    context.textAlign = align;
    context.fillText(label, LABEL_PIXELS + share * (width - LABEL_PIXELS), top);
  }
}
