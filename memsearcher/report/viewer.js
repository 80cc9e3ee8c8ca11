"use strict";
// The trajectory viewer. 10,000 rows: one lower-case string per row to search in, and only the rows
// in sight exist as elements. Text of models and passages goes through textContent, always.

(() => {
  const ROW = 74; // height of a row in pixels, as in report.css
  const FIELDS = ["policy", "dataset", "right", "turns", "stop", "mistake"];
  const at = (id) => document.getElementById(id);
  const data = { policies: [], rows: [], chunk: 1, passages: 1, stops: {}, mistakes: {} };
  const loaded = new Map(); // file name → promise of its value
  const arrived = new Map(); // file name → value
  const { h, render } = window.reader;
  let rows = []; // all, as objects
  let found = []; // numbers of those that pass the filters
  let current = -1; // number of the open one
  let timer = 0;

  report.index = (_number, value) => {
    Object.assign(data, value);
    rows = data.rows.map(([policy, dataset, id, question, answer, em, turns, stop, mistake], number) => ({
      number, policy: data.policies[policy], dataset, id, question, answer, right: em ? "1" : "0",
      turns: String(turns), stop, mistake: mistake || "right",
      ending: data.stops[stop] || stop, cause: data.mistakes[mistake] || mistake,
      text: `${question}\n${answer || ""}\n${id}`.toLowerCase(),
    }));
    options("policy", "every policy", data.policies.map((name) => [name, name]));
    const datasets = [...new Set(rows.map((row) => row.dataset))];
    options("dataset", "every benchmark", datasets.map((name) => [name, name]));
    const turns = [...new Set(rows.map((row) => row.turns))].sort((a, b) => a - b);
    options("turns", "any turns", turns.map((n) => [n, n === "1" ? "1 turn" : `${n} turns`]));
    options("stop", "any ending", Object.entries(data.stops));
    options("mistake", "any mistake", Object.entries(data.mistakes));
  };
  report.chunk = (number, value) => arrived.set(`t${number}`, value);
  report.passages = (number, value) => arrived.set(`p${number}`, value);

  function options(id, all, pairs) {
    at(id).replaceChildren(h("option", { value: "" }, all), ...pairs.map(([v, t]) => h("option", { value: v }, t)));
  }

  function load(name) {
    if (!loaded.has(name)) {
      loaded.set(name, new Promise((resolve, reject) => {
        const script = h("script", { src: `data/${name}.js` });
        script.onload = () => resolve(arrived.get(name));
        script.onerror = () => reject(new Error(`data/${name}.js could not be loaded`));
        document.head.append(script);
      }));
    }
    return loaded.get(name);
  }

  // --- list ---------------------------------------------------------------------------------

  function filter() {
    const words = at("q").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = FIELDS.map((id) => [id, at(id).value]).filter(([, value]) => value);
    found = [];
    for (const row of rows) {
      if (wanted.every(([id, value]) => row[id] === value) && words.every((w) => row.text.includes(w)))
        found.push(row.number);
    }
    at("count").textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
    at("spacer").style.height = `${found.length * ROW}px`;
    paint();
  }

  function paint() {
    const list = at("list");
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const last = Math.min(found.length, first + Math.ceil(list.clientHeight / ROW) + 9);
    const shown = [];
    for (let i = first; i < last; i++) shown.push(item(rows[found[i]], i));
    at("spacer").replaceChildren(...shown);
    const open = current >= 0 && document.getElementById(`row-${current}`);
    if (open) list.setAttribute("aria-activedescendant", open.id);
    else list.removeAttribute("aria-activedescendant");
  }

  function item(row, place) {
    const selected = row.number === current;
    const attributes = { id: `row-${row.number}`, class: "row", role: "option", "aria-selected": selected };
    const mark = row.right === "1" ? h("b", { class: "good", title: "right" }, "✓") : h("b", { class: "bad", title: "wrong" }, "✗");
    const meta = `${row.dataset} · ${row.policy} · ${row.turns} ${row.turns === "1" ? "turn" : "turns"}`;
    const answer = row.answer == null ? row.ending : row.answer;
    const element = h("div", attributes,
      h("div", { class: "line" }, mark, h("span", { class: "what" }, row.question)),
      h("div", { class: row.answer == null ? "line dim" : "line" }, `→ ${answer}`),
      h("div", { class: "line dim small" }, meta));
    element.style.top = `${place * ROW}px`;
    element.addEventListener("click", () => select(row.number));
    return element;
  }

  function reveal() {
    const place = found.indexOf(current);
    const list = at("list");
    if (place < 0 || !list.clientHeight) return;
    const top = place * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  }

  function step(by) {
    if (!found.length) return;
    const place = found.indexOf(current);
    select(found[Math.min(found.length - 1, Math.max(0, place < 0 ? 0 : place + by))]);
  }

  // --- address ------------------------------------------------------------------------------

  function address(number) {
    const query = new URLSearchParams();
    for (const id of ["q", ...FIELDS]) if (at(id).value) query.set(id, at(id).value);
    if (number >= 0) query.set("open", `${rows[number].policy}~${rows[number].id}`);
    return query.size ? `#t?${query}` : "#t";
  }

  function select(number) {
    const fresh = current < 0;
    current = number;
    // A step from one trajectory to the next replaces the address, so that Back leads to the list.
    history[fresh && number >= 0 ? "pushState" : "replaceState"](null, "", address(number));
    show();
  }

  function show() {
    at("viewer").classList.toggle("reading", current >= 0);
    reveal();
    paint();
    if (current < 0) at("detail").replaceChildren(h("p", { class: "empty" }, "Choose a trajectory."));
    else read(rows[current]);
  }

  window.viewer = {
    open(query) {
      for (const id of ["q", ...FIELDS]) at(id).value = query.get(id) || "";
      const key = query.get("open");
      const number = key ? rows.findIndex((row) => `${row.policy}~${row.id}` === key) : -1;
      current = number;
      filter();
      show();
      if (key && number < 0) at("detail").replaceChildren(h("p", { class: "empty" }, `Not in this report: ${key}`));
    },
  };

  const passageOf = (n) => arrived.get(`p${Math.floor(n / data.passages)}`)[n % data.passages];

  async function read(row) {
    const detail = at("detail");
    try {
      const chunk = await load(`t${Math.floor(row.number / data.chunk)}`);
      const trajectory = chunk[row.number % data.chunk];
      const numbers = trajectory.turns.flatMap((turn) => turn.hits.map(([n]) => Math.floor(n / data.passages)));
      await Promise.all([...new Set(numbers)].map((n) => load(`p${n}`)));
      if (row.number !== current) return; // another one was chosen meanwhile
      const others = rows.filter((other) => other.id === row.id && other.number !== row.number);
      detail.replaceChildren(...render(row, trajectory, others, passageOf, () => select(-1)));
      detail.scrollTop = 0;
    } catch (error) {
      detail.replaceChildren(h("p", { class: "empty" }, error.message));
    }
  }

  // --- events -------------------------------------------------------------------------------

  function changed() {
    at("list").scrollTop = 0;
    filter();
    history.replaceState(null, "", address(current));
  }
  at("q").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(changed, 60); });
  for (const id of FIELDS) at(id).addEventListener("change", changed);
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("reset").addEventListener("click", () => { for (const id of ["q", ...FIELDS]) at(id).value = ""; changed(); });
  at("list").addEventListener("scroll", () => requestAnimationFrame(paint), { passive: true });
  window.addEventListener("resize", paint);
  document.addEventListener("keydown", (event) => {
    if (document.body.dataset.view !== "viewer" || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape") {
      if (typing) event.target.blur();
      else if (current >= 0) select(-1);
      else location.hash = "#results";
    } else if (typing) return;
    else if (event.key === "/") at("q").focus();
    else if (event.key === "j" || (event.key === "ArrowDown" && event.target === at("list"))) step(1);
    else if (event.key === "k" || (event.key === "ArrowUp" && event.target === at("list"))) step(-1);
    else return;
    event.preventDefault();
  });
})();
