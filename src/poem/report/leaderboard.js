"use strict";
(() => {
  const net = document.getElementById("net");
  const scenario = document.getElementById("scenario");
  const method = document.getElementById("method");
  const said = document.getElementById("said");
  const none = document.getElementById("none");
  const blocks = [...document.querySelectorAll("tbody[data-net]")];

  // Choices: blocks by network and scenario, rows by a part of the method's name; source stays beside them.
  const show = (aloud) => {
    const wanted = method.value.trim().toLowerCase();
    let count = 0;
    for (const block of blocks) {
      let rows = 0;
      for (const row of block.querySelectorAll("tr[data-row]")) {
        const name = row.cells[0].textContent.toLowerCase();
        row.hidden = !(name.includes(wanted) || name === "source");
        rows += name.includes(wanted);
      }
      const fits = (!net.value || block.dataset.net === net.value) && (!scenario.value || block.dataset.scenario === scenario.value);
      block.hidden = !fits || rows === 0;
      count += !block.hidden;
    }
    none.hidden = count > 0;
    if (aloud) said.textContent = `${count} of ${blocks.length} blocks shown`;
  };
  for (const each of [net, scenario]) each.addEventListener("change", () => show(true));
  method.addEventListener("input", () => show(true));
  if (!scenario.value && scenario.options.length > 1) scenario.selectedIndex = 1; // all of them are a long page
  show(false);

  // A link to a run opens the folded list that holds it.
  const open = () => {
    const target = location.hash.startsWith("#run-") && document.getElementById(location.hash.slice(1));
    if (!target) return;
    document.getElementById("runs").open = true;
    target.scrollIntoView();
    target.focus();
  };
  addEventListener("hashchange", open);
  open();
})();
