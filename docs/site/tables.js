// Sort tables of eight rows or more by a click on a column head, or by Enter on it: ascending, descending, original order.
// A cell is numeric if it begins with a number: "0.97 (0.95 to 0.99)", "−0.4", "94 %".
(() => {
  const number = (text) => {
    const match = text.replace(/[−–]/g, "-").replace(/,(?=\d{3})/g, "").match(/^[-+]?\d*\.?\d+(e[-+]?\d+)?/i);
    return match ? parseFloat(match[0]) : NaN;
  };
  const words = (row, column) => (row.cells[column] ? row.cells[column].textContent.trim() : "");

  const sort = (table, rows, column, order) => {
    const numeric = rows.every((row) => !words(row, column) || !isNaN(number(words(row, column))));
    const sorted = order === "none" ? rows : [...rows].sort((a, b) => {
      const [x, y] = [words(a, column), words(b, column)];
      if (!x || !y) return !x - !y; // empty cells come last, up or down
      const way = numeric ? number(x) - number(y) : x.localeCompare(y);
      return order === "ascending" ? way : -way;
    });
    table.tBodies[0].append(...sorted);
  };

  for (const table of document.querySelectorAll("article table")) {
    const body = table.tBodies[0];
    if (!table.tHead || !body || body.rows.length < 8) continue;
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" };
        const order = next[head.getAttribute("aria-sort")];
        for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", order);
        sort(table, rows, column, order);
      });
    });
  }
})();
