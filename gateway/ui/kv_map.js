// The blocks of one device as coloured squares on a canvas; hovering or the arrow keys tell of one block.
// A canvas and not an element a block: an H200 has 56,000 of them.

const NAMES = { p: "padding", f: "free", c: "cached", a: "active", s: "shared" };
const FLASH_MS = 1200;

// Blocks that took the place of others in a block table: what copy-on-write looks like from outside.
function copied(before, after) {
  if (before?.worker !== after.worker) return [];
  const tables = new Map(before.requests.map((request) => [request.id, request.blocks]));
  return after.requests.flatMap(({ id, blocks }) => {
    const old = tables.get(id) || [];
    return blocks.filter((block, index) => index < old.length && block !== old[index]);
  });
}

export class KVMap {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.snapshot = null;
    this.picked = new Set();
    this.flashing = new Map(); // block id -> until when
    this.focused = 1;
    canvas.addEventListener("mousemove", (event) => this.#tell(this.#blockAt(event)));
    canvas.addEventListener("mouseleave", () => this.#tell(-1));
    canvas.addEventListener("keydown", (event) => this.#step(event));
    canvas.addEventListener("blur", () => this.#tell(-1));
    new ResizeObserver(() => this.#paint()).observe(canvas.parentElement);
  }

  draw(snapshot, picked) {
    for (const block of copied(this.snapshot, snapshot)) this.flashing.set(block, performance.now() + FLASH_MS);
    this.snapshot = snapshot;
    this.picked = new Set(picked);
    this.#paint();
  }

  #layout() {
    const width = this.canvas.parentElement.clientWidth;
    const count = this.snapshot.states.length;
    const size = count <= 1500 ? 12 : count <= 8000 ? 8 : 5;
    const columns = Math.max(1, Math.floor(width / size));
    return { width, size, columns, rows: Math.ceil(count / columns) };
  }

  #paint() {
    if (!this.snapshot) return;
    const { width, size, columns, rows } = this.#layout();
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${rows * size}px`;
    this.canvas.width = width * scale;
    this.canvas.height = rows * size * scale;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const colours = { p: colour("line"), f: colour("free"), c: colour("cached"), a: colour("active"), s: colour("shared") };
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const now = performance.now();
    const { states } = this.snapshot;
    for (let id = 0; id < states.length; id += 1) {
      const x = (id % columns) * size;
      const y = Math.floor(id / columns) * size;
      context.fillStyle = (this.flashing.get(id) || 0) > now ? colour("flash") : colours[states[id]];
      context.fillRect(x, y, size - 1, size - 1);
      if (this.picked.has(id)) {
        context.strokeStyle = colour("picked");
        context.strokeRect(x + 0.5, y + 0.5, size - 2, size - 2);
      }
    }
  }

  #blockAt(event) {
    if (!this.snapshot) return -1;
    const { size, columns } = this.#layout();
    const id = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    return id < this.snapshot.states.length ? id : -1;
  }

  #step(event) {
    if (!this.snapshot) return;
    const { columns } = this.#layout();
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!move) return;
    event.preventDefault();
    this.focused = Math.min(this.snapshot.states.length - 1, Math.max(0, this.focused + move));
    this.#tell(this.focused);
  }

  #tell(id) {
    this.tip.hidden = id < 0;
    if (id < 0) return;
    const { size, columns } = this.#layout();
    this.tip.textContent = this.#describe(id);
    this.tip.style.left = `${Math.min((id % columns) * size, this.canvas.clientWidth - 180)}px`;
    this.tip.style.top = `${(Math.floor(id / columns) + 1) * size + 4}px`;
  }

  #describe(id) {
    const owners = this.snapshot.requests.filter((request) => request.blocks.includes(id));
    const { block_size: slots } = this.snapshot;
    const lines = owners.map((request) => {
      const index = request.blocks.indexOf(id);
      const filled = Math.min(slots, Math.max(0, request.num_computed_tokens - index * slots));
      return `${request.id}: its block ${index}, ${filled} of ${slots} slots filled`;
    });
    const owned = owners.length ? `, in ${owners.length} block table${owners.length > 1 ? "s" : ""}` : "";
    return [`Block ${id}: ${NAMES[this.snapshot.states[id]]}${owned}`, ...lines].join(". ");
  }
}
