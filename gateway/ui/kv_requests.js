// The table of requests. Rows stay in place while their values change, so that a focused button keeps the focus.

export class RequestTable {
  // `onPick` gets the id of the request whose button is pressed.
  constructor(body, onPick) {
    this.body = body;
    this.onPick = onPick;
  }

  draw(requests, picked) {
    const ids = new Set(requests.map((request) => request.id));
    const kept = new Map();
    for (const row of [...this.body.rows]) {
      if (ids.has(row.dataset.id)) kept.set(row.dataset.id, row);
      else row.remove();
    }
    requests.forEach((request, position) => {
      const row = kept.get(request.id) ?? this.#row(request.id);
      if (this.body.rows[position] !== row) this.body.insertBefore(row, this.body.rows[position] ?? null);
      row.querySelector("button").setAttribute("aria-pressed", String(request.id === picked));
      const figures = [request.state, request.num_tokens, request.blocks.length, request.host_blocks.length];
      figures.forEach((figure, column) => { row.cells[column + 1].textContent = figure; });
    });
    if (!requests.length) this.#sayNone();
  }

  #row(id) {
    const row = document.createElement("tr");
    row.dataset.id = id;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = id;
    button.addEventListener("click", () => this.onPick(id));
    row.insertCell().append(button);
    for (let column = 1; column < 5; column += 1) row.insertCell();
    return row;
  }

  #sayNone() {
    const cell = this.body.insertRow().insertCell();
    cell.colSpan = 5;
    cell.className = "muted";
    cell.textContent = "none";
  }
}
