/* A box that filters a long page of reference: rows of tables, sections, or items of a list, that lack a word are hidden. */
(() => {
  const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
  const article = document.querySelector("article");
  const title = article?.querySelector("h1");
  if (!title) return;
  const rows = [...article.querySelectorAll("tbody tr")];
  const leaves = [...article.querySelectorAll("section section")].filter((one) => !one.querySelector("section, tbody"));
  const items = (one) => one.querySelectorAll(":scope > h2 ~ ul > li"); // a list under a second heading: each item is an entry
  const plain = leaves.flatMap((one) => (items(one).length ? [...items(one)] : [one]));

  const box = Object.assign(document.createElement("input"), { type: "search", className: "filter" });
  box.placeholder = "Filter this page: words that an entry must have";
  box.setAttribute("aria-label", "Filter this page");
  const count = Object.assign(document.createElement("p"), { className: "filter-count", role: "status" });
  title.after(box, count);

  const texts = new Map([...rows, ...plain].map((one) => [one, one.textContent.toLowerCase()]));
  const shown = (one) => one.querySelector("tbody tr:not([hidden])") || plain.some((entry) => one.contains(entry) && !entry.hidden);
  function filter() {
    const wanted = words(box.value);
    let found = 0;
    for (const [one, text] of texts) {
      one.hidden = !wanted.every((word) => text.includes(word));
      found += !one.hidden;
    }
    const blocks = [...article.querySelectorAll(".table-wrapper, section section")].filter((one) => !plain.includes(one));
    for (const one of blocks) one.hidden = wanted.length > 0 && !shown(one);
    article.classList.toggle("filtered", wanted.length > 0);
    count.textContent = wanted.length ? `${found} of ${texts.size} entries` : "";
  }
  box.addEventListener("input", filter);
  box.value = new URLSearchParams(location.search).get("filter") ?? "";
  filter();
})();
