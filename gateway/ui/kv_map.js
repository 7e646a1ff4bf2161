// The blocks of one pool as colored squares on a canvas. Hovering or the arrow keys describe a block, a click picks it.
// A canvas instead of one element per block: an H200 has 56,000 blocks.

const FLASH_MS = 1200;
const POOLS = {
  device: { names: { p: "padding", f: "free", c: "cached", a: "active", s: "shared" },
            colors: { p: "line", f: "free", c: "cached", a: "active", s: "shared" } },
  host: { names: { p: "padding", f: "free", c: "cached", a: "swapped", s: "swapped, shared" },
          colors: { p: "line", f: "free", c: "cached", a: "swapped", s: "swapped" } },
};

// Blocks that replaced others in a block table, which is how copy-on-write appears in snapshots.
function copied(before, after) {
  if (before?.worker !== after.worker) return [];
  const tables = new Map(before.tables.map((table) => [table.id + table.group, table]));
  return after.tables.flatMap(({ id, group, first, blocks }) => {
    const old = tables.get(id + group) ?? { first, blocks: [] };
    return blocks.filter((block, index) => block !== (old.blocks[first + index - old.first] ?? block));
  });
}

export class KVMap {
  // `onPick` gets the id of a request that holds the clicked block, or "".
  constructor(canvas, tip, pool, onPick) {
    this.canvas = canvas;
    this.tip = tip;
    this.pool = POOLS[pool];
    this.onPick = onPick;
    this.view = null;
    this.picked = new Set();
    this.flashing = new Map(); // block id -> end time
    this.focused = -1;
    canvas.addEventListener("mousemove", (event) => this.#showTip(this.#blockAt(event)));
    canvas.addEventListener("mouseleave", () => this.#showTip(-1));
    canvas.addEventListener("click", (event) => this.#pick(this.#blockAt(event)));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => { this.focused = -1; this.#showTip(-1); this.#paint(); });
    new ResizeObserver(() => this.#paint()).observe(canvas.parentElement);
    document.addEventListener("themechange", () => this.#paint());
  }

  // view: {worker, states, slots (of a block), tables: [{id, group, blocks, first (its number), computed (tokens)}]}
  draw(view, picked) {
    const until = performance.now() + FLASH_MS;
    const fresh = copied(this.view, view);
    for (const block of fresh) this.flashing.set(block, until);
    if (fresh.length) setTimeout(() => this.#paint(), FLASH_MS + 20);
    this.view = view;
    this.picked = new Set(picked);
    this.#paint();
  }

  #layout() {
    const width = this.canvas.parentElement.clientWidth;
    const count = this.view.states.length;
    const size = count <= 1500 ? 12 : count <= 8000 ? 8 : 5;
    const columns = Math.max(1, Math.floor(width / size));
    return { width, size, columns, rows: Math.ceil(count / columns) };
  }

  #paint() {
    if (!this.view) return;
    const { width, size, columns, rows } = this.#layout();
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${rows * size}px`;
    this.canvas.width = width * scale;
    this.canvas.height = rows * size * scale;
    Object.assign(this.canvas.dataset, { columns, size });
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const colors = this.#colors();
    const now = performance.now();
    for (const [block, until] of this.flashing) if (until <= now) this.flashing.delete(block);
    const { states } = this.view;
    for (let id = 0; id < states.length; id += 1) {
      const x = (id % columns) * size;
      const y = Math.floor(id / columns) * size;
      context.fillStyle = this.flashing.has(id) ? colors.flash : colors[states[id]];
      context.fillRect(x, y, size - 1, size - 1);
      if (this.picked.has(id) || id === this.focused) {
        context.strokeStyle = colors.picked;
        context.strokeRect(x + 0.5, y + 0.5, size - 2, size - 2);
      }
    }
  }

  #colors() {
    const style = getComputedStyle(document.documentElement);
    const named = Object.entries({ ...this.pool.colors, flash: "flash", picked: "picked" });
    return Object.fromEntries(named.map(([key, name]) => [key, style.getPropertyValue(`--${name}`)]));
  }

  #blockAt(event) {
    if (!this.view) return -1;
    const { size, columns } = this.#layout();
    const id = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    return id < this.view.states.length ? id : -1;
  }

  #pick(id) {
    if (id >= 0) this.onPick(this.#owners(id)[0]?.id ?? "");
  }

  #key(event) {
    if (!this.view) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#pick(this.focused);
      return;
    }
    const { columns } = this.#layout();
    const last = this.view.states.length - 1;
    const target = {
      ArrowLeft: this.focused - 1, ArrowRight: this.focused + 1, ArrowUp: this.focused - columns,
      ArrowDown: this.focused + columns, Home: 0, End: last,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    this.focused = Math.min(last, Math.max(0, target));
    this.#paint();
    this.#showTip(this.focused);
  }

  #showTip(id) {
    this.tip.hidden = id < 0;
    if (id < 0) return;
    const { size, columns } = this.#layout();
    this.tip.textContent = this.#describe(id);
    this.tip.style.left = `${Math.max(0, Math.min((id % columns) * size, this.canvas.clientWidth - 270))}px`;
    this.tip.style.top = `${(Math.floor(id / columns) + 1) * size + 4}px`;
  }

  #owners(id) {
    return this.view.tables.filter((table) => table.blocks.includes(id));
  }

  #describe(id) {
    const owners = this.#owners(id);
    const { slots, states } = this.view;
    const lines = owners.map((table) => {
      const index = table.first + table.blocks.indexOf(id);
      const filled = Math.min(slots, Math.max(0, table.computed - index * slots));
      return `${table.id}: its block ${index}${table.group}, ${filled} of ${slots} slots filled`;
    });
    const references = owners.length ? `, ${owners.length} reference${owners.length > 1 ? "s" : ""}` : "";
    return [`Block ${id}: ${this.pool.names[states[id]]}${references}`, ...lines].join(". ");
  }
}
