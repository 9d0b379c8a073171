// Values of an encoding for one query, per head, on several grids, and after a rotation of the image by 90 degrees.
// The data are in the document: 16-bit steps between two bounds, one per offset or one per pair of patches; 65535 is hidden (-inf).
(() => {
  const source = document.currentScript.previousElementSibling, root = source.previousElementSibling;
  const data = JSON.parse(source.textContent);
  const HIDDEN = 65535;
  const first = Object.values(Object.values(data)[0])[0];
  const side = Number(Object.keys(first.grids)[0]);
  const state = { name: Object.keys(data)[0], option: "", side, view: "values", row: 0.3, col: 0.7 };

  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  // value of (head, query, key), each patch as [row, column]; -Infinity if hidden
  const decoded = new Map();
  const reader = (grid, side) => {
    if (!decoded.has(grid)) {
      const bytes = Uint8Array.from(atob(grid.values), (c) => c.charCodeAt(0));
      decoded.set(grid, new Uint16Array(bytes.buffer));
    }
    const steps = decoded.get(grid), wide = 2 * side - 1;
    return (head, [qr, qc], [kr, kc]) => {
      const index = grid.offsets
        ? (head * wide + kr - qr + side - 1) * wide + kc - qc + side - 1
        : (head * side * side + qr * side + qc) * side * side + kr * side + kc;
      const step = steps[index];
      return step === HIDDEN ? -Infinity : grid.low + (step / (HIDDEN - 1)) * (grid.high - grid.low);
    };
  };

  const rotatedPatch = ([row, col], side) => [col, side - 1 - row]; // a rotation of the image by 90 degrees
  const difference = (a, b) => (a === b ? 0 : a - b);
  const query = () => [state.row, state.col].map((part) => Math.min(state.side - 1, Math.floor(part * state.side)));

  // blue for low, white in between and orange for high; the palette of the figures
  const LOW = [0, 114, 178], HIGH = [213, 94, 0];
  const colour = (share) => {
    const end = share < 0 ? LOW : HIGH, part = Math.min(1, Math.abs(share));
    return `rgb(${end.map((c) => Math.round(247 + part * (c - 247))).join(",")})`;
  };

  const select = (label, values, key) => {
    const made = element("select", { name: key, "aria-label": label });
    for (const value of values) made.append(element("option", { value }, value));
    made.value = state[key];
    made.addEventListener("input", () => {
      state[key] = made.value;
      if (key === "name") controls();
      draw();
    });
    return element("label", {}, `${label} `, made);
  };

  const choice = (key, pairs) => element("span", { class: "choice", role: "group" }, ...pairs.map(([value, words]) => {
    const button = element("button", { type: "button", "aria-pressed": String(state[key] === value), "data-value": value }, words);
    button.addEventListener("click", () => {
      state[key] = value;
      for (const other of button.parentNode.children) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
    return button;
  }));

  const bar = element("div", { class: "controls" });
  const heads = element("div", { class: "heads" });
  const text = element("output");
  root.replaceChildren(bar, heads, element("p", {}, text));

  const controls = () => {
    const options = Object.keys(data[state.name]);
    if (!options.includes(state.option)) state.option = options[0];
    bar.replaceChildren(
      select("encoding", Object.keys(data), "name"),
      select("options", options, "option"),
      choice("side", Object.keys(data[state.name][state.option].grids).map((s) => [Number(s), `${s} x ${s}`])),
      choice("view", [["values", "values"], ["rotated", "image rotated by 90°"], ["difference", "difference"]]),
    );
  };

  const figures = [];
  const pick = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const inside = (part) => Math.min(0.999, Math.max(0, part));
    state.col = inside((event.clientX - box.left) / box.width);
    state.row = inside((event.clientY - box.top) / box.height);
    draw();
  };
  const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const figureOf = (head) => {
    if (figures[head]) return figures[head];
    const made = element("canvas", { width: 320, height: 320, tabindex: 0, role: "img" });
    made.addEventListener("pointerdown", (event) => { made.setPointerCapture(event.pointerId); pick(event); });
    made.addEventListener("pointermove", (event) => { if (event.buttons) pick(event); });
    made.addEventListener("keydown", (event) => {
      if (!ARROWS[event.key]) return;
      event.preventDefault();
      const moved = query().map((part, axis) => Math.min(state.side - 1, Math.max(0, part + ARROWS[event.key][axis])));
      [state.row, state.col] = moved.map((part) => (part + 0.5) / state.side);
      draw();
    });
    const caption = element("figcaption");
    return (figures[head] = { canvas: made, caption, figure: element("figure", {}, made, caption) });
  };

  const draw = () => {
    const { side } = state, kind = data[state.name][state.option].kind;
    const grid = data[state.name][state.option].grids[side], value = reader(grid, side), at = query();
    const values = (head, patch) => value(head, at, patch);
    const rotated = (head, patch) => value(head, rotatedPatch(at, side), rotatedPatch(patch, side));
    // white is 0, or the bound next to it
    const base = grid.low > 0 ? grid.low : Math.min(grid.high, 0);
    const span = Math.max(1e-9, grid.high - base, base - grid.low);
    let changed = 0;
    const shown = [...Array(grid.heads).keys()].map((head) => {
      const { figure, canvas, caption } = figureOf(head), pen = canvas.getContext("2d"), cell = canvas.width / side;
      let low = Infinity, high = -Infinity;
      for (let row = 0; row < side; row++) for (let col = 0; col < side; col++) {
        const [before, after] = [values(head, [row, col]), rotated(head, [row, col])], gap = difference(after, before);
        changed = Math.max(changed, Math.abs(gap));
        const number = { values: before, rotated: after, difference: gap }[state.view];
        if (Number.isFinite(number)) { low = Math.min(low, number); high = Math.max(high, number); }
        const share = (state.view === "difference" ? number : number - base) / span;
        pen.fillStyle = Number.isNaN(number) || number === -Infinity ? "#555" : colour(share);
        pen.fillRect(Math.floor(col * cell), Math.floor(row * cell), Math.ceil(cell), Math.ceil(cell));
      }
      pen.lineWidth = 3;
      pen.strokeStyle = "#111";
      pen.strokeRect(at[1] * cell + 1.5, at[0] * cell + 1.5, cell - 3, cell - 3);
      const words = `${grid.heads > 1 ? `head ${head}` : "all heads"}: ${low.toPrecision(3)} to ${high.toPrecision(3)}`;
      canvas.setAttribute("aria-label", words);
      caption.textContent = words;
      return figure;
    });
    if (shown.length !== heads.children.length) heads.replaceChildren(...shown); // else the focus would be lost
    const same = changed <= ((grid.high - grid.low) / HIDDEN) * 2;
    const size = Number.isFinite(changed) ? `changes values by up to ${changed.toPrecision(3)}` : "changes which patches are hidden";
    text.textContent = `Values are ${kind}. Query at row ${at[0]}, column ${at[1]}. A rotation of the image by 90° ${same ? "changes nothing" : size}.`;
    root.dataset.changed = same ? "0" : String(changed);
  };

  controls();
  draw();
})();
