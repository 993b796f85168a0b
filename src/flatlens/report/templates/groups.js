// Tables in groups that open and close, and a search over their rows. Without a script everything is open.
(() => {
  "use strict";
  const MANY = 40; // rows: more begin closed

  function folded(table, found) {
    const groups = [...table.tBodies].filter((body) => body.querySelector("tr.group"));
    const open = (body, yes) => {
      body.classList.toggle("closed", !yes);
      body.querySelector("tr.group button").setAttribute("aria-expanded", String(yes));
    };
    const rows = [...table.querySelectorAll("tbody tr[data-search]")];
    groups.forEach((body) => {
      body.querySelector("tr.group button").addEventListener("click", () => open(body, body.classList.contains("closed")));
      open(body, rows.length <= MANY);
    });
    return { groups, rows, open };
  }

  document.querySelectorAll("[data-searches]").forEach((tools) => {
    const table = document.getElementById(tools.dataset.searches);
    const { groups, rows, open } = folded(table);
    const count = tools.querySelector("output");
    const say = (shown) => { count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`; };
    tools.hidden = false;
    tools.querySelector("input").addEventListener("input", (event) => {
      const wanted = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row) => {
        const fits = wanted.every((word) => row.dataset.search.toLowerCase().includes(word));
        row.hidden = !fits;
        shown += fits;
      });
      [...table.tBodies].forEach((body) => { // also one whose heading is not a button: a family of measures
        body.hidden = [...body.querySelectorAll("tr[data-search]")].every((row) => row.hidden);
        if (groups.includes(body)) open(body, wanted.length ? !body.hidden : rows.length <= MANY);
      });
      say(shown);
    });
    tools.querySelectorAll("button[data-all]").forEach((button) => {
      button.addEventListener("click", () => groups.forEach((body) => open(body, button.dataset.all === "open")));
      button.hidden = groups.length === 0;
    });
    say(rows.length);
  });
})();
