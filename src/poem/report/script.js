"use strict";
(() => {
  const root = document.documentElement;
  const data = document.getElementById("data"); // the leaderboard has none, and no choice of a metric
  const { titles, tables } = data ? JSON.parse(data.textContent) : { titles: {}, tables: {} };
  const said = document.getElementById("said");

  // Theme: the system's until somebody presses the button; remembered where the browser allows it.
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const showTheme = () => (theme.textContent = isDark() ? "Light mode" : "Dark mode"); // what a press gives
  const keep = (value) => {
    try {
      if (value === undefined) return localStorage.getItem("theme");
      localStorage.setItem("theme", value);
    } catch {
      /* a page opened from a file may not be allowed to remember */
    }
    return null;
  };
  const kept = keep();
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    keep(root.dataset.theme);
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // Print: folded parts are open on paper, and as they were afterwards.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of opened) each.open = false;
    opened = [];
  });

  // Metric: rows keep the order of print in data-at, whatever they are sorted by.
  const rowsOf = (table) => [...table.querySelectorAll("tr[data-row]")];
  for (const table of document.querySelectorAll("table[data-table]")) {
    rowsOf(table).forEach((row, at) => (row.dataset.at = at));
  }
  const showMetric = (key) => {
    root.dataset.metric = key;
    for (const table of document.querySelectorAll("table[data-table]")) {
      const entries = tables[table.dataset.table][key];
      for (const row of rowsOf(table)) {
        row.querySelectorAll("td.n").forEach((cell, at) => {
          const [text, deviation, best] = entries ? entries[row.dataset.at][at] : ["–", "", 0];
          cell.classList.toggle("best", best === 1);
          cell.querySelector(".ours").textContent = text;
          cell.querySelector(".dev").textContent = deviation ? `± ${deviation}` : "";
        });
      }
      const sorted = table.querySelector('th[aria-sort$="cending"]');
      if (sorted) sort(table, sorted, sorted.getAttribute("aria-sort"));
    }
    for (const line of document.querySelectorAll(".measure")) line.textContent = titles[key];
  };
  const metric = document.getElementById("metric");
  if (metric) {
    metric.addEventListener("change", () => {
      showMetric(metric.value);
      said.textContent = `Tables show ${titles[metric.value]}`;
    });
    if (metric.value && metric.value !== "top1") showMetric(metric.value); // a reload may keep the choice
  }
  const paper = document.getElementById("paper");
  if (paper) {
    // a page without any of the paper's numbers has no box for them
    const showPaper = () => root.classList.toggle("no-paper", !paper.checked);
    paper.addEventListener("change", showPaper);
    showPaper();
  }

  // Sorting: inside each block of rows; a third press gives the order of print back.
  const valueOf = (row, at) => {
    const cell = row.cells[at];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value); // a cell with more than its number
    const text = (cell.querySelector(".ours") || cell).textContent.trim();
    const number = parseFloat(text.replaceAll(",", "").replace("−", "-"));
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
    return typeof a === "number" ? -1 : 1;
  };
  function sort(table, head, order) {
    const at = head.cellIndex;
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
      rows.forEach((row) => (row.dataset.at ??= row.sectionRowIndex));
      const missing = (row) => valueOf(row, at) === "–";
      rows.sort((a, b) => {
        if (order === "none") return a.dataset.at - b.dataset.at;
        if (missing(a) !== missing(b)) return missing(a) ? 1 : -1;
        const way = order === "ascending" ? 1 : -1;
        return way * compare(valueOf(a, at), valueOf(b, at)) || a.dataset.at - b.dataset.at;
      });
      body.append(...rows);
    }
    for (const each of table.querySelectorAll("th[aria-sort]")) each.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", order);
  }
  for (const button of document.querySelectorAll("table.sortable th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const next = { none: "descending", descending: "ascending", ascending: "none" };
      const order = next[head.getAttribute("aria-sort")];
      sort(head.closest("table"), head, order);
      said.textContent = order === "none" ? "In the order of print" : `Sorted by ${button.textContent}, ${order}`;
    });
  }
})();
