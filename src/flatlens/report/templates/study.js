(() => {
  "use strict";
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const specs = read("specs");
  const themes = read("themes");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let views = new Map();

  async function drawSlot(slot, mode) {
    const options = {
      mode: "vega-lite", actions: false, config: themes[mode], tooltip: { theme: mode },
      renderer: slot.dataset.renderer,
      ast: true, // Vega interprets its expressions instead of compiling them: the page forbids eval
    };
    try {
      views.set(slot, await vegaEmbed(slot, specs[slot.dataset.spec], options));
    } catch (error) {
      slot.textContent = "This figure could not be drawn here; its picture is linked below.";
      console.error(slot.dataset.spec, error);
    }
  }

  async function draw() { // what is folded has no width: it is drawn when it is opened
    const mode = dark.matches ? "dark" : "light";
    for (const slot of document.querySelectorAll("[data-spec]")) {
      if (!views.has(slot) && !slot.closest("details:not([open])")) await drawSlot(slot, mode);
    }
    document.documentElement.dataset.drawn = "yes";
  }

  function redraw() {
    views.forEach((drawn) => drawn.finalize());
    views = new Map();
    draw();
  }

  function unfold() { // the section that the address names
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const fold = target && target.querySelector("details");
    if (fold) fold.open = true;
  }

  function sortable(table) {
    const body = table.tBodies[0];
    table.querySelectorAll("thead button").forEach((button, index) => {
      button.addEventListener("click", () => {
        const head = button.parentElement;
        const down = head.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const numeric = head.classList.contains("number");
        const rows = [...body.rows].map((row) => [row.cells[index].dataset.value, row]);
        const order = (a, b) => {
          if (!numeric) return down ? b[0].localeCompare(a[0]) : a[0].localeCompare(b[0]);
          const [x, y] = [a[0], b[0]].map((text) => Number(text.replace("inf", "Infinity")));
          if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // undefined last, both ways
          return down ? y - x : x - y;
        };
        rows.sort(order).forEach(([, row]) => body.append(row));
      });
    });
  }

  const table = document.getElementById("networks");
  if (table) sortable(table);
  const search = document.getElementById("search");
  if (search) search.addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      row.hidden = !wanted.every((word) => row.dataset.search.toLowerCase().includes(word));
    }
  });
  const layers = document.getElementById("layers");
  if (layers) layers.addEventListener("change", () => table.classList.toggle("layers", layers.checked));

  document.querySelectorAll("details").forEach((fold) => fold.addEventListener("toggle", draw));
  window.addEventListener("hashchange", unfold);
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
    draw(); // now: the folds report that they are open only after the page is printed
  });
  dark.addEventListener("change", redraw);
  unfold();
  draw();
})();
