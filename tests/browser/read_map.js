// Return the color names painted for each block: [inside, edge]. Evaluated in the page.
(id) => {
  const NAMES = ["line", "free", "cached", "active", "shared", "swapped", "picked", "flash"];
  const style = getComputedStyle(document.documentElement);
  const probe = new OffscreenCanvas(1, 1).getContext("2d");
  const rgb = (name) => {
    probe.fillStyle = style.getPropertyValue(`--${name}`);
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data.slice(0, 3).join();
  };
  // If two names share a color, the first one is reported.
  const palette = Object.fromEntries(NAMES.map((name) => [rgb(name), name]).reverse());
  const canvas = document.getElementById(id);
  const columns = Number(canvas.dataset.columns);
  const size = Number(canvas.dataset.size);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const at = (x, y) => {
    const first = 4 * (Math.round(y * devicePixelRatio) * canvas.width + Math.round(x * devicePixelRatio));
    const color = pixels.slice(first, first + 3).join();
    return palette[color] ?? color;
  };
  const painted = [];
  for (let top = 0; top < canvas.height / devicePixelRatio; top += size) {
    for (let column = 0; column < columns; column += 1) {
      const left = column * size;
      painted.push([at(left + size / 2 - 1, top + size / 2 - 1), at(left, top + size / 2)]);
    }
  }
  return painted;
}
